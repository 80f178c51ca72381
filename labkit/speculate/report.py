"""What speculative decoding gives back: a `Completion`, and what drafting did for it.

    alpha            accepted / examined: a pass examines up to the first refused token, what follows it is nobody's business
    draft yield      accepted / drafted: how much of the drafting was of use; lower than alpha, and not the alpha of formulas
    accepted length  tokens a target pass gave; 1 is plain decoding
    c                seconds of a draft step / seconds of a target pass

The first token belongs to the prefill and to none of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.generate.completion import Completion


@dataclass
class Tally:
    """Counts of one row as they grow. Seconds and steps are those of the batch while the row was in it."""

    drafted: int = 0
    examined: int = 0
    accepted: int = 0
    target_passes: int = 0
    draft_steps: int = 0  # drafted tokens of the longest draft in each pass
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    passes: list[tuple[int, int]] = field(default_factory=list)  # (drafted, accepted) of each

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def add(self, drafted: int, kept: int, emitted: int) -> int:
        """One pass that kept `kept` of `drafted` tokens, of which the row took `emitted` before it ended; those count."""
        accepted = min(kept, emitted)
        refused = emitted > accepted and kept < drafted
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.examined += accepted + refused
        self.target_passes += 1
        self.passes.append((drafted, accepted))
        return accepted


@dataclass(frozen=True)
class Speculated(Completion):
    """A finished row of speculative decoding."""

    tally: Tally = None
    drafter: str = ""

    @property
    def alpha(self) -> float | None:
        return self.tally.accepted / self.tally.examined if self.tally.examined else None

    @property
    def draft_yield(self) -> float | None:
        return self.tally.accepted / self.tally.drafted if self.tally.drafted else None

    @property
    def accepted_length(self) -> float | None:
        return (len(self.tokens) - 1) / self.tally.target_passes if self.tally.target_passes else None

    @property
    def c(self) -> float | None:
        """Of this run, whose target passes see several tokens each; a bench times single steps."""
        tally = self.tally
        if not tally.draft_steps or not tally.verify_s:
            return None
        return (tally.draft_s / tally.draft_steps) / (tally.verify_s / tally.target_passes)

    @property
    def drafted_tokens(self) -> tuple[bool, ...]:
        """For each token, whether a draft had it (else it is the target's own)."""
        origins = [False]
        for _, accepted in self.tally.passes:
            origins += [True] * accepted + [False]
        return tuple(origins[: len(self.tokens)])

    def speedup(self, plain_s: float) -> float:
        """Against plain decoding at `plain_s` a token: accepted length * plain / (draft + verify + overhead) of a pass."""
        spent = self.tally.draft_s + self.tally.verify_s + self.tally.overhead_s
        return (len(self.tokens) - 1) * plain_s / spent

    def counts(self) -> dict[str, int]:
        """What `labkit generate --json` says of it."""
        names = ("drafted", "examined", "accepted", "target_passes")
        return {name: getattr(self.tally, name) for name in names}
