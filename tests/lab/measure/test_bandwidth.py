"""Test bandwidth and FLOP/s: the buffer, the threads, and that they are measured once."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.lab.measure import bandwidth
from labkit.lab.measure.machine import last_level_cache_bytes, machine


def test_the_buffer_is_far_larger_than_the_last_level_cache():
    assert (
        bandwidth.buffer_bytes() >= min(8 * last_level_cache_bytes(), 256 * 2**20)
        or machine().memory_bytes < 2**32
    )


def test_bytes_per_second_are_buffer_over_best_pass(monkeypatch):
    class Timing:
        def __init__(self, *times):
            self.times_s = times

    seen = {}

    def fake(passes, **options):
        seen.update(passes=list(passes), threads=torch.get_num_threads())
        return {"sum": Timing(3.0, 0.5), "dot": Timing(1.0, 2.0), "matrix-vector": Timing(4.0)}

    monkeypatch.setattr(bandwidth, "interleave", fake)
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda device: 2**22)
    bandwidth._read_bandwidth.cache_clear()
    before = torch.get_num_threads()
    try:
        assert bandwidth.read_bandwidth(threads=1) == 2**22 / 0.5
    finally:
        bandwidth._read_bandwidth.cache_clear()
    assert seen["threads"] == 1 and torch.get_num_threads() == before


def test_threads_are_put_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), bandwidth.using_threads(1):
        raise RuntimeError
    assert torch.get_num_threads() == before
    with pytest.raises(BadRequest, match="threads is 0"), bandwidth.using_threads(0):
        pass


def test_an_integer_dtype_has_no_flops():
    with pytest.raises(BadRequest, match="int8"):
        bandwidth.flops("int8")


def test_flops_are_positive_and_cached():
    assert bandwidth.flops("float32", threads=1) == bandwidth.flops(torch.float32, threads=1) > 1e8


def test_the_machine_names_itself():
    told = machine()
    assert (
        told.cpu
        and told.cores >= 1
        and told.memory_bytes > 2**28
        and told.versions["torch"] == told.torch
    )
    assert "versions" not in told.as_dict()
