"""GGUF weight types as data: bytes of a block, and which tensors of a mixed kind get which type.

`Q4_K_M` and its kin are mixtures: a base type, more bits for the value projection and the down projection
of some layers, and Q6_K for the head (where it is tied: for the embedding). Rows that a block of 256 does not
divide fall back to a type with blocks of 32. Norms, biases and routers stay in float32.
Source: `llama_tensor_get_type` of src/llama-quant.cpp in ggml-org/llama.cpp, without an importance matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import BadRequest
from labkit.plan.shapes import Matrix, ModelShape

#          type: (weights a block, bytes a block)
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
          "Q5_1": (32, 24), "Q8_0": (32, 34), "IQ4_NL": (32, 18), "MXFP4": (32, 17), "Q2_K": (256, 84),
          "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Mix:
    """Type of most matrices, and a rule for two of them: "more" the layers of `more_bits`, or the first n-th part."""

    base: str
    head: str = "Q6_K"
    value: tuple[str, str] | None = None         # (type, which layers)
    down: tuple[str, str] | None = None
    output: str | None = None                    # attention output


MIXES: dict[str, Mix] = {
    "F32": Mix("F32", "F32"), "F16": Mix("F16", "F16"), "BF16": Mix("BF16", "BF16"), "Q8_0": Mix("Q8_0", "Q8_0"),
    "Q4_0": Mix("Q4_0"), "Q4_1": Mix("Q4_1"), "Q5_0": Mix("Q5_0"), "Q5_1": Mix("Q5_1"), "Q6_K": Mix("Q6_K"),
    "Q2_K": Mix("Q2_K", value=("Q3_K", "all"), down=("Q3_K", "all"), output="Q3_K"),
    "Q3_K_S": Mix("Q3_K"),
    "Q3_K_M": Mix("Q3_K", value=("Q5_K", "first 2, then Q4_K"), down=("Q5_K", "first 16th, then Q4_K"), output="Q4_K"),
    "Q3_K_L": Mix("Q3_K", value=("Q5_K", "all"), down=("Q5_K", "all"), output="Q5_K"),
    "Q4_K_S": Mix("Q4_K", value=("Q5_K", "first 4"), down=("Q5_K", "first 8th")),
    "Q4_K_M": Mix("Q4_K", value=("Q6_K", "more"), down=("Q6_K", "more")),
    "Q5_K_S": Mix("Q5_K"),
    "Q5_K_M": Mix("Q5_K", value=("Q6_K", "more"), down=("Q6_K", "more")),
}


def is_gguf(name: str) -> bool:
    return name.upper() in MIXES and name not in ("fp32", "fp16", "bf16")


def more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _by_rule(rule: tuple[str, str], base: str, layer: int, layers: int) -> str:
    kind, which = rule
    which, _, otherwise = which.partition(", then ")
    if which == "all":
        chosen = True
    elif which == "more":
        chosen = more_bits(layer, layers)
    elif which.endswith("th"):
        chosen = layer < layers // int(which.removeprefix("first ").removesuffix("th"))
    else:
        chosen = layer < int(which.removeprefix("first "))
    return kind if chosen else (otherwise or base)


def tensor_type(matrix: Matrix, model: ModelShape, mix_name: str) -> str:
    """The GGUF type of one matrix of a model quantised to `mix_name`."""
    mix = MIXES[mix_name]
    if matrix.part in ("vectors", "router") or matrix.name == "positions":
        return "F32"
    kind = matrix.name.rpartition(".")[2]
    eight = model.num_experts == 8                              # a special case of the source, made for Mixtral
    wanted = mix.base
    if matrix.part == "head" or (matrix.part == "embedding" and model.tied):
        wanted = mix.head
    elif matrix.part == "blocks" and mix.base not in ("F32", "F16", "BF16"):
        if kind in ("v", "k") and eight:
            wanted = "Q8_0"
        elif kind == "v" and mix.value:
            wanted = _by_rule(mix.value, mix.base, matrix.layer, model.num_layers)
            heads_per_group = model.num_heads // model.kv.layers[matrix.layer].num_kv_heads
            if mix_name == "Q2_K" and heads_per_group >= 4:
                wanted = "Q4_K"
        elif kind == "down" and mix.down:
            wanted = _by_rule(mix.down, mix.base, matrix.layer, model.num_layers)
        elif kind == "o" and eight and mix_name in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M"):
            wanted = "Q5_K"
        elif kind == "o" and mix.output and not eight:
            wanted = mix.output
        if kind == "v" and model.num_layers == 80 and model.num_heads == 64 and wanted in ("Q3_K", "Q4_K"):
            wanted = "Q5_K"                                     # the source's rule for models of 70 B
    if matrix.columns % BLOCKS[wanted][0]:
        wanted = FALLBACK.get(wanted, "F16")
        if matrix.columns % BLOCKS[wanted][0]:
            wanted = "F16"
    return wanted


def gguf_bytes(model: ModelShape, mix_name: str) -> int:
    """Bytes of all tensors in a GGUF file of that kind (the header, a few MiB of vocabulary, comes on top)."""
    mix_name = mix_name.upper()
    if mix_name not in MIXES:
        raise BadRequest(f"GGUF type {mix_name!r} is not known; choose one of {', '.join(MIXES)}.")
    total = 0
    for matrix in model.matrices:
        weights, size = BLOCKS[tensor_type(matrix, model, mix_name)]
        total += matrix.parameters // weights * size
    return total
