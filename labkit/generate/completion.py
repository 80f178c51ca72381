"""What generation gives back: a `Token` as it comes, and a `Completion` when it is done.

TTFT, the time to the first token, runs from the start of prefill until that token is known on the CPU; it
belongs to prefill. TPOT is the mean time per token after the first. Both are read from `time.perf_counter`
when a token's id has arrived, which waits for the device by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StopReason = Literal["end_token", "stop_string", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One generated token and the text that became certain with it, which may be empty or belong to earlier ones.

    The last token of a row carries `stop_reason` and the rest of the text. A row that was cancelled ends with
    a `Token` whose `id` is None.
    """

    id: int | None
    text: str | None
    row: int = 0
    stop_reason: StopReason | None = None


@dataclass(frozen=True)
class Completion:
    """One finished row. `tokens` includes the end token; `text` does not, nor the stop string and what follows it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    stop_reason: StopReason
    token_times_s: tuple[float, ...] = ()  # since the start of prefill, one a token

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None where there is none."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
