"""Report what this machine can do, what is missing, and how to fix it.

A *problem* keeps the quick lab from running:

- Python or a package is missing or too old
- the cache folder has no room or cannot be written
- there is too little memory
- there is no model and no way to download it

Everything else is a *note*: no GPU, compiler, sandbox, JupyterLab or peer. The lab runs
without them, and the note says what you lose. The examination takes a few seconds, most
of them for importing PyTorch and measuring read bandwidth.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

MEMORY_NEEDED = 2 * 2**30  # the default model in fp32, its logits, PyTorch and a kernel
PEERS = {"llama_cpp": "llama-cpp-python", "torchao": "torchao", "lm_eval": "lm-eval"}
SHOWN = ("cpu", "cores", "threads", "memory", "gpu", "bandwidth", "bf16", "instruction_sets")
SHOWN += ("python", "torch", "compiler", "sandbox", "cache")

Finding = tuple[str, str]  # what is wrong, and the fix


def examine(*, network: bool = False) -> dict:
    """Return the keys of `labkit doctor`: ok, machine{}, problems[], notes[]."""
    facts: dict = {}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("psutil"):
        facts = _machine()
    facts["sandbox"] = "bubblewrap" if _bubblewrap_works() else "weak"
    facts["compiler"] = next(filter(None, map(shutil.which, ("c++", "g++", "clang++", "cl"))), None)
    problems, notes = [*_packages(), *_cache_folder(), *_memory(facts)], [*_notes(facts)]
    offline = os.environ.get("LABKIT_OFFLINE", "") not in ("", "0")
    (problems if offline else notes).extend(_model())
    if network:
        problems += _network()
    findings = {
        name: [{"what": what, "fix": fix} for what, fix in entries]
        for name, entries in (("problems", problems), ("notes", notes))
    }
    return {"ok": not problems, "machine": facts, **findings}


def render(diagnosis: dict) -> str:
    """Return a diagnosis as text."""
    facts = dict(diagnosis["machine"])
    facts["memory"] = f"{facts.get('memory_bytes', 0) / 2**30:.1f} GiB"
    facts["bandwidth"] = f"{facts.get('read_bandwidth_gb_s', 0):.1f} GB/s read"
    lines = []
    for name in SHOWN:
        value = facts.get(name)
        words = ", ".join(value) if isinstance(value, list | tuple) else value
        lines.append(f"{name:17}{'none' if words is None else words}")
    for title in ("problems", "notes"):
        lines += ["", f"{title}:"] if diagnosis[title] else []
        lines += [f"  {entry['what']}\n      fix: {entry['fix']}" for entry in diagnosis[title]]
    verdict = "The quick lab can run here." if diagnosis["ok"] else "The quick lab cannot run yet."
    return "\n".join([*lines, "", verdict])


def _packages() -> Iterator[Finding]:
    """Compare labkit's requirements with this Python and its packages."""
    if sys.version_info < (3, 11):  # noqa: UP036  (a checkout can be started with any Python)
        fix = "install Python 3.11 or newer and make a new environment"
        yield f"Python is {sys.version.split()[0]}", fix
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in metadata.requires("labkit") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        yield "labkit is not installed in this Python", "pip install -e . in the checkout"
        return
    for requirement in requirements:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version or 'missing'}", f'pip install "{requirement}"'


def _existing_cache():
    """Return the cache folder, or the folder above it that exists."""
    from labkit.files import cache_dir

    return next(path for path in (cache_dir(), *cache_dir().parents) if path.exists())


def _cache_folder() -> Iterator[Finding]:
    from labkit.files import cache_dir
    from labkit.lab.assets import cached, registry

    folder, existing = cache_dir(), _existing_cache()
    if not os.access(existing, os.W_OK):
        yield f"the cache folder {folder} is read-only", "set LABKIT_CACHE to another folder"
        return
    missing = [asset for asset in registry().values() if not asset.optional and not cached(asset)]
    need, free = sum(asset.disk_need for asset in missing), shutil.disk_usage(existing).free
    if free < need:
        fix = "make room, or set LABKIT_CACHE to a folder on another disk"
        yield f"{folder} has {free / 1e6:.0f} MB free and needs {need / 1e6:.0f} MB", fix


def _memory(facts: dict) -> Iterator[Finding]:
    free = facts.get("memory_available_bytes", MEMORY_NEEDED)
    if free < MEMORY_NEEDED:
        needs = f"the quick lab needs {MEMORY_NEEDED / 2**30:.0f}"
        yield f"{free / 2**30:.1f} GiB of memory are free; {needs}", "close other programs"


def _model() -> Iterator[Finding]:
    from labkit.lab.assets import cached

    if not cached("default"):
        fix = "labkit pull (or labkit pull --from FOLDER without a network)"
        yield "the default model is not downloaded", fix


def _network() -> Iterator[Finding]:
    """Ask pip's configured index for the versions of one small package."""
    command = "-m pip index versions pip --timeout 10 --retries 0".split()
    asked = subprocess.run([sys.executable, *command], capture_output=True, timeout=60, check=False)
    if asked.returncode:
        fix = "check the network or pip's settings, or use --from FOLDER"
        yield "the package index does not answer", fix


def _machine() -> dict:
    import psutil

    from labkit.files import cache_dir
    from labkit.lab.measure.bandwidth import read_bandwidth
    from labkit.lab.measure.machine import machine

    here = machine()
    return {
        **here.as_dict(),
        "memory_available_bytes": psutil.virtual_memory().available,
        "read_bandwidth_gb_s": round(read_bandwidth() / 1e9, 2),
        "bf16": _bf16(here.instruction_sets),
        "versions": here.versions,
        "cache": str(cache_dir()),
        "cache_free_bytes": shutil.disk_usage(_existing_cache()).free,
    }


def _bf16(instructions) -> str:
    """Return "native" if the processor multiplies bf16, else "emulated"."""
    import torch

    if torch.cuda.is_available():
        native = torch.cuda.get_device_capability(0) >= (8, 0)
    else:
        native = bool({"avx512_bf16", "amx_bf16", "bf16"} & set(instructions))
    return "native" if native else "emulated"


def _bubblewrap_works() -> bool:
    command = shutil.which("bwrap")
    if command is None:
        return False
    probe = [command, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _notes(facts: dict) -> Iterator[Finding]:
    """Find what does not keep the quick lab from running."""
    if "gpu" in facts:  # else PyTorch is missing and nothing was measured
        if facts["gpu"] is None:
            yield "no GPU: GPU numbers say 'unmeasured'", "nothing to do, or use Colab for them"
        if not {"avx2", "avx512f", "asimd"} & set(facts["instruction_sets"]):
            yield "the CPU has no AVX2, AVX-512 or NEON: packed formats are slow", "nothing to do"
        if facts["bf16"] == "emulated":
            fix = "nothing to do; prefill in fp32 may be faster"
            yield "bf16 saves bytes here, but no arithmetic", fix
    if facts["compiler"] is None:
        yield "no C++ compiler: PyTorch's own kernels are used", "install g++ or clang"
    if facts["sandbox"] == "weak":
        what = "bubblewrap does not work: generated code does not run unless you allow it"
        yield what, "install bubblewrap (Linux)"
    if importlib.util.find_spec("jupyterlab") is None:
        what = "JupyterLab is missing: notebooks run with labkit run, but do not open"
        yield what, 'pip install "labkit[lab]"'
    missing = [name for module, name in PEERS.items() if importlib.util.find_spec(module) is None]
    if missing:
        yield f"no comparison with: {', '.join(missing)}", "make peers"
