"""Multi-head latent attention: one short vector per token stands for the keys and values of all heads.

    c = norm(W_down x)  [C]        k_h = W_k,h c,  v_h = W_v,h c
    q_h . k_h = (W_k,h^T q_h) . c  the query goes to the latent's side ("absorbed"): no k_h is made

One rotated key of R numbers serves all heads. Bytes per token and layer: C + R numbers,
whatever the number of heads; GQA stores 2 * K * D.

DeepSeek-V2 (arXiv 2405.04434), without its low-rank queries. A rotation cannot be absorbed
because it stands between W_k and q, which is why R numbers are apart.
When it loses: in operations, because each head's scores are C + R products instead of D. A
model must be trained with it: a GQA model has no latent from which its keys and values follow.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.cache.contract import KVCache
from labkit.model.attention import causal_attention
from labkit.model.config import ModelConfig
from labkit.model.norm_mlp import make_norm
from labkit.model.rope import rotate


class LatentAttention(nn.Module):
    """The call of `Attention`; its cache stores [latent | rotated key] as one KV head of C + R."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        if config.latent_dim is None:
            raise ValueError("latent attention needs a latent_dim")
        E, H, D = config.hidden_size, config.num_heads, config.head_dim
        C, R = config.latent_dim, config.rope_dim
        self.layer, self.window = layer, config.window(layer)
        self.num_heads, self.head_dim, self.latent_dim, self.rope_dim = H, D, C, R
        self.q = nn.Linear(E, H * (D + R), bias=False)
        self.kv_down = nn.Linear(E, C + R, bias=False)
        self.kv_norm = make_norm(config, C)
        self.k_up = nn.Linear(C, H * D, bias=False)  # W_k of all heads
        self.v_up = nn.Linear(C, H * D, bias=False)
        self.o = nn.Linear(H * D, E, bias=False)
        self.scale = (D + R) ** -0.5

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        H, D, C, R = self.num_heads, self.head_dim, self.latent_dim, self.rope_dim
        heads = self.q(x).view(B, T, H, D + R).transpose(1, 2)
        plain, rotating = heads.split((D, R), -1)  # [B, H, T, D], [B, H, T, R]
        absorbed = torch.einsum("bhtd,hdc->bhtc", plain, self.k_up.weight.view(H, D, C))
        queries = torch.cat((absorbed, rotate(rotating, cos, sin)), -1)  # [B, H, T, C + R]
        latent, key = self.kv_down(x).split((C, R), -1)
        latent = self.kv_norm(latent)[:, None]  # [B, 1, T, C]
        keys = torch.cat((latent, rotate(key[:, None], cos, sin)), -1)  # [B, 1, T, C + R]
        if cache is None:
            out = causal_attention(queries, keys, latent, self.window, self.scale)
        else:
            cache.append(self.layer, keys, latent)
            out = cache.attend(self.layer, queries, self.scale)  # [B, H, T, C]
        values = torch.einsum("bhtc,hdc->bthd", out, self.v_up.weight.view(H, D, C))
        return self.o(values.reshape(B, T, H * D))  # [B, T, E]
