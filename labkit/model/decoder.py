"""The decoder: token ids in, logits out; a stack of layers that each add to one running vector per token.

    x = embed(tokens);  per layer: x += attention(norm(x)); x += mlp(norm(x));  logits = head(norm(x))

It knows nothing about text, sampling or batching policy. A step with a cache passes only the new tokens; without one,
the whole text. Batches of unequal prompts are right padded: `counts` says how many tokens of each row are real.
Cost of one decode step: every weight is read once, whatever the batch, and the KV cache once per row.
Written to be few operators (about 20 a layer): at batch 1 a small model spends as long in dispatch as in arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labkit.cache.contract import checked_counts
from labkit.errors import BadRequest
from labkit.model.attention import Attention
from labkit.model.config import ModelConfig
from labkit.model.gemma import SandwichLayer
from labkit.model.mla import LatentAttention
from labkit.model.mlp import make_mlp
from labkit.model.norm import make_norm
from labkit.model.rope import Rotary


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attention = make_attention(config, index)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None) -> Tensor:
        x = x + self.attention(self.attn_norm(x), cos, sin, cache)
        return x + self.mlp(self.mlp_norm(x))  # [B, T, E]


def make_attention(config: ModelConfig, index: int) -> nn.Module:
    return (Attention if config.latent_dim is None else LatentAttention)(config, index)


def make_layer(config: ModelConfig, index: int) -> nn.Module:
    if not config.is_gemma:
        return Layer(config, index)
    norms = (make_norm(config) for _ in range(4))
    return SandwichLayer(
        next(norms), make_attention(config, index), next(norms), next(norms), make_mlp(config), next(norms)
    )


class Decoder(nn.Module):
    """A decoder-only language model. `name`, `revision` and `tokenizer` come from where it was loaded."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_layer(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.rope, config.rope_dim or config.head_dim)
        self.local_rotary = None if config.local_rope is None else Rotary(config.local_rope, config.head_dim)
        self.tokenizer = None
        self.name: str | None = None
        self.revision: str | None = None
        self.source: dict[str, str] = {}  # what the checkpoint's file says of itself

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def forward(
        self,
        tokens: Tensor,
        cache=None,
        counts: Sequence[int] | None = None,
        last_only: bool = False,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens [B, T] -> logits [B, T, V], or [B, 1, V] of each row's last real token where `last_only`.

        `counts[b]` of row b's tokens are real, padding follows them. `return_hidden` adds what the head was given,
        for every token, [B, T, E]."""
        hidden = self.hidden_states(tokens, cache, counts)
        logits = self.head(last_real(hidden, counts) if last_only else hidden)
        return (logits, hidden) if return_hidden else logits

    def hidden_states(self, tokens: Tensor, cache=None, counts: Sequence[int] | None = None) -> Tensor:
        """The vectors after the final norm [B, T, E]."""
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise BadRequest(
                f"token ids of shape {tuple(tokens.shape)} were given: "
                "the decoder takes [batch, tokens] with at least one token."
            )
        B, T = tokens.shape
        if cache is None and self.config.kv_shared:
            cache = self.new_cache(B, T)  # a layer that reads another's keys finds them there
        if cache is None:
            positions, lengths = torch.arange(T, device=tokens.device).expand(B, T), checked_counts(T, counts, B)
        elif len(cache.lengths) != B:
            raise BadRequest(f"{B} rows of tokens came to a cache of {len(cache.lengths)}: give each row of the cache its tokens.")
        else:
            positions, lengths = cache.advance(T, counts), cache.lengths
        x = self.embed_tokens(tokens)  # [B, T, E]
        turns = local = self.rotary(positions, lengths, x.dtype)  # cos and sin
        if self.config.is_gemma:
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype).item()  # rounded as the weights are
        if self.local_rotary is not None:
            local = self.local_rotary(positions, lengths, x.dtype)
        for layer in self.layers:
            cos, sin = turns if layer.attention.window is None else local
            x = layer(x, cos, sin, cache)
        return self.norm(x)

    def new_cache(self, batch: int = 1, capacity: int | None = None, kind: str = "contiguous"):
        """A KV cache of this model's shape, dtype and device; `capacity` tokens a row (None: the model's context)."""
        from labkit.cache import make_cache

        return make_cache(
            kind,
            self.config.kv_shape,
            batch=batch,
            capacity=capacity or self.config.context,
            dtype=self.dtype,
            device=self.device,
        )


def last_real(hidden: Tensor, counts: Sequence[int] | None) -> Tensor:
    """[B, T, E] -> [B, 1, E]: each row's last token that is not padding."""
    if counts is None or all(count == hidden.shape[1] for count in counts):
        # A view would make PyTorch copy the head's whole weight once a row: a strided input is multiplied as a batch.
        return hidden[:, -1:].clone(memory_format=torch.contiguous_format)
    last = torch.tensor([max(count - 1, 0) for count in counts], device=hidden.device)
    return hidden[torch.arange(len(counts), device=hidden.device), last].unsqueeze(1)
