"""Where each tensor of a checkpoint goes, and back.

The hub's checkpoints keep q, k, v and gate, up apart; the decoder keeps them as rows of one
matrix. This table gives, for each name of the hub, the parameter and its rows: for
`model.layers.0.self_attn.k_proj.weight` it is `("layers.0.attention.qkv.weight", 64, 128)`.
Loading, export and the transformers twin in the tests read it.
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
    parameter: str
    start: int | None = None  # rows of the parameter; None: all of it
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.start is None else tensor[self.start : self.stop]


def places(config: ModelConfig) -> dict[str, Place]:
    """Hub name -> place, in the order of the decoder's layers. A tied head has no name of its own."""
    if config.latent_dim is not None or config.kv_shared is not None:
        raise BadRequest(
            "Latent attention and shared layers are switches of tiny models: no checkpoint holds such a llama."
        )
    q, kv, wide = config.q_size, config.kv_size, config.intermediate_size
    rows = {  # module of the hub -> module of the decoder, its rows, has a bias
        "self_attn.q_proj": ("attention.qkv", 0, q, config.qkv_bias),
        "self_attn.k_proj": ("attention.qkv", q, q + kv, config.qkv_bias),
        "self_attn.v_proj": ("attention.qkv", q + kv, q + 2 * kv, config.qkv_bias),
        "self_attn.o_proj": ("attention.o", None, None, config.o_bias),
        "mlp.gate_proj": ("mlp.gate_up", 0, wide, config.mlp_bias),
        "mlp.up_proj": ("mlp.gate_up", wide, 2 * wide, config.mlp_bias),
        "mlp.down_proj": ("mlp.down", None, None, config.mlp_bias),
        "input_layernorm": ("attn_norm", None, None, False),
        "post_attention_layernorm": ("mlp_norm", None, None, False),
    }
    if config.is_gemma:
        rows["post_attention_layernorm"] = ("attn_post_norm", None, None, False)
        rows["pre_feedforward_layernorm"] = ("mlp_norm", None, None, False)
        rows["post_feedforward_layernorm"] = ("mlp_post_norm", None, None, False)
    if config.qk_norm:
        rows["self_attn.q_norm"] = ("attention.q_norm", None, None, False)
        rows["self_attn.k_norm"] = ("attention.k_norm", None, None, False)
    table = {"model.embed_tokens.weight": Place("embed_tokens.weight")}
    for i in range(config.num_layers):
        for theirs, (ours, start, stop, bias) in rows.items():
            for kind in ("weight", "bias") if bias else ("weight",):
                table[f"model.layers.{i}.{theirs}.{kind}"] = Place(
                    f"layers.{i}.{ours}.{kind}", start, stop
                )
    table["model.norm.weight"] = Place("norm.weight")
    if not config.tie_embeddings:
        table["lm_head.weight"] = Place("head.weight")
    return table


def fill(model: Decoder, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Copy the named tensors of a checkpoint into the model's parameters, each once and all of them."""
    table, parameters = places(model.config), dict(model.named_parameters())
    missing = set(table)
    with torch.no_grad():
        for name, tensor in tensors:
            place = table.get(name)
            if place is None:
                if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                    continue  # a second copy of the tied embedding; frequencies follow from the configuration
                raise BadRequest(
                    f"{source} holds {name}, which its configuration ({model.config.architecture}) has no place for: "
                    "the file and its configuration disagree."
                )
            target = place.of(parameters[place.parameter])
            if target.shape != tensor.shape:
                raise BadRequest(
                    f"{source} holds {name} with shape {list(tensor.shape)} where its configuration says "
                    f"{list(target.shape)}: the file and its configuration disagree."
                )
            if not tensor.is_floating_point():
                raise BadRequest(
                    f"{source} holds {name} as {str(tensor.dtype).removeprefix('torch.')}, codes of some quantised "
                    "format: labkit.model reads plain floating-point weights."
                )
            target.copy_(tensor)
            missing.discard(name)
    if missing:
        first = sorted(missing)[0]
        raise BadRequest(
            f"{source} lacks {len(missing)} of the {len(table)} tensors that its configuration asks for, among them "
            f"{first}: the file is incomplete or its configuration is another model's."
        )
    pages.give_back()  # the tensors as they were in the file


def to_hf_state_dict(model: Decoder) -> dict[str, Tensor]:
    """The model's weights under the hub's names: views, no copies. Plain linears only."""
    parameters = dict(model.named_parameters())
    return {
        name: place.of(parameters[place.parameter]) for name, place in places(model.config).items()
    }
