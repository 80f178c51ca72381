"""Zeros where they should be, weights back afterwards."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.model.tiny import tiny_model
from labkit_course.experiments.sparse import mask, packed_bits, pruned_weights


def test_two_of_four_keeps_the_two_largest_of_every_four():
    weight = torch.tensor([[0.1, -3.0, 2.0, 0.0, 5.0, 5.0, -6.0, 1.0]])
    kept = mask(weight, "2:4")[0].tolist()
    assert kept[:4] == [False, True, True, False] and kept[6] and sum(kept[4:]) == 2
    many = mask(torch.randn(6, 32, generator=torch.Generator().manual_seed(0)), "2:4")
    assert (many.view(6, 8, 4).sum(-1) == 2).all()  # ties or not


def test_magnitude_takes_the_smallest_half_wherever_they_are():
    weight = torch.tensor([[0.1, 0.2, 0.3, 0.4], [5.0, -6.0, 7.0, -8.0]])
    assert mask(weight, "magnitude").tolist() == [[False] * 4, [True] * 4]


def test_the_bits_of_packed_zeros():
    assert (
        packed_bits("2:4") == 9.0
        and packed_bits("2:4", 8) == 5.0
        and packed_bits("magnitude") == 16.0
    )


def test_the_weights_come_back_also_after_an_error():
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    linears = sum(w.numel() for name, w in before.items() if "attention" in name or "mlp." in name)
    with pytest.raises(KeyError), pruned_weights(model, "2:4") as zeros:
        assert (
            zeros == linears // 2 == sum(int((w == 0).sum()) for w in model.state_dict().values())
        )
        raise KeyError
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in before.items())


def test_unknown_sparsity_and_other_widths_are_errors():
    with pytest.raises(BadRequest, match="1:4"):
        mask(torch.ones(2, 4), "1:4")
    with pytest.raises(BadRequest, match="6 is not a multiple"):
        mask(torch.ones(2, 6), "2:4")
