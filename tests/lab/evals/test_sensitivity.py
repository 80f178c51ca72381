"""The default model with the notebook's quick samples: small changes are undecided, large ones are worse."""

from __future__ import annotations

import pytest
import torch

from labkit.lab.evals.report import compare
from labkit.lab.evals.task import run
from labkit.lab.evals.text import Text
from labkit.lab.stack.open import load_model
from labkit.quant import quantize_model
from labkit.quant.linear import unpack_model
from labkit.quant.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.real_model]


def changed(recipe: str):
    model = load_model(dtype=torch.float32)
    quantize_model(model, Recipe.named(recipe), kernel="plain")
    return unpack_model(model)


def test_int8_is_not_worse_and_int4_channel_is_worse_on_code_and_prose():
    model = load_model()
    task = Text(model.tokenizer, 500, ("code", "prose"), length=64, overlap=16)
    before = run(task, model)
    for recipe, allowed in (
        ("int8_channel", {"not decidable", "better"}),
        ("int4_channel", {"worse"}),
    ):
        rows = compare(task.metrics, "text", before, run(task, changed(recipe)))
        for name in ("code", "prose"):
            (row,) = [r for r in rows if (r["slice"], r["metric"]) == (name, "bits_per_byte")]
            assert row["verdict"].split(" with")[0] in allowed, (recipe, row)
