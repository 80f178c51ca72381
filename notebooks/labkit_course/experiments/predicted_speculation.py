"""Predict speculative decoding from one half of the prompts and measure it on the other.

    alpha, draft lengths   first half: accepted / examined, and tokens drafted per pass
    cost of a pass         first half: draft, verify and overhead, in interleaved plain steps
    predicted              mean of (1 - alpha^(d + 1)) / (1 - alpha) over drafts of length d,
                           divided by the mean cost of a pass
    measured               seconds per token, plain / speculative, second half, interleaved

If every pass drafts the same number of tokens, this is the textbook formula; look-up drafts in
some passes only, so its lengths are a list. The halves are interleaved too: the speed of a
shared machine changes within seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from labkit.generate.row import Completion
from labkit.lab.bench.speculate import FIXED, LENGTHS, rounds, seconds_per_token, total
from labkit.lab.bench.speculation_costs import MeasuredCosts
from labkit.lab.measure.clock import Ratio, median_ratio
from labkit.lab.texts.prompt_kinds import prompts
from labkit.plan.time import expected_accepted_length
from labkit.speculate import Drafter


@dataclass(frozen=True)
class Trial:
    """One drafter on one kind of prompt, with the counts of the measured half."""

    drafter: str
    task: str
    length: int
    predicted_alpha: float
    predicted: float
    measured: Ratio
    alpha: float | None
    draft_yield: float | None
    accepted_length: float
    c: float  # seconds per drafted token, prompts included, / a plain step
    same_tokens: bool

    @property
    def error(self) -> float:
        """Return the error of the prediction as a share of the measurement."""
        return self.predicted / self.measured.value - 1


def predicted_speedup(passes: Sequence[tuple[int, int]], alpha: float, pass_cost: float) -> float:
    """Return the speed-up at this alpha for passes [(drafted, accepted)] from other prompts.

    `pass_cost` is the mean cost of a pass in plain steps.
    """
    return (
        sum(expected_accepted_length(alpha, drafted) for drafted, _ in passes)
        / len(passes)
        / pass_cost
    )


def halves(task: str, tokenizer, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return `count` prompts for the prediction and `count` others for the measurement."""
    ids = [prompt.ids(tokenizer) for prompt in prompts(task)[: 2 * count]]
    return ids[0::2], ids[1::2]


def predict_and_measure(
    target,
    drafters: Mapping[str, Drafter],
    tasks: Sequence[str],
    costs: MeasuredCosts,
    *,
    count: int = 2,
    new_tokens: int = 48,
    repeats: int = 1,
    lengths: Mapping[str, int] = LENGTHS,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Trial]:
    """Run every drafter on every task; predictions use only the first half of the prompts."""
    trials = []
    for task in tasks:
        on_progress(task)
        both = [ids for pair in zip(*halves(task, target.tokenizer, count)) for ids in pair]
        runs = rounds(target, drafters, both, new_tokens, repeats, costs, lengths)
        seen, timed = (
            {name: [one[half::2] for one in kept] for name, kept in runs.items()} for half in (0, 1)
        )
        plain_s = statistics.median(seconds_per_token(one) for one in seen["plain"])
        trials += [
            _trial(
                name, task, lengths.get(name, FIXED), _guess(sum(seen[name], []), plain_s), timed
            )
            for name in drafters
        ]
    return trials


def _guess(completions: Sequence[Completion], plain_s: float) -> tuple[float, float, float]:
    """Return alpha, predicted speed-up and c."""
    whole = total(completions)
    tally, alpha = whole.tally, whole.alpha or 0.0
    pass_s = (tally.draft_s + tally.verify_s + tally.overhead_s) / tally.target_passes
    c = tally.draft_s / max(1, tally.drafted) / plain_s
    return alpha, predicted_speedup(tally.passes, alpha, pass_s / plain_s), c


def _trial(
    name: str, task: str, length: int, guess: tuple[float, float, float], runs: dict
) -> Trial:
    alpha, predicted, c = guess
    plain, mine = ([seconds_per_token(one) for one in runs[key]] for key in ("plain", name))
    whole = total(runs[name][-1])
    same = all(a.tokens == b.tokens for a, b in zip(runs[name][-1], runs["plain"][-1]))
    return Trial(
        name,
        task,
        length,
        alpha,
        predicted,
        median_ratio([p / m for p, m in zip(plain, mine)]),
        whole.alpha,
        whole.draft_yield,
        whole.accepted_length,
        c,
        same,
    )
