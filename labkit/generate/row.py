"""One row of a batch: a `Token` at a time, and a `Completion` at the end.

TTFT, the time to first token, runs from the start of prefill until the first token is
known on the CPU. TPOT is the mean time per token after the first. If a drafter was used,
a completion also has these ratios:

    alpha            accepted / examined; a pass examines tokens up to the first rejected one
    draft yield      accepted / drafted; lower than alpha, and not the alpha of the formulas
    accepted length  tokens per target pass; 1 is plain decoding
    c                seconds of a draft step / seconds of a target pass
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from operator import iadd
from typing import Literal

import torch

from labkit.generate.sampling import Past
from labkit.generate.stopping import TextStream
from labkit.model.tokenizer import Tokenizer

StopReason = Literal["end_token", "stop_string", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One generated token and the text that it completes, which may be empty.

    The last token of a row has a `stop_reason` and the rest of the text. A row that was
    cancelled ends with a `Token` whose `id` is None. `text` is None if the model has no
    tokenizer.
    """

    id: int | None
    text: str | None
    row: int = 0
    stop_reason: StopReason | None = None


Tokens = Generator[Token, None, None]


@dataclass
class Tally:
    """Counts and seconds of one row's drafting, without prefill and its first token.

    Seconds and steps are those of the whole batch, from passes with this row.
    """

    drafted: int = 0
    examined: int = 0
    accepted: int = 0
    target_passes: int = 0
    draft_steps: int = 0  # sum over passes of the longest draft's tokens
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    passes: list[tuple[int, int]] = field(default_factory=list)  # (drafted, accepted) of each

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, iadd(getattr(self, name), value))  # a list grows in place
        return self


@dataclass(frozen=True)
class Completion:
    """The result of one row.

    `tokens` include the end token. `text` ends before the end token or stop string.
    `token_times_s` are seconds since the start of prefill, one per token. `drafter` is
    the drafter's name; it is None and `tally` has zeros if no drafter was used.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    stop_reason: StopReason
    token_times_s: tuple[float, ...] = ()
    drafter: str | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds; None if there are no tokens."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None if there are fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def alpha(self) -> float | None:
        return _ratio(self.tally.accepted, self.tally.examined)

    @property
    def draft_yield(self) -> float | None:
        return _ratio(self.tally.accepted, self.tally.drafted)

    @property
    def accepted_length(self) -> float | None:
        return _ratio(len(self.tokens) - 1, self.tally.target_passes)

    @property
    def c(self) -> float | None:
        """Seconds of a draft step / seconds of a target pass, in this run.

        These target passes read several tokens; a benchmark times passes of one token.
        """
        tally = self.tally
        draft_s = _ratio(tally.draft_s, tally.draft_steps)
        return None if draft_s is None else _ratio(draft_s * tally.target_passes, tally.verify_s)

    @property
    def drafted_tokens(self) -> tuple[bool, ...]:
        """True for each token that was drafted, False for each that the target chose."""
        origins = [False]
        for _, accepted in self.tally.passes:
            origins += [True] * accepted + [False]
        return tuple(origins[: len(self.tokens)])

    def counts(self) -> dict[str, int]:
        """Return the counts that `labkit generate --json` prints."""
        names = ("drafted", "examined", "accepted", "target_passes")
        return {name: getattr(self.tally, name) for name in names}


@dataclass
class Row:
    """One row of a batch: its prompt, its tokens so far, and the reason why it ended.

    `history` has the prompt and the tokens. `times_s` are seconds since the start of
    prefill, one per token.
    """

    index: int
    prompt: tuple[int, ...]
    budget: int
    generator: torch.Generator | None = None  # None: greedy
    stream: TextStream | None = None
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    reason: StopReason | None = None

    def __post_init__(self) -> None:
        self.history = list(self.prompt)
        if self.budget == 0:
            self.reason = "length"

    def new_tokens(self, cached: bool) -> Sequence[int]:
        """Return the tokens that the next pass reads: the last one, or all without a cache."""
        if self.reason is not None:
            return ()
        return self.history[-1:] if cached else self.history

    def past(self, end_ids: frozenset[int]) -> Past:
        return Past(self.history, len(self.prompt), end_ids)

    def take(self, token: int, time_s: float, end_ids: frozenset[int]) -> Token:
        """Add one token; set `reason` if the row ends with it."""
        self.tokens.append(token)
        self.history.append(token)
        self.times_s.append(time_s)
        text = None if self.stream is None else ""
        if token in end_ids:
            self.reason = "end_token"
        elif self.stream is not None:
            text, stopped = self.stream.push(token)
            self.reason = "stop_string" if stopped else None
        if self.reason is None and len(self.tokens) >= self.budget:
            self.reason = "length"
        if self.stream is not None and self.reason in ("end_token", "length"):
            text = (text or "") + self.stream.finish()
        return Token(token, text, self.index, self.reason)

    def cancel(self) -> Token:
        """End the row; return a closing `Token` without an id, with the rest of the text."""
        self.reason = "cancelled"
        text = None if self.stream is None else self.stream.finish()
        return Token(None, text, self.index, self.reason)

    def completion(
        self, tokenizer: Tokenizer | None, drafter: str | None = None, tally: Tally | None = None
    ) -> Completion:
        """Return the result of the row; `tokenizer` gives the text if there is no `stream`."""
        text = None
        if self.stream is not None:
            text = self.stream.text
        elif tokenizer is not None:
            ids = self.tokens[:-1] if self.reason == "end_token" else self.tokens
            text = tokenizer.decode(ids, continues=has_text(tokenizer, self.prompt))
        reason = self.reason or "length"
        times_s, tally = tuple(self.times_s), tally or Tally()
        return Completion(self.prompt, tuple(self.tokens), text, reason, times_s, drafter, tally)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def has_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return True if a prompt has tokens other than special ones.

    If it has none, a leading space of the first new token is dropped.
    """
    return any(token not in tokenizer.special_ids for token in prompt)
