"""Named recipes as data: the number format of each part of a model. Needs no torch.

A recipe name is one of four short names, or a format name. A format name puts the
blocks in that format, and head and embedding in `int8_channel`: those two are a fifth
of a small model, and the head loses most from few bits. `labkit.quant.recipe` adds
exceptions per layer, YAML files and a search.
"""

from dataclasses import dataclass

from labkit.errors import BadRequest
from labkit.formats.names import GRAMMAR, get_format, is_format


@dataclass(frozen=True)
class RecipeFormats:
    """Format names of the blocks' linear layers, the head and the embedding."""

    name: str
    blocks: str
    head: str
    embedding: str


RECIPES = {
    "fp32": RecipeFormats("fp32", "fp32", "fp32", "fp32"),
    "bf16": RecipeFormats("bf16", "bf16", "bf16", "bf16"),
    "int8": RecipeFormats("int8", "int8_channel", "int8_channel", "int8_channel"),
    "int4": RecipeFormats("int4", "int4_g32_min", "int8_channel", "int8_channel"),
}


def get_recipe(name: str | RecipeFormats) -> RecipeFormats:
    """Return the recipe called `name`: a key of `RECIPES` or any format name.

    Raises BadRequest for an unknown name.
    """
    if isinstance(name, RecipeFormats):
        return name
    if name in RECIPES:
        return RECIPES[name]
    if not is_format(name):
        names = ", ".join(RECIPES)
        raise BadRequest(
            f"There is no recipe {name!r}; give {names} or a number format: {GRAMMAR}."
        )
    name = get_format(name).name
    rest = "fp16" if name == "fp16" else "int8_channel"  # fp16 is a dtype for the whole model
    return RecipeFormats(name, name, rest, rest)
