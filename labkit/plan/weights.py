"""Bytes of a model's weights in any recipe, number format, or GGUF type.

    bytes = sum over matrices of the format's bytes for [rows, columns], with scales and zero points

Norms and biases keep full precision (they are a thousandth). A head that is tied to the
embedding is stored once. When it loses: for a small model with a big vocabulary, the
embedding decides the size, not the format of the blocks.
"""

from __future__ import annotations

from labkit.errors import BadRequest
from labkit.formats import RecipeFormats, get_format, get_recipe
from labkit.plan.shapes import Matrix, ModelShape

# GGUF type -> bits per weight of the blocks, block scales included. The K types mix several
# formats: theirs is the average that llama.cpp's rules give on Llama 3.1 8B. Head and
# embedding are counted apart.
GGUF_BITS = {"F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625}
GGUF_BITS |= {"Q5_1": 6.0, "Q5_K_M": 5.653, "Q5_0": 5.5, "Q5_K_S": 5.5}
GGUF_BITS |= {"Q4_1": 5.0, "Q4_K_M": 4.797, "Q4_K_S": 4.536, "Q4_0": 4.5}
GGUF_BITS |= {"Q3_K_L": 4.191, "Q3_K_M": 3.844, "Q3_K_S": 3.4375, "Q2_K": 2.942}
GGUF_HEAD_BITS = 6.5625  # Q6_K, or Q8_0 if its blocks of 256 do not divide the rows
_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def weight_bytes(model: ModelShape, recipe: str) -> int:
    """Return the bytes of all weights; `recipe`: a recipe, a number format, or a GGUF type."""
    if recipe.upper() in GGUF_BITS and recipe not in ("fp32", "fp16", "bf16"):
        return gguf_bytes(model, recipe.upper())
    formats = planned_recipe(recipe)
    return sum(matrix_bytes(matrix, formats, model.tied) for matrix in model.matrices)


def gguf_bytes(model: ModelShape, kind: str) -> int:
    """Estimate the bytes of the tensors of a GGUF file; a few per mille off for K types."""
    bits, total = GGUF_BITS[kind], 0.0
    head = bits if bits > 8 else 8.5 if model.hidden_size % 256 else GGUF_HEAD_BITS
    for matrix in model.matrices:
        if _full_precision(matrix):
            total += 4 * matrix.parameters
        else:
            in_head = matrix.part == "head" or (matrix.part == "embedding" and model.tied)
            total += matrix.parameters * (max(head, bits) if in_head else bits) / 8
    return int(total)


def matrix_bytes(matrix: Matrix, formats: RecipeFormats, tied: bool = False) -> int:
    """Return the bytes of all copies of a matrix; a tied embedding has the head's format."""
    if _full_precision(matrix):
        return matrix.parameters * (4 if formats.blocks == "fp32" else 2)
    embedding = formats.head if tied else formats.embedding
    parts = {"blocks": formats.blocks, "head": formats.head, "embedding": embedding}
    return get_format(parts[matrix.part]).nbytes((matrix.rows, matrix.columns)) * matrix.count


def planned_recipe(name: str) -> RecipeFormats:
    """Return a recipe by name; the error lists the GGUF types too."""
    try:
        return get_recipe(_DTYPE_NAMES.get(name, name))
    except BadRequest as unknown:
        text = str(unknown).rstrip(".")
        raise BadRequest(f"{text}; or a GGUF type: {', '.join(GGUF_BITS)}.") from None


def bits_per_weight(model: ModelShape, recipe: str) -> float:
    """Return the mean bits per weight, scales included."""
    return 8 * weight_bytes(model, recipe) / model.parameters


def _full_precision(matrix: Matrix) -> bool:
    return matrix.part in ("vectors", "router") or matrix.name == "positions"
