"""labkit: a lab for LLM inference.

    from labkit import load_model
    from labkit.generate import generate
    print(generate(load_model(), "def add(a, b):", max_new_tokens=32).text)

The names below load on first use (PEP 562), so that `import labkit` takes milliseconds and no torch:
`labkit plan` answers at once, and a notebook may choose its thread count before torch starts.
Rooms are reached as attributes too: `labkit.plan`, `labkit.generate`, …
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# name -> the module that defines it. `generate` and `measure` are rooms; their functions of the same
# name are imported from the room, because a name cannot be a module today and a function tomorrow.
_NAMES = {
    "BadRequest": "labkit.errors",
    # where models and data come from
    "asset_path": "labkit.assets",
    "cache_dir": "labkit.assets",
    "pull": "labkit.assets",
    "humaneval": "labkit.texts",
    "mmlu": "labkit.texts",
    "calibration_text": "labkit.texts",
    "evaluation_text": "labkit.texts",
    # measuring
    "interleave": "labkit.measure.clock",
    "ratio": "labkit.measure.clock",
    "Timing": "labkit.measure.clock",
    "tensor_bytes": "labkit.measure.bytes",
    "read_bandwidth": "labkit.measure.bandwidth",
    "machine": "labkit.measure.machine",
    "Record": "labkit.measure.record",
    "RecordWriter": "labkit.measure.record",
    "read_records": "labkit.measure.record",
    # arithmetic that needs no model
    "KVShape": "labkit.plan.memory",
    "LayerKV": "labkit.plan.memory",
    "kv_bytes": "labkit.plan.memory",
    "kv_bytes_per_token": "labkit.plan.memory",
    # caches
    "CACHES": "labkit.cache",
    "ContiguousCache": "labkit.cache.contiguous",
    "KVCache": "labkit.cache.contract",
    "make_cache": "labkit.cache",
    # the model and plain decoding
    "Decoder": "labkit.model.decoder",
    "ModelConfig": "labkit.model.config",
    "load_model": "labkit.model.load",
    "Completion": "labkit.generate.completion",
    "Sampling": "labkit.generate.sampling",
    "stream": "labkit.generate.loop",
}

_ROOMS = {
    "assets", "batching", "bench", "cache", "cli", "doctor", "errors", "evals", "formats", "generate", "hf",
    "kernels", "measure", "model", "notebook", "out", "plan", "quant", "runner", "show", "speculate", "stack", "texts",
}  # fmt: skip

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
