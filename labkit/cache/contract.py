"""The contract of every KV cache, and the bookkeeping that all caches share.

A forward pass calls `advance` once and then, in each layer, `append` and `attend`:

    cache.advance(T, counts) -> positions [B, T]
    cache.append(layer, keys [B, K, T, D], values [B, K, T, D])
    cache.attend(layer, queries [B, H, T, D]) -> [B, H, T, D]

Keys are already rotated. Each row of a batch has its own length. Lengths are Python
integers, so no step waits for the device. Prompts of unequal length are padded on the
right; `counts` excludes the padding.

A new cache implements `append`, `attend`, `tensors`, `nbytes_used`, `_cached_keys`,
`_reserve` and `_select`. It implements `_rewind`, too, if a rewind changes more than
the lengths. This class checks all arguments before anything changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.cache.forward_pass import Step
from labkit.errors import BadRequest, whole_number
from labkit.kernels.device import check_device
from labkit.plan.kv import KVShape, LayerKV

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_sequence(values: object) -> bool:
    """Return True for lists, tuples, tensors and other values with a first axis."""
    return hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0


def whole_numbers(values: Any, what: str, count: int | None = None) -> tuple[int, ...]:
    """Return a sequence of whole numbers as a tuple of ints.

    Raises BadRequest for other values, or if there are not `count` numbers.
    """
    if not is_sequence(values) or count not in (None, len(values)):
        raise BadRequest(f"{what} are {values!r}; give a sequence of whole numbers, one per row.")
    return tuple(whole_number(number, f"One of {what[0].lower()}{what[1:]}") for number in values)


def checked_counts(num_tokens: int, counts: Sequence[int] | None, batch: int) -> tuple[int, ...]:
    """Return the number of real tokens among `num_tokens` new ones, per row.

    If `counts` is None, all tokens are real.
    """
    if counts is None:
        return (num_tokens,) * batch
    counts = whole_numbers(counts, "The counts of new tokens", batch)
    if min(counts) < 0 or max(counts) > num_tokens or max(counts) == 0:
        raise BadRequest(f"The counts are {list(counts)}; give 0 to {num_tokens}, not all 0.")
    return counts


def stored(layer: LayerKV) -> tuple[int, int, int]:
    """Return the number of heads, of values per head and token, and of tensors.

    Keys and values are two tensors. An MLA layer has one tensor, which stores the
    latent and the rotary key.
    """
    if layer.latent_dim is not None:
        return 1, layer.latent_dim + layer.rope_dim, 1
    return layer.num_kv_heads, layer.head_dim, 2


def doubled(slots: int, needed: int) -> int:
    """Double `slots` until `needed` fit. On average, an append then copies O(1) tokens."""
    while slots < needed:
        slots *= 2
    return slots


def grown(old: Tensor | None, size: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of shape `size` with `old` copied to the start of every dimension.

    The result is an ordinary tensor, even in inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        new = torch.zeros(*size, dtype=dtype, device=device)
        if old is not None:
            new[tuple(map(slice, old.shape))] = old
    return new


@dataclass(eq=False)
class InMemory:
    """The memory of keys and values, for a kernel that reads them in one call.

    `keys` and `values` have one dictionary per layer. "fp32" and "bf16" caches store
    "numbers" [B, K, slots, D]. "int8" caches store "codes" of that shape, and a "scale"
    and a "minimum" [B, K, slots, 1] in bfloat16.
    """

    kind: str
    slots: int
    keys: list[dict[str, Tensor]]
    values: list[dict[str, Tensor]]
    addresses: Any = None  # set by the kernel, which stores the addresses of the tensors here


class KVCache(ABC):
    """Keys and values of `batch` rows with up to `capacity` tokens each.

    A capacity of None means no limit. Raises BadRequest for arguments, or layers in
    `shape`, that this kind of cache does not support.
    """

    first_slots = 256  # slots allocated at first; they double when they run out
    stores_latents = True  # whether it supports MLA layers
    shares_layers = True  # whether it supports layers that read another layer's cache
    step: Step  # the current or latest forward pass
    _in_memory: InMemory | None = None

    def __init__(
        self,
        shape: KVShape,
        batch: int = 1,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        if not isinstance(shape, KVShape) or not shape.layers:
            raise BadRequest(f"The shape of a cache is {shape!r}; give a KVShape with layers.")
        if capacity is not None:
            capacity = whole_number(capacity, "The capacity of a cache", 1)
        if dtype not in DTYPES:
            raise BadRequest(f"The dtype of a cache is {dtype}; give one of {DTYPES}.")
        check_device(device)
        latents = any(layer.latent_dim is not None for layer in shape.layers)
        shared = len(shape.own) < shape.num_layers
        if (latents and not self.stores_latents) or (shared and not self.shares_layers):
            kind, name = "MLA" if latents else "shared", type(self).__name__
            raise BadRequest(f"{name} does not support {kind} layers; make a contiguous cache.")
        self.shape = shape
        self.capacity = capacity
        self.dtype = dtype
        self.device = torch.device(device)
        self.lengths = (0,) * whole_number(batch, "The batch of a cache", 1)
        self._pass: dict[Any, Any] = {}  # results that the layers of one pass share

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        """Number of tokens that the longest row has seen, including dropped ones."""
        return max(self.lengths)

    def advance(self, num_tokens: int, counts: Sequence[int] | None = None) -> Tensor:
        """Announce `num_tokens` new tokens per row, of which `counts[b]` are real.

        Returns their positions [B, T]. Raises BadRequest if the cache is full.
        """
        num_tokens = whole_number(num_tokens, "The number of new tokens", 1)
        counts = checked_counts(num_tokens, counts, self.batch)
        lengths = tuple(map(int.__add__, self.lengths, counts))
        if self.capacity is not None and max(lengths) > self.capacity:
            raise BadRequest(
                f"The cache is full: {max(lengths)} tokens exceed the capacity of {self.capacity}; "
                "rewind the cache or make a larger one."
            )
        step = Step(self.lengths, counts, num_tokens, self.device)
        self._reserve(lengths, step)
        self.step, self.lengths, self._pass = step, lengths, {}
        return step.positions

    def rewind(self, lengths: int | Sequence[int]) -> None:
        """Keep the first `lengths` tokens of each row: one number, or one per row.

        0 empties a row. Raises BadRequest, and changes nothing, if a row has fewer
        tokens or if the cache has dropped tokens that it needs.
        """
        each = lengths if is_sequence(lengths) else [lengths] * self.batch
        lengths = whole_numbers(each, "The lengths to rewind to", self.batch)
        for row, (keep, length) in enumerate(zip(lengths, self.lengths)):
            if not 0 <= keep <= length:
                raise BadRequest(f"Row {row} has {length} tokens; keep 0 to {length}, not {keep}.")
        if lengths != self.lengths:
            self._rewind(lengths)
            self.lengths, self._pass = lengths, {}

    def most_at_once(self) -> tuple[int | None, ...]:
        """Return the maximum number of tokens that one pass may add to each row.

        None means any number. A pass within this limit gives the same answers as single
        steps, and `rewind` can then undo all of its tokens except the first.
        Speculative decoding reads this limit before it drafts.
        """
        return (None,) * self.batch

    def allow_rewind(self, tokens: int) -> None:  # noqa: B027  (optional to override)
        """Prepare an empty cache for rewinds by up to `tokens` tokens.

        Windowed caches keep that many more tokens. Other caches do nothing: most keep
        every token, and evicted tokens cannot be restored.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Replace row i by the previous row `rows[i]`: reorder, repeat or drop rows."""
        rows = whole_numbers(rows, "The rows to select")
        if not rows or not 0 <= min(rows) <= max(rows) < self.batch:
            raise BadRequest(
                f"The rows are {list(rows)}; give at least one of 0 to {self.batch - 1}."
            )
        if rows != tuple(range(self.batch)):
            with torch.inference_mode(False), torch.no_grad():
                self._select(rows, torch.tensor(rows, device=self.device))
            self.lengths = tuple(self.lengths[row] for row in rows)
            self._pass, self._in_memory = {}, None

    def cached_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys [B, K, S, D] in float32, and positions [B, S].

        The position of an empty slot is NOWHERE. Use this only for inspection, because
        it decodes all keys at once.
        """
        own = [i for i in self.shape.own if self.shape.layers[i].latent_dim is None]
        if whole_number(layer, "layer") not in own:
            raise BadRequest(f"Layer {layer} has no keys of its own; give one of the layers {own}.")
        if self.length == 0:
            raise BadRequest("The cache has no tokens; pass some through the model first.")
        return self._cached_keys(layer)

    def in_memory(self) -> InMemory | None:
        """Return the memory of keys and values, or None if no kernel can read it.

        The same object is returned until the tensors move. A subclass that changes
        `append` or `attend` must override this method, too.
        """
        if self._in_memory is None and self.device.type == "cpu":
            odd = (layer.sinks or layer.latent_dim is not None for layer in self.shape.layers)
            if len(self.shape.own) == self.shape.num_layers and not any(odd):
                self._in_memory = self._layout()
        return self._in_memory

    def nbytes(self) -> int:
        """Return the number of bytes of all allocated tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def check_own(self, layer: int) -> None:
        """Raise ValueError if the layer reads another layer's cache."""
        home = self.shape.home[layer]
        if home != layer:
            raise ValueError(f"Layer {layer} reads the cache of layer {home}; append to that one.")

    @abstractmethod
    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values [B, K, T, D] of the tokens just announced."""

    @abstractmethod
    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        """Compute attention [B, H, T, D] for the queries of the announced tokens.

        `scale` multiplies the scores (None: 1 / sqrt(D)).
        """

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Return all tensors that are allocated for keys and values."""

    @abstractmethod
    def nbytes_used(self) -> int:
        """Return the number of bytes that the cached tokens need."""

    @abstractmethod
    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        """Make room for `lengths`, or raise BadRequest and change nothing."""

    @abstractmethod
    def _select(self, rows: tuple[int, ...], order: Tensor) -> None:
        """Reorder all tensors and per-row numbers.

        Two rows must not share memory afterwards. `order` is `rows` as a tensor.
        """

    @abstractmethod
    def _cached_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the result of `cached_keys` for a layer with keys of its own."""

    def _rewind(self, lengths: tuple[int, ...]) -> None:  # noqa: B027  (optional to override)
        """Drop the tokens after `lengths`, or raise BadRequest and change nothing."""

    def _layout(self) -> InMemory | None:
        """Return the result of `in_memory` if all layers are alike and on the CPU."""
        return None


class InDtype:
    """Convert tensors between a cache and layers of another dtype.

    It has only the methods that a forward pass calls.
    """

    def __init__(self, cache: KVCache):
        self.cache, self.advance = cache, cache.advance

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.cache.lengths

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.cache.append(layer, keys.to(self.cache.dtype), values.to(self.cache.dtype))

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        return self.cache.attend(layer, queries.to(self.cache.dtype), scale).to(queries.dtype)


def in_dtype(cache: KVCache, dtype: torch.dtype) -> KVCache | InDtype:
    """Return the cache, wrapped in a converter if its dtype is not `dtype`."""
    return cache if cache.dtype == dtype else InDtype(cache)
