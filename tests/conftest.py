"""Options and fixtures that every test may use: offline, deterministic, a fair share of the cores."""

from __future__ import annotations

import os

# Before torch is imported anywhere: parallel test processes share the cores instead of fighting for them. Not in the
# process that starts them, since they would inherit all cores from it.
if _workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # a test that would reach for a hub fails at once instead
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

try:
    import hypothesis

    # The same examples in every run: a test that fails here fails everywhere.
    hypothesis.settings.register_profile(
        "labkit", derandomize=True, deadline=None, database=None, max_examples=20
    )
    hypothesis.settings.load_profile("labkit")
except ImportError:
    pass


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        help="where tests that touch tensors run: cpu (default), cuda, cuda:1",
    )


@pytest.fixture(scope="session")
def device(request) -> str:
    return request.config.getoption("--device")


# What touches tensors and is no CPU kernel: runs on the device that --device names.
ON_DEVICE = (
    "tests/core/cache/",
    "tests/core/generate/",
    "tests/core/quant/",
    "tests/lab/cuda/",
    "tests/core/kernels/test_packed.py",
    "tests/core/kernels/test_triton_packed.py",
)


def redirected(device: str):
    """Inside, tensors that would be made on the CPU are made on `device`: tests need not know where they run.

    Numbers drawn with a CPU generator are drawn there and moved, so that they are the same on every device."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    def is_cpu(place) -> bool:
        return isinstance(place, (str, torch.device)) and torch.device(place).type == "cpu"

    class Redirected(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if function in _device_constructors() and (
                kwargs.get("device") is None or is_cpu(kwargs["device"])
            ):
                generator = kwargs.get("generator")
                if generator is not None and generator.device.type == "cpu":
                    return function(*args, **kwargs | {"device": "cpu"}).to(device)
                kwargs["device"] = device
            elif function is torch.Tensor.to:
                args = tuple(device if is_cpu(place) else place for place in args)
                kwargs = {
                    name: device if is_cpu(place) else place for name, place in kwargs.items()
                }
            return function(*args, **kwargs)

    return Redirected()


@pytest.fixture(autouse=True)
def _on_the_device(request, device):
    if "on_device" not in request.keywords or device.partition(":")[0] == "cpu":
        yield
        return
    with redirected(device):
        yield


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid.replace("\\", "/").startswith(ON_DEVICE):
            item.add_marker(pytest.mark.on_device)
    if config.getoption("--device").partition(":")[0] == "cpu":
        skip = pytest.mark.skip(reason="needs an accelerator: pytest --device cuda")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_runtest_setup(item):
    """A test marked real_model finds model and task sets in the cache (skipped only where told to be offline)."""
    if "real_model" in item.keywords:
        from labkit.lab import assets

        try:
            assets.pull()  # and the task sets, which are small
        except assets.NotAvailable as error:
            if not os.environ.get("LABKIT_OFFLINE"):
                raise
            pytest.skip(str(error))


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LABKIT_WHEELS", raising=False)
    monkeypatch.delenv("LABKIT_OFFLINE", raising=False)
    return tmp_path / "cache"


def pytest_generate_tests(metafunc):
    """Each instruction set takes seconds to compile: this CPU's best and the portable one are tested fast, others slow."""
    if "instruction_set" in metafunc.fixturenames:
        from labkit.kernels.native import build as native

        here = native.instruction_sets()
        marks = {name: [] if name in (here[0], "portable") else [pytest.mark.slow] for name in here}
        metafunc.parametrize(
            "instruction_set",
            [pytest.param(name, marks=marks[name]) for name in here],
            indirect=True,
        )


@pytest.fixture
def instruction_set(request, monkeypatch) -> str:
    """The native kernels run in it; one test for each that this CPU has."""
    from labkit.kernels.native import build as native

    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("LABKIT_NATIVE", request.param)
    return request.param
