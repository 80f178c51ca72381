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
from operator import index

import torch
from torch import Tensor

from labkit.cache.step import Step
from labkit.errors import BadRequest
from labkit.plan.memory import KVShape


def whole_number(value: object, what: str) -> int:
    """`value` as an int, or a refusal: booleans, fractions and text are not token counts."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise BadRequest(f"{what} is {value!r}; give a whole number.") from None


class KVCache(ABC):
    """Keys and values of `batch` rows, at most `capacity` tokens each (None: as many as memory holds)."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None,
                 dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        batch = whole_number(batch, "The batch of a cache")
        if batch < 1:
            raise BadRequest(f"The batch of a cache is {batch}; give at least 1 row.")
        if capacity is not None and whole_number(capacity, "The capacity of a cache") < 1:
            raise BadRequest(f"The capacity of a cache is {capacity}; give at least 1 token, or None for no limit.")
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
        counts = self._checked_counts(num_tokens, counts)
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

    def rewind(self, lengths: int | Sequence[int]) -> None:
        """Keep the first `lengths` tokens (one number, or one a row); 0 is empty; never grows."""
        if isinstance(lengths, str) or not hasattr(lengths, "__len__"):
            kept = (whole_number(lengths, "The length to rewind to"),) * self.batch
        else:
            kept = tuple(whole_number(length, "A length to rewind to") for length in lengths)
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
        rows = tuple(whole_number(row, "A row to select") for row in rows)
        if not rows:
            raise BadRequest("No rows to select; name at least one row of the cache.")
        for row in rows:
            if not 0 <= row < self.batch:
                raise BadRequest(f"Row {row} to select of {self.batch}; give rows from 0 to {self.batch - 1}.")
        if rows != tuple(range(self.batch)):
            with torch.inference_mode(False), torch.no_grad():
                self._select(rows)
            self.lengths = tuple(self.lengths[row] for row in rows)

    def _checked_counts(self, num_tokens: int, counts: Sequence[int] | None) -> tuple[int, ...]:
        if num_tokens < 1:
            raise BadRequest(f"{num_tokens} new tokens; advance by at least 1.")
        if counts is None:
            return (num_tokens,) * self.batch
        counts = tuple(whole_number(count, "A count of new tokens") for count in counts)
        if len(counts) != self.batch:
            raise BadRequest(f"{len(counts)} counts of new tokens for {self.batch} rows; give one a row.")
        if min(counts) < 0 or max(counts) > num_tokens or max(counts) == 0:
            raise BadRequest(f"Counts of new tokens are {list(counts)}; give 0 to {num_tokens} each, not all 0.")
        return counts

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
