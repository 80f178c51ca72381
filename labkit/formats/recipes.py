"""The named recipes: which part of a model has which format, as data. No torch here.

A recipe name is one of four short ones, or any format name: all blocks in that format, head and embedding in
`int8_channel` (they are a fifth of a small model, and the head is where low bits hurt most).
The richer recipes, with exceptions per layer, a YAML file and a search, are `labkit.quant.recipe`.
"""

from dataclasses import dataclass

from labkit.errors import BadRequest
from labkit.formats.names import GRAMMAR, get_format, is_format


@dataclass(frozen=True)
class RecipeFormats:
    """Format names of the linear layers in the blocks, of the head and of the embedding (shared where tied)."""

    name: str
    blocks: str
    head: str
    embedding: str

    def __post_init__(self):
        for part in (self.blocks, self.head, self.embedding):
            get_format(part)


RECIPES = {
    "fp32": RecipeFormats("fp32", "fp32", "fp32", "fp32"),
    "bf16": RecipeFormats("bf16", "bf16", "bf16", "bf16"),
    "int8": RecipeFormats("int8", "int8_channel", "int8_channel", "int8_channel"),
    "int4": RecipeFormats("int4", "int4_g32_min", "int8_channel", "int8_channel"),
}


def get_recipe(name: "str | RecipeFormats") -> RecipeFormats:
    """The recipe of that name: fp32, bf16, int8, int4, or any format name (blocks in it, head in int8_channel)."""
    if isinstance(name, RecipeFormats):
        return name
    if name in RECIPES:
        return RECIPES[name]
    if not is_format(name):
        raise BadRequest(f"There is no recipe {name!r}; a recipe is {', '.join(RECIPES)}, or a format: {GRAMMAR}.")
    name = get_format(name).name
    if name == "fp16":  # a dtype for the whole model, like bf16
        return RecipeFormats(name, name, name, name)
    return RecipeFormats(name, name, "int8_channel", "int8_channel")
