"""labkit: a lab for LLM inference.

    from labkit import open_model
    from labkit.generate import generate

    model = open_model("default", "int4")
    print(generate(model, "def add(a, b):", max_new_tokens=32).text)

The names below are imported on first use (PEP 562). So `import labkit` takes
milliseconds and does not import torch, and a notebook can choose the number of threads
before torch starts. The packages are attributes, too: `labkit.plan`, `labkit.generate`.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# module -> the names it defines. `generate` and `measure` are packages, and a name cannot be
# both a package and a function. Import these functions from their packages.
_MODULES = {
    "labkit.errors": "BadRequest",
    "labkit.files": "cache_dir",
    # models and data
    "labkit.lab.assets": "asset_path pull",
    "labkit.lab.stack.open": "load_model open_model",
    "labkit.lab.texts": "calibration_text evaluation_text humaneval mmlu",
    # measuring
    "labkit.lab.measure.bandwidth": "read_bandwidth",
    "labkit.lab.measure.bytes": "tensor_bytes",
    "labkit.lab.measure.clock": "Timing interleave ratio",
    "labkit.lab.measure.machine": "machine",
    "labkit.lab.measure.record": "Record RecordWriter read_records",
    # arithmetic that needs no model
    "labkit.plan.kv": "KVShape LayerKV kv_bytes kv_bytes_per_token",
    # caches, the model, generating
    "labkit.cache": "CACHES make_cache",
    "labkit.cache.contiguous": "ContiguousCache",
    "labkit.cache.contract": "KVCache",
    "labkit.model.decoder": "Decoder",
    "labkit.model.config": "ModelConfig",
    "labkit.generate": "Completion Sampling stream",
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_ROOMS = "cache errors files formats generate kernels lab model plan quant speculate".split()

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str):
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value  # next time without this function
        return value
    if name in _ROOMS:
        try:
            return importlib.import_module(f"labkit.{name}")
        except ModuleNotFoundError as missing:
            if missing.name != f"labkit.{name}":
                raise
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_ROOMS})
