"""Recipes: names, YAML there and back, and a search that spends bits by what was measured."""

import itertools

import pytest

from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.quant.recipe import Ends, Recipe, layer_of, search, spend


def test_short_names_and_format_names():
    assert (Recipe.named("int4").blocks, Recipe.named("int4").head) == (
        "int4_g32_min",
        "int8_channel",
    )
    assert (Recipe.named("nvfp4").blocks, Recipe.named("nvfp4").embedding) == (
        "nvfp4",
        "int8_channel",
    )
    with pytest.raises(BadRequest, match="no recipe 'int44'"):
        Recipe.named("int44")


def test_a_yaml_file_comes_back_equal(tmp_path):
    recipe = Recipe(
        "mine",
        "int4_g64_zp",
        "int8_channel",
        "bf16",
        Ends(2, "int8_channel"),
        Ends(1, "int6_g64_zp"),
        {"*.mlp.down": "int5_g32_zp"},
        method="awq+gptq+clip",
    )
    recipe.save(tmp_path / "mine.yaml")
    assert Recipe.named(str(tmp_path / "mine.yaml")) == recipe
    text = (tmp_path / "mine.yaml").read_text()
    assert "blocks: int4_g64_zp" in text and "activations" not in text
    plain = Recipe("plain", "int8_channel")
    plain.save(tmp_path / "plain.yml")
    assert Recipe.load(tmp_path / "plain.yml") == plain


@pytest.mark.parametrize(
    "text, match",
    [
        ("blcks: int8_channel", "unknown key 'blcks'"),
        ("blocks: int99", "no number format"),
        ("first_layers: {number: 2}", "give count and format"),
        ("least_share: 2", "least_share is 2; give a number from 0 to 1"),
        ("method: magic", "no method"),
        ("- a list", "contains no keys"),
        ("blocks: [", "cannot be read"),
        ("{blocks: int4_g64_zp, activations: int8_token}", "need int8_channel blocks"),
        ("activations: int4_token", "activations is 'int4_token'; give one of int8_token"),
        ("overrides: [a, b]", "overrides is \\['a', 'b'\\]"),
        ("overrides: 5", "overrides is 5"),
        ("first_layers: {count: x}", "count is 'x'"),
        ("last_layers: {count: -1}", "count is -1"),
        ("last_layers: {count: 1.5}", "count is 1.5"),
        ("method: 5", "no method '5'"),
        ("blocks: null", "no number format"),
        ("name: [a]", "name is \\['a'\\]"),
        ("overrides: {5: int8_channel}", "overrides is {5"),
        ("[" * 3000, "cannot be read"),
        ("blocks: int4_g64_zp\nblocks: int8_channel", "'blocks' is given twice"),
        ("overrides: {a: int8_channel, a: int4_g64_zp}", "'a' is given twice"),
        ("first_layers: {format: int4_g64_zp}", "give count and format"),
        ("first_layers: 2", "give count and format"),
        ("method: awq+awq", "repeats a part"),
        ("method: rtn+gptq", "repeats a part"),
        ("blocks: int4_g99999999_zp", "1 to 65536 weights, or int4_channel_zp"),
        ("{5: int4_g64_zp, a: b}", "unknown key '5'"),
    ],
)
def test_bad_recipes_are_refused_by_name(tmp_path, text, match):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(BadRequest, match=match):
        Recipe.load(tmp_path / "bad.yaml")


def test_a_file_of_other_bytes_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("bad.yaml", "none.yaml", "n\0.yaml"):
        with pytest.raises(BadRequest, match=f"{name} cannot be read"):
            Recipe.load(tmp_path / name)


def test_ends_and_overrides():
    recipe = Recipe(
        "r",
        "int4_g64_zp",
        first_layers=Ends(1, "int8_channel"),
        last_layers=Ends(1, "int6_g64_zp"),
        overrides={"*.down": "int5_g64_zp"},
    )
    names = [
        "layers.0.mlp.gate_up",
        "layers.1.mlp.gate_up",
        "layers.3.mlp.gate_up",
        "layers.0.mlp.down",
    ]
    assert [recipe.format_of(n, "blocks", 4) for n in names] == [
        "int8_channel",
        "int4_g64_zp",
        "int6_g64_zp",
        "int5_g64_zp",
    ]
    assert recipe.format_of("head", "head", 4) == "int8_channel"
    assert [
        layer_of(n)
        for n in (
            "layers.12.attention.qkv",
            "transformer.h.3.attn.c_attn",
            "head",
            "model.layers.7",
        )
    ] == [12, 3, None, 7]


CANDIDATES = ("int3_g64_zp", "int4_g64_zp", "int8_channel")


def made_up(shapes, importance):
    """Losses that fall by four for each bit, times how much a part matters."""
    return lambda overrides: sum(
        importance[part] * 4.0 ** -get_format(c).bits for part, c in overrides.items()
    )


def test_the_search_keeps_its_budget_and_spends_on_what_matters():
    shapes = {f"layers.{i}.mlp.down": (64, 128) for i in range(6)}
    importance = {part: 100.0 if ".2." in part else 1.0 for part in shapes}
    recipe, sensitivity = search(shapes, made_up(shapes, importance), 5.0, CANDIDATES)
    total = sum(
        8 * get_format(recipe.format_of(part, "blocks", 6)).nbytes(shape)
        for part, shape in shapes.items()
    )
    assert total <= 5.0 * 6 * 64 * 128
    assert recipe.overrides["layers.2.mlp.down"] == "int8_channel"
    assert set(sensitivity) == set(shapes) and set(sensitivity["layers.0.mlp.down"]) == set(
        CANDIDATES
    )


@pytest.mark.parametrize("budget", [3.4, 4.0, 4.5, 5.0, 6.0, 8.2])
def test_the_search_is_close_to_the_best_by_enumeration(budget):
    shapes = {f"layers.{i}.a": (32 * (1 + i % 3), 64) for i in range(5)}
    importance = dict(zip(shapes, (1.0, 7.0, 0.2, 30.0, 3.0)))
    bits = {p: {c: 8 * get_format(c).nbytes(s) for c in CANDIDATES} for p, s in shapes.items()}
    losses = {p: {c: made_up(shapes, importance)({p: c}) for c in CANDIDATES} for p in shapes}
    elements = sum(r * c for r, c in shapes.values())
    found = spend(bits, losses, budget * elements)
    cost = lambda chosen: sum(losses[p][c] for p, c in chosen.items())  # noqa: E731
    size = lambda chosen: sum(bits[p][c] for p, c in chosen.items())  # noqa: E731
    choices = [dict(zip(shapes, picked)) for picked in itertools.product(CANDIDATES, repeat=5)]
    best = min((c for c in choices if size(c) <= budget * elements), key=cost)
    assert size(found) <= budget * elements and cost(found) <= 1.6 * cost(best)
    for uniform in CANDIDATES:  # below every uniform choice that fits
        same = dict.fromkeys(shapes, uniform)
        if size(same) <= budget * elements:
            assert cost(found) <= cost(same)


def test_an_impossible_budget_says_what_the_least_is():
    with pytest.raises(BadRequest, match=r"give at least 3\.3"):
        search({"layers.0.a": (64, 64)}, lambda o: 0.0, 2.0, CANDIDATES)
    with pytest.raises(BadRequest, match="shapes is empty"):
        search({}, lambda o: 0.0, 5.0)
