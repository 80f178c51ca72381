"""The decoder: a model that computes logits from token ids.

    x = embed(tokens)
    per layer:  x += attention(norm(x));  x += mlp(norm(x))
    logits = head(norm(x))

With a cache, a call gets only the new tokens. Without one, it gets the whole text. Prompts
of different lengths in a batch are padded on the right, and `counts` is the number of real
tokens per row. Text and sampling are not part of the decoder.

Cost of one decode step: every weight is read once for the whole batch, and the KV cache once
per row. The decoder uses few operators, about 20 per layer, because at batch 1 a small model
spends as much time in dispatch as in arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labkit.cache import make_cache
from labkit.cache.contract import KVCache, checked_counts
from labkit.errors import BadRequest
from labkit.model.attention import Attention
from labkit.model.config import ModelConfig
from labkit.model.mla import LatentAttention
from labkit.model.norm_mlp import make_mlp, make_norm
from labkit.model.rope import Rotary
from labkit.model.tokenizer import Tokenizer


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.attn_norm = make_norm(config)
        attention = Attention if config.latent_dim is None else LatentAttention
        self.attention = attention(config, index)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(self.attn_norm(x), cos, sin, cache)
        return x + self.mlp(self.mlp_norm(x))  # [B, T, E]


class SandwichLayer(Layer):
    """Gemma 3's layer, with a norm before and after attention and feed-forward.

    Gemma 3 also scales embeddings by sqrt(E) and queries by 1/sqrt(query_pre_attn_scalar).
    Five of six layers have a window and their own RoPE base (10,000). Only the cache of each
    sixth layer grows beyond the window (Gemma 3 report, 2025).
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.attn_post_norm = make_norm(config)
        self.mlp_post_norm = make_norm(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn_post_norm(self.attention(self.attn_norm(x), cos, sin, cache))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))  # [B, T, E]


def make_layer(config: ModelConfig, index: int) -> Layer:
    """Return layer `index` of this architecture."""
    return (SandwichLayer if config.is_gemma else Layer)(config, index)


class Decoder(nn.Module):
    """A decoder-only language model.

    The functions that load a model set `name`, `revision`, `tokenizer` and `source`.
    """

    kernels = "torch"  # multiply with PyTorch's operators, or with "native" kernels

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_layer(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed_tokens.weight
        local = config.local_rope
        self.rotary = Rotary(config.rope, config.rope_dim or config.head_dim)
        self.local_rotary = None if local is None else Rotary(local, config.head_dim)
        self.tokenizer: Tokenizer | None = None
        self.name: str | None = None
        self.revision: str | None = None
        self.source: dict[str, str] = {}  # the metadata of the checkpoint's files

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        counts: Sequence[int] | None = None,
        last_only: bool = False,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, T, V] of tokens [B, T].

        counts: the number of real tokens per row (None: T). Padding follows them.
        last_only: return [B, 1, V], the logits of each row's last real token.
        return_hidden: also return the head's input for every token [B, T, E].

        Raises BadRequest if the tokens have another shape or do not fit the cache.
        """
        hidden = self.hidden_states(tokens, cache, counts)
        logits = self.head(last_real(hidden, counts) if last_only else hidden)
        return (logits, hidden) if return_hidden else logits

    def hidden_states(
        self, tokens: Tensor, cache: KVCache | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Return the vectors after the final norm [B, T, E]."""
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise BadRequest(
                f"The token ids have shape {tuple(tokens.shape)}; "
                "give [batch, tokens] with at least one token."
            )
        B, T = tokens.shape
        if cache is None and self.config.kv_shared:
            cache = self.new_cache(B, T)  # layers read each other's keys through it
        if cache is None:
            positions = torch.arange(T, device=tokens.device).expand(B, T)
            lengths = checked_counts(T, counts, B)
        elif len(cache.lengths) != B:
            rows = len(cache.lengths)
            raise BadRequest(f"The cache has {rows} rows and the tokens {B}; give {rows} rows.")
        else:
            positions, lengths = cache.advance(T, counts), cache.lengths
        x = self.embed_tokens(tokens)  # [B, T, E]
        whole = local = self.rotary(positions, lengths, x.dtype)  # cos and sin
        if self.config.is_gemma:  # the factor is rounded to the dtype of the weights
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype).item()
        if self.local_rotary is not None:
            local = self.local_rotary(positions, lengths, x.dtype)
        for layer in self.layers:
            windowed = layer.attention.window is not None  # type: ignore[union-attr]
            cos, sin = local if windowed else whole
            x = layer(x, cos, sin, cache)
        return self.norm(x)

    def dequantized(self) -> Decoder:
        """Return a plain decoder with these weights: itself, or a copy if they are packed."""
        return self

    def describe(self) -> None:
        """Update a native decoder after a change of its layers; does nothing here."""

    def new_cache(
        self, batch: int = 1, capacity: int | None = None, kind: str = "contiguous"
    ) -> KVCache:
        """Return a KV cache of this model's shape, dtype and device.

        `capacity` is the number of tokens per row (None: the model's maximum). Raises
        BadRequest if the kind of cache is not known or stores nothing.
        """
        cache = make_cache(
            kind,
            self.config.kv_shape,
            batch=batch,
            capacity=capacity or self.config.max_positions,
            dtype=self.dtype,
            device=self.device,
        )
        if cache is None:
            raise BadRequest(f"A cache of kind {kind!r} stores nothing; choose another kind.")
        return cache


def last_real(hidden: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return the vector of each row's last real token: [B, T, E] -> [B, 1, E]."""
    if counts is None or all(count == hidden.shape[1] for count in counts):
        # Not a view: with a strided input, PyTorch would copy the head's weight once per row.
        return hidden[:, -1:].clone(memory_format=torch.contiguous_format)
    last = torch.tensor([max(count - 1, 0) for count in counts], device=hidden.device)
    return hidden[torch.arange(len(counts), device=hidden.device), last].unsqueeze(1)
