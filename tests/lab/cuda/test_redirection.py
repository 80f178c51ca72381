"""Test the mode that runs other tests on a device, with the device "meta", which every machine has."""

import pytest
import torch


@pytest.fixture
def redirect(request):
    return next(
        p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "redirected")
    ).redirected("meta")


def test_new_tensors_are_on_the_device(redirect):
    with redirect:
        for made in (
            torch.zeros(2),
            torch.tensor([1]),
            torch.arange(3, device="cpu"),
            torch.empty(1, device=torch.device("cpu")),
        ):
            assert made.device.type == "meta"
        assert torch.zeros(1, device="meta").to("cpu").device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.zeros(1).device.type == "cpu"


def test_numbers_of_a_cpu_generator_are_drawn_on_the_cpu_and_moved(redirect):
    generator = torch.Generator().manual_seed(0)
    with redirect:
        assert torch.randn(3, generator=generator).device.type == "meta"
    plain = torch.Generator().manual_seed(0)
    torch.randn(3, generator=plain)
    assert torch.equal(generator.get_state(), plain.get_state())


def test_every_test_of_caches_generation_and_quantization_carries_the_marker(request):
    for item in request.session.items:
        if any(
            f"tests/{room}/" in item.nodeid for room in ("cache", "generate", "quant", "device")
        ):
            assert "on_device" in item.keywords
