"""What this machine can do, what is missing, and the fix.

A *problem* keeps the quick lab from running here: too old a Python, a package missing or too old, no room
or no right to write in the cache folder, too little memory, no model and no way to get it. Everything
else is a *note*: no GPU, compiler, sandbox, JupyterLab or peer; the lab runs without, and says what is lost.
Costs a few seconds, most of it importing PyTorch and one read-bandwidth measurement.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata

MEMORY_NEEDED = 2 * 2**30  # the default model in float32, its logits, PyTorch and a kernel
PEERS = {"llama_cpp": "llama-cpp-python", "torchao": "torchao", "lm_eval": "lm-eval"}


def examine(*, network: bool = False) -> dict:
    """The answer of `labkit doctor`: `ok`, `machine{}`, `problems[]`, `notes[]`, each entry with its fix."""
    problems, notes = [], []
    problems += _python() + _packages()
    problems += _cache_folder()
    facts: dict = {}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("psutil"):
        facts = _machine()
        if facts["memory_available_bytes"] < MEMORY_NEEDED:
            problems.append(_entry(
                f"{facts['memory_available_bytes'] / 2**30:.1f} GiB of memory are free; the quick lab needs 2",
                "close other programs",
            ))  # fmt: skip
        notes += _speed_notes(facts)
    (problems if _offline() else notes).extend(_model())
    if network:
        problems += _network()
    facts["sandbox"] = "bubblewrap" if _bubblewrap_works() else "weak"
    facts["compiler"] = next(filter(None, map(shutil.which, ("c++", "g++", "clang++", "cl"))), None)
    notes += _tools(facts)
    return {"ok": not problems, "machine": facts, "problems": problems, "notes": notes}


def render(diagnosis: dict) -> str:
    """The same for people."""
    facts = diagnosis["machine"]
    shown = ("cpu", "cores", "threads", "memory", "gpu", "bandwidth", "bf16", "instruction_sets", "python", "torch",
             "compiler", "sandbox", "cache")  # fmt: skip
    facts = {**facts, "memory": f"{facts.get('memory_bytes', 0) / 2**30:.1f} GiB",
             "bandwidth": f"{facts.get('read_bandwidth_gb_s', 0):.1f} GB/s read"}  # fmt: skip
    lines = [f"{name:17}{_words(facts.get(name))}" for name in shown]
    for title in ("problems", "notes"):
        lines += ["", f"{title}:"] if diagnosis[title] else []
        lines += [f"  {entry['what']}\n      fix: {entry['fix']}" for entry in diagnosis[title]]
    verdict = "The quick lab can run here." if diagnosis["ok"] else "The quick lab cannot run yet."
    return "\n".join([*lines, "", verdict])


def _words(value) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str("none" if value is None else value)


def _entry(what: str, fix: str) -> dict[str, str]:
    return {"what": what, "fix": fix}


def _offline() -> bool:
    return os.environ.get("LABKIT_OFFLINE", "") not in ("", "0")


def _python() -> list[dict]:
    if sys.version_info >= (3, 11):  # noqa: UP036  (a checkout can be started with any Python)
        return []
    return [_entry(f"Python is {sys.version.split()[0]}", "install Python 3.11 or newer and make a new environment")]


def _packages() -> list[dict]:
    """Every requirement of labkit itself that is missing or too old, from its own metadata."""
    try:
        from packaging.requirements import Requirement

        wanted = map(Requirement, metadata.requires("labkit") or ())
    except (ImportError, metadata.PackageNotFoundError):
        return [_entry("labkit is not installed in this Python", "pip install -e . in the checkout, or make lab")]
    found = []
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(_entry(f"{requirement.name} is {version or 'missing'}", f'pip install "{requirement}"'))
    return found


def _cache_folder() -> list[dict]:
    from labkit.assets import cache_dir, cached, registry

    folder = existing = cache_dir()
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        return [_entry(f"the cache folder {folder} cannot be written", "set LABKIT_CACHE to a folder of your own")]
    missing = [asset for asset in registry().values() if not asset.optional and not cached(asset)]
    need, free = sum(asset.disk_need for asset in missing), shutil.disk_usage(existing).free
    if free < need:
        return [_entry(f"{folder} has {free / 1e6:.0f} MB free and the lab's files need {need / 1e6:.0f} MB",
                       "make room, or set LABKIT_CACHE to a folder on another disk")]  # fmt: skip
    return []


def _model() -> list[dict]:
    from labkit.assets import cached

    if cached("default"):
        return []
    return [_entry("the default model is not here yet", "labkit pull (or labkit pull --from FOLDER without a network)")]


def _network() -> list[dict]:
    """Whether pip's configured index answers: asks it for one small package's versions."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "pip", "--timeout", "10", "--retries", "0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if asked.returncode == 0:
        return []
    return [_entry("the package index does not answer", "check the network or pip's settings, or use --from FOLDER")]


def _machine() -> dict:
    import psutil

    from labkit.assets import cache_dir
    from labkit.measure.bandwidth import read_bandwidth
    from labkit.measure.machine import machine

    here = machine()
    return {
        **here.as_dict(),
        "memory_available_bytes": psutil.virtual_memory().available,
        "read_bandwidth_gb_s": round(read_bandwidth() / 1e9, 2),
        "bf16": _bf16(here.instruction_sets),
        "versions": here.versions,
        "cache": str(cache_dir()),
        "cache_free_bytes": shutil.disk_usage(next(p for p in (cache_dir(), *cache_dir().parents) if p.exists())).free,
    }


def _bf16(instructions) -> str:
    """`native` where the processor multiplies bf16; libraries answer yes where they merely emulate it."""
    import torch

    if torch.cuda.is_available():
        return "native" if torch.cuda.get_device_capability(0) >= (8, 0) else "emulated"
    return "native" if {"avx512_bf16", "amx_bf16", "bf16"} & set(instructions) else "emulated"


def _speed_notes(facts: dict) -> list[dict]:
    notes = []
    if facts["gpu"] is None:
        notes.append(_entry("no GPU: GPU numbers say 'unmeasured'", "nothing to do, or use Colab for those cells"))
    if not {"avx2", "avx512f", "asimd"} & set(facts["instruction_sets"]):
        notes.append(_entry("the CPU names neither AVX2, AVX-512 nor NEON", "expect slow packed formats"))
    if facts["bf16"] == "emulated":
        notes.append(_entry("bf16 saves bytes here, not arithmetic", "nothing to do; prefill in float32 may be faster"))
    return notes


def _bubblewrap_works() -> bool:
    command = shutil.which("bwrap")
    if command is None:
        return False
    try:
        probe = [command, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"]
        return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _tools(facts: dict) -> list[dict]:
    notes = []
    if facts["compiler"] is None:
        notes.append(_entry("no C++ compiler: PyTorch's own kernels are used", "install g++ or clang"))
    if facts["sandbox"] == "weak":
        notes.append(_entry("bubblewrap does not work here: generated code is not run unless you allow it",
                            "install bubblewrap (Linux)"))  # fmt: skip
    if importlib.util.find_spec("jupyterlab") is None:
        notes.append(_entry("JupyterLab is missing: labkit run works, reading interactively does not",
                            'pip install "labkit[lab]"'))  # fmt: skip
    missing = [package for module, package in PEERS.items() if importlib.util.find_spec(module) is None]
    if missing:
        notes.append(_entry(f"not compared with: {', '.join(missing)}", "make peers"))
    return notes
