"""Compute the bytes of a model's weights in a recipe, a number format or a GGUF type.

    bytes = sum over matrices of the format's bytes for [rows, columns], with scales and zero points

Norms and biases keep full precision (they are about 0.1 % of the weights). A head that
is tied to the embedding is stored once. When it loses: a small model with a large
vocabulary, whose embedding decides the size, not the format of the blocks.
"""

from __future__ import annotations

from labkit.errors import BadRequest
from labkit.formats import RecipeFormats, get_format, get_recipe
from labkit.plan.shapes import Matrix, ModelShape
from labkit.plan.units import SHORT_NAMES

# GGUF type -> bits per weight of the blocks, with block scales, without head and embedding.
# A K type mixes several formats; its number is the mean of Llama 3.1 8B under llama.cpp's rules.
GGUF_BITS = {"F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625}
GGUF_BITS |= {"Q5_1": 6.0, "Q5_K_M": 5.653, "Q5_0": 5.5, "Q5_K_S": 5.5}
GGUF_BITS |= {"Q4_1": 5.0, "Q4_K_M": 4.797, "Q4_K_S": 4.536, "Q4_0": 4.5}
GGUF_BITS |= {"Q3_K_L": 4.191, "Q3_K_M": 3.844, "Q3_K_S": 3.4375, "Q2_K": 2.942}


def weight_bytes(model: ModelShape, recipe: str) -> int:
    """Return the bytes of all weights; `recipe`: a recipe, a number format or a GGUF type."""
    if recipe.upper() in GGUF_BITS and recipe not in ("fp32", "fp16", "bf16"):
        return gguf_bytes(model, recipe.upper())
    formats = planned_recipe(recipe)
    return sum(matrix_bytes(matrix, formats, model.tied) for matrix in model.matrices)


def gguf_bytes(model: ModelShape, kind: str) -> int:
    """Estimate the bytes of the tensors in a GGUF file of type `kind`.

    For K types the error is a few per mille.
    """
    bits, total = GGUF_BITS[kind], 0.0
    # The head is Q6_K, or Q8_0 if the blocks of 256 of Q6_K do not divide its rows.
    least = GGUF_BITS["Q8_0" if model.hidden_size % 256 else "Q6_K"]
    for matrix in model.matrices:
        if _full_precision(matrix):
            total += 4 * matrix.parameters
        else:
            in_head = matrix.part == "head" or (matrix.part == "embedding" and model.tied)
            total += matrix.parameters * (max(least, bits) if in_head else bits) / 8
    return int(total)


def matrix_bytes(matrix: Matrix, formats: RecipeFormats, tied: bool = False) -> int:
    """Return the bytes of all copies of a matrix.

    An embedding that is tied to the head has the format of the head.
    """
    if _full_precision(matrix):
        return matrix.parameters * (4 if formats.blocks == "fp32" else 2)
    embedding = formats.head if tied else formats.embedding
    parts = {"blocks": formats.blocks, "head": formats.head, "embedding": embedding}
    return get_format(parts[matrix.part]).nbytes((matrix.rows, matrix.columns)) * matrix.count


def planned_recipe(name: str) -> RecipeFormats:
    """Return a recipe by its name. Raises BadRequest for an unknown name."""
    try:
        return get_recipe(SHORT_NAMES.get(name, name))
    except BadRequest as unknown:
        types = ", ".join(GGUF_BITS)
        raise BadRequest(f"{unknown} GGUF types are allowed as well: {types}.") from None


def bits_per_weight(model: ModelShape, recipe: str) -> float:
    """Return the mean number of bits per weight, with scales."""
    return 8 * weight_bytes(model, recipe) / model.parameters


def _full_precision(matrix: Matrix) -> bool:
    return matrix.part in ("vectors", "router") or matrix.name == "positions"
