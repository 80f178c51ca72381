"""One text as it grows: a `Token` at a time, and a `Completion` at the end.

TTFT, the time to first token, runs from the start of prefill until the token is known
on the CPU; it belongs to prefill. TPOT is the mean time per token after the first. With
a drafter, a completion also tells what drafting did:

    alpha            accepted / examined: a pass examines tokens up to the first rejected one
    draft yield      accepted / drafted: lower than alpha, and not the alpha of the formulas
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
    """One generated token and the text that became certain with it, which may be empty.

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
    """Counts and seconds of one row's drafting.

    The first token belongs to prefill and is not in it.

    Seconds and steps are those of the batch while the row was in it.
    """

    drafted: int = 0
    examined: int = 0
    accepted: int = 0
    target_passes: int = 0
    draft_steps: int = 0  # drafted tokens of the longest draft in each pass
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
    """A finished row. `tokens` include the end token.

    `text` ends before it, or before a stop string.

    `token_times_s`: seconds since the start of prefill, one per token. `tally` and
    `drafter` are set if a drafter was used.
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
        """Time to first token; None without tokens."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
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
        """Draft step time / target pass time in this run.

        Target passes here read several tokens; a benchmark times single steps.
        """
        tally = self.tally
        draft_s = _ratio(tally.draft_s, tally.draft_steps)
        return None if draft_s is None else _ratio(draft_s * tally.target_passes, tally.verify_s)

    @property
    def drafted_tokens(self) -> tuple[bool, ...]:
        """For each token, whether it was drafted; the others are the target's own."""
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
    """One text: its prompt, its tokens so far, and why it ended.

    `history` is prompt and tokens.
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
        """Return what the next pass reads: the last token, or the whole text without a cache."""
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
        text, stopped = "", False
        if token in end_ids:
            self.reason = "end_token"
        elif self.stream is not None:
            text, stopped = self.stream.push(token)
        if stopped:
            self.reason = "stop_string"
        elif self.reason is None and len(self.tokens) >= self.budget:
            self.reason = "length"
        if self.stream is None:
            return Token(token, None, self.index, self.reason)
        if self.reason is not None and not stopped:
            text += self.stream.finish()
        return Token(token, text, self.index, self.reason)

    def cancel(self) -> Token:
        """End the row here; return a closing `Token` without id, with the text kept back."""
        self.reason = "cancelled"
        text = None if self.stream is None else self.stream.finish()
        return Token(None, text, self.index, self.reason)

    def completion(
        self, tokenizer: Tokenizer | None, drafter: str | None = None, tally: Tally | None = None
    ) -> Completion:
        """Return the finished row."""
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
    """Whether text precedes the first new token.

    If not, its leading space may be dropped.
    """
    return any(token not in tokenizer.special_ids for token in prompt)
