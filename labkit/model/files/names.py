"""Map the tensor names of a checkpoint to the decoder's parameters, and back.

A checkpoint stores q, k, v and gate, up as separate matrices. The decoder stores them as
rows of one matrix. The table gives the parameter and its rows for each name of the hub.
For `model.layers.0.self_attn.k_proj.weight` it is
`Place("layers.0.attention.qkv.weight", slice(64, 128))`, for example.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.kernels import huge_pages as pages
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder


class Place(NamedTuple):
    """A parameter of the decoder, and the rows of it that a tensor fills."""

    parameter: str
    rows: slice = slice(None)


def places(config: ModelConfig) -> dict[str, Place]:
    """Return the place of every tensor of a checkpoint, by its name in the hub.

    The order is that of the decoder's layers. Tied embeddings have no `lm_head.weight`.
    Raises BadRequest for latent attention and for layers that share keys and values.
    """
    if config.latent_dim is not None or config.kv_shared is not None:
        raise BadRequest(
            "Only tiny models have latent attention or shared layers; no checkpoint stores them."
        )
    q, kv, inner = config.q_size, config.kv_size, config.intermediate_size
    linears = {  # module in the hub -> module of the decoder, its rows, whether it has a bias
        "self_attn.q_proj": ("attention.qkv", slice(0, q), config.qkv_bias),
        "self_attn.k_proj": ("attention.qkv", slice(q, q + kv), config.qkv_bias),
        "self_attn.v_proj": ("attention.qkv", slice(q + kv, q + 2 * kv), config.qkv_bias),
        "self_attn.o_proj": ("attention.o", slice(None), config.o_bias),
        "mlp.gate_proj": ("mlp.gate_up", slice(0, inner), config.mlp_bias),
        "mlp.up_proj": ("mlp.gate_up", slice(inner, 2 * inner), config.mlp_bias),
        "mlp.down_proj": ("mlp.down", slice(None), config.mlp_bias),
    }
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
    if config.is_gemma:
        norms["post_attention_layernorm"] = "attn_post_norm"
        norms["pre_feedforward_layernorm"] = "mlp_norm"
        norms["post_feedforward_layernorm"] = "mlp_post_norm"
    if config.qk_norm:
        norms |= {f"self_attn.{one}_norm": f"attention.{one}_norm" for one in "qk"}
    modules = linears | {name: (norm, slice(None), False) for name, norm in norms.items()}
    table = {"model.embed_tokens.weight": Place("embed_tokens.weight")}
    for i in range(config.num_layers):
        for name, (module, rows, bias) in modules.items():
            for kind in ("weight", "bias")[: 1 + bias]:
                place = Place(f"layers.{i}.{module}.{kind}", rows)
                table[f"model.layers.{i}.{name}.{kind}"] = place
    table["model.norm.weight"] = Place("norm.weight")
    if not config.tie_embeddings:
        table["lm_head.weight"] = Place("head.weight")
    return table


def fill(model: Decoder, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Copy the tensors of a checkpoint, with their names, into the model.

    `source` names the checkpoint in errors. Raises BadRequest if a tensor is missing, is
    not expected, has another shape or is not floating point.
    """
    weights = to_hf_state_dict(model)
    missing = set(weights)
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in weights:
                # A copy of the tied embedding, or frequencies that the config gives.
                if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                    continue
                raise BadRequest(
                    f"{source} has a tensor {name}, which a {model.config.architecture} with its "
                    "config does not have; check that the files belong together."
                )
            target = weights[name]
            if target.shape != tensor.shape:
                raise BadRequest(
                    f"{source} has {name} with shape {list(tensor.shape)}, but its config gives "
                    f"{list(target.shape)}; check that the files belong together."
                )
            if not tensor.is_floating_point():
                raise BadRequest(
                    f"{source} stores {name} as {str(tensor.dtype).removeprefix('torch.')}; "
                    "give a checkpoint with floating-point weights."
                )
            target.copy_(tensor)
            missing.discard(name)
    if missing:
        raise BadRequest(
            f"{source} lacks {len(missing)} of the {len(weights)} tensors that its config "
            f"needs, for example {min(missing)}; fetch the checkpoint again."
        )
    pages.give_back()  # frees the tensors as they were in the file


def to_hf_state_dict(model: Decoder) -> dict[str, Tensor]:
    """Return the model's weights under the hub's names, as views.

    The model's layers must be plain linears.
    """
    parameters = dict(model.named_parameters())
    return {
        name: parameters[parameter][rows]
        for name, (parameter, rows) in places(model.config).items()
    }
