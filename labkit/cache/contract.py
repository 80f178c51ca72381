"""What every KV cache promises, and the bookkeeping that they share.

One forward pass is one `advance` (which tokens are new) and then, in each layer, `append` (their keys and
values) and `attend` (queries against all that is held). A cache may attend without gathering, so packed,
paged and windowed caches fit. Rows of a batch have lengths of their own, kept as Python integers so that no
step waits for the device; batches of unequal prompts are padded on the right and `counts` drops the padding.

    cache.advance(T, counts) -> positions [B, T]
    cache.append(layer, keys [B, K, T, D], values [B, K, T, D])      keys already rotated
    cache.attend(layer, queries [B, H, T, D]) -> [B, H, T, D]

A new cache writes five small methods (`append`, `attend`, `_reserve`, `_select`, `nbytes`) and, where going
back touches more than a length, `_rewind`. All checks happen here, before anything is changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.cache.step import Step
from labkit.errors import BadRequest, whole_number
from labkit.measure.device import check_device
from labkit.plan.memory import KVShape

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def whole_numbers(values: object, what: str) -> tuple[int, ...]:
    """A sequence of whole numbers, or a refusal; one number alone is none."""
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        found = tuple(values)
    except TypeError:
        raise BadRequest(f"{what} are {values!r}; give a sequence of whole numbers.") from None
    return tuple(whole_number(value, f"One of {what[0].lower()}{what[1:]}") for value in found)


def checked_counts(num_tokens: int, counts: Sequence[int] | None, batch: int) -> tuple[int, ...]:
    """How many of `num_tokens` new tokens are real in each row; None: all."""
    if counts is None:
        return (num_tokens,) * batch
    counts = whole_numbers(counts, "The counts of new tokens")
    if len(counts) != batch:
        raise BadRequest(f"{len(counts)} counts of new tokens for {batch} rows; give one a row.")
    if min(counts) < 0 or max(counts) > num_tokens or max(counts) == 0:
        raise BadRequest(f"The counts of new tokens are {list(counts)}; give 0 to {num_tokens} each, not all 0.")
    return counts


class KVCache(ABC):
    """Keys and values of `batch` rows, at most `capacity` tokens each (None: as many as memory holds)."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None,
                 dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        if not isinstance(shape, KVShape) or not shape.layers:
            raise BadRequest(f"The shape of a cache is {shape!r}; give a KVShape of at least one layer.")
        batch = whole_number(batch, "The batch of a cache", 1)
        if capacity is not None:
            capacity = whole_number(capacity, "The capacity of a cache (None: no limit)", 1)
        if dtype not in DTYPES:
            raise BadRequest(f"The dtype of a cache is {dtype}; give one of {', '.join(map(str, DTYPES))}.")
        check_device(device)
        self.shape, self.capacity, self.dtype, self.device = shape, capacity, dtype, torch.device(device)
        self.lengths: tuple[int, ...] = (0,) * batch
        self.step: Step | None = None  # of the forward pass that runs or ran last

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        """Tokens seen by the longest row, whatever a window or an eviction has dropped since."""
        return max(self.lengths)

    def advance(self, num_tokens: int, counts: Sequence[int] | None = None) -> Tensor:
        """Announce `num_tokens` new tokens a row, of which `counts[b]` are real; their positions [B, T]."""
        num_tokens = whole_number(num_tokens, "The number of new tokens", 1)
        counts = checked_counts(num_tokens, counts, self.batch)
        lengths = tuple(map(int.__add__, self.lengths, counts))
        if self.capacity is not None and max(lengths) > self.capacity:
            row = lengths.index(max(lengths))
            raise BadRequest(
                f"The cache is full: row {row} holds {self.lengths[row]} tokens and {counts[row]} more exceed its "
                f"capacity of {self.capacity}; rewind it or make one with a larger capacity."
            )
        step = Step(self.lengths, counts, num_tokens, self.device)
        self._reserve(lengths, step)
        self.step, self.lengths = step, lengths
        return step.positions

    def most_at_once(self) -> tuple[int | None, ...]:
        """How many tokens one pass may add to each row so that the answers are those of single steps and all but the first
        can be taken back by `rewind`; None is any number. What speculative decoding asks before it drafts."""
        return (None,) * self.batch

    def rewind(self, lengths: int | Sequence[int]) -> None:
        """Keep the first `lengths` tokens (one number, or one a row); 0 is empty; never grows."""
        if isinstance(lengths, str) or not hasattr(lengths, "__len__") or getattr(lengths, "ndim", 1) == 0:
            kept = (whole_number(lengths, "The length to rewind to"),) * self.batch
        else:
            kept = whole_numbers(lengths, "The lengths to rewind to")
        if len(kept) != self.batch:
            raise BadRequest(f"{len(kept)} lengths to rewind to for {self.batch} rows; give one number or one a row.")
        for row, (keep, held) in enumerate(zip(kept, self.lengths)):
            if not 0 <= keep <= held:
                raise BadRequest(f"Row {row} holds {held} tokens and cannot keep {keep}; give 0 to {held}.")
        if kept != self.lengths:
            self._rewind(kept)
            self.lengths = kept

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of what row `rows[i]` was: reorder, repeat or drop rows."""
        rows = whole_numbers(rows, "The rows to select")
        if not rows:
            raise BadRequest("No rows to select; name at least one row of the cache.")
        for row in rows:
            if not 0 <= row < self.batch:
                raise BadRequest(f"Row {row} to select of {self.batch}; give rows from 0 to {self.batch - 1}.")
        if rows != tuple(range(self.batch)):
            with torch.inference_mode(False), torch.no_grad():
                self._select(rows)
            self.lengths = tuple(self.lengths[row] for row in rows)

    @abstractmethod
    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values [B, K, T, D] of the tokens just announced."""

    @abstractmethod
    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        """Attention of the announced tokens' queries [B, H, T, D] over what the layer holds."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the tensors that are really allocated."""

    @abstractmethod
    def nbytes_used(self) -> int:
        """Bytes that the tokens now held need, by the formula."""

    @abstractmethod
    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        """Make room for `lengths`, or refuse with nothing changed."""

    @abstractmethod
    def _select(self, rows: tuple[int, ...]) -> None:
        """Reorder every tensor and every per-row number that the subclass keeps; no two rows may alias."""

    def _rewind(self, lengths: tuple[int, ...]) -> None:  # noqa: B027  (a default, not a gap)
        """Forget what lies behind `lengths`, or refuse with nothing changed. Nothing to do where a length suffices."""
