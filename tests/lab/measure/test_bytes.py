"""Test that the bytes of each storage count once."""

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from labkit.cache.contiguous import ContiguousCache
from labkit.kernels import huge_pages
from labkit.lab.measure import bytes as measured
from labkit.lab.measure.bytes import peak_memory, resident_bytes, tensor_bytes
from labkit.plan.kv import KVShape, kv_bytes


def test_a_view_costs_nothing_and_keeps_the_whole_buffer():
    whole = torch.zeros(100)
    assert tensor_bytes(whole, whole[:3], whole.view(10, 10)) == 400
    assert tensor_bytes(whole[:3]) == 400


def test_a_tied_weight_is_counted_once():
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    assert tensor_bytes(nn.ModuleList([embedding, head])) == 320
    head.weight = embedding.weight
    assert tensor_bytes(nn.ModuleList([embedding, head])) == 160


def test_containers_dataclasses_and_plain_attributes_are_looked_into():
    @dataclass
    class Packed:
        codes: torch.Tensor
        scales: torch.Tensor

    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = Packed(torch.zeros(8, dtype=torch.uint8), torch.zeros(2))

    assert tensor_bytes({"a": [torch.zeros(2), (torch.zeros(3),)]}) == 20
    assert tensor_bytes(nn.Sequential(Quantized())) == 16


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype, name", [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_the_kv_formula_equals_the_tensors_of_a_real_cache(kv_heads, dtype, name):
    shape = KVShape.uniform(3, kv_heads, 24)
    cache = ContiguousCache(shape, batch=2, capacity=40, dtype=dtype)
    assert tensor_bytes(cache) == cache.nbytes() == kv_bytes(shape, 40, 2, name)


def test_the_peak_includes_memory_that_was_freed():
    gc.collect()  # memory of earlier tests must not be freed during the measurement
    huge_pages.give_back()  # and must not be used again
    with peak_memory() as peak:
        gone = torch.ones(64 * 2**20 // 4)
        del gone
    assert peak.method
    assert 60 * 2**20 < peak.grown_bytes < 100 * 2**20
    with peak_memory() as quiet:
        pass
    assert quiet.grown_bytes < 16 * 2**20  # the peak was reset


def test_a_thread_samples_memory_if_the_peak_cannot_be_reset(monkeypatch):
    monkeypatch.setattr(measured, "_reset_high_water", lambda: False)
    gc.collect()
    huge_pages.give_back()
    with peak_memory() as peak:
        stored = torch.ones(64 * 2**20 // 4)
        for _ in range(20):
            stored.mul_(1.0)
    assert "sampled" in peak.method and peak.bytes >= resident_bytes() - 2**20
    assert peak.grown_bytes > 40 * 2**20
