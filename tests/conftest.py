"""Options and fixtures that every test may use: offline, deterministic, a fair share of the cores."""

from __future__ import annotations

import os

# Before torch is imported anywhere: parallel test processes share the cores instead of fighting for them.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that would reach for a hub fails at once instead
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

try:
    import hypothesis

    # The same examples in every run: a test that fails here fails everywhere.
    hypothesis.settings.register_profile("labkit", derandomize=True, deadline=None, database=None, max_examples=20)
    hypothesis.settings.load_profile("labkit")
except ImportError:
    pass


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tests that touch tensors run: cpu (default), cuda, cuda:1")


@pytest.fixture(scope="session")
def device(request) -> str:
    return request.config.getoption("--device")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device").partition(":")[0] == "cpu":
        skip = pytest.mark.skip(reason="needs an accelerator: pytest --device cuda")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_runtest_setup(item):
    """A test marked real_model finds model and task sets in the cache (skipped only where told to be offline)."""
    if "real_model" in item.keywords:
        from labkit import assets

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
