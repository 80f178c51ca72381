"""Bytes of a model's weights in any recipe, number format, or GGUF type.

    bytes = sum over matrices of the format's bytes for [rows, columns], scales and zero points included
Norms and biases keep full precision (they are a thousandth). A head that is tied to the embedding is stored once.
When it loses: "4 bits" for a small model with a big vocabulary says little; the embedding decides.
"""

from __future__ import annotations

from labkit.errors import BadRequest
from labkit.formats import get_format, get_recipe
from labkit.plan.gguf_types import MIXES, gguf_bytes, is_gguf
from labkit.plan.shapes import Matrix, ModelShape

_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def weight_bytes(model: ModelShape, recipe: str) -> int:
    """Bytes of all weights of `model` in `recipe`: a recipe, a number format (for the blocks), or a GGUF type."""
    if is_gguf(recipe):
        return gguf_bytes(model, recipe)
    formats = planned_recipe(recipe)
    return sum(matrix_bytes(matrix, formats, model.tied) for matrix in model.matrices)


def matrix_bytes(matrix: Matrix, formats, tied: bool = False) -> int:
    """Bytes of one matrix, all its copies counted. A tied embedding is stored in the head's format."""
    if matrix.part in ("vectors", "router") or matrix.name == "positions":
        return matrix.parameters * (4 if formats.blocks == "fp32" else 2)
    name = {"blocks": formats.blocks, "head": formats.head,
            "embedding": formats.head if tied else formats.embedding}[matrix.part]
    return get_format(name).nbytes((matrix.rows, matrix.columns)) * matrix.count


def planned_recipe(name: str):
    try:
        return get_recipe(_DTYPE_NAMES.get(name, name))
    except BadRequest as unknown:
        raise BadRequest(f"{str(unknown).rstrip('.')}; or a GGUF type: {', '.join(MIXES)}.") from None


def bits_per_weight(model: ModelShape, recipe: str) -> float:
    return 8 * weight_bytes(model, recipe) / model.parameters
