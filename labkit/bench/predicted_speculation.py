"""Speculative decoding predicted, then measured: constants and alpha from one half of the prompts, speed on the other.

    alpha, lengths of the drafts      from the first half: accepted / examined, and how many tokens were drafted each pass
    cost of a pass                    from the first half: draft, verify and overhead, in plain steps timed in turns with them
    predicted                         mean of (1 - alpha^(d + 1)) / (1 - alpha), over drafts of d / mean cost of a pass
    measured                          plain seconds a token / speculative ones, second half, all arms in turns

Where every pass drafts alike this is the textbook formula; look-up drafts in some passes only, so its lengths are a list.
The halves run in turns too: a shared machine's speed changes within seconds, and a constant must not be of another minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from labkit.bench.speculate import FIXED, LENGTHS, rounds, seconds_a_token, total
from labkit.measure.clock import Ratio, median_ratio
from labkit.plan.time import expected_accepted_length
from labkit.speculate import Drafter
from labkit.speculate.costs import MeasuredCosts
from labkit.speculate.report import Speculated
from labkit.texts.prompt_kinds import prompts


@dataclass(frozen=True)
class Trial:
    """One drafter on one kind of prompt. `alpha`, `draft_yield` and `accepted_length` are of the half that was timed."""

    drafter: str
    task: str
    length: int
    predicted_alpha: float
    predicted: float
    measured: Ratio
    alpha: float | None
    draft_yield: float | None
    accepted_length: float
    c: float  # seconds a drafted token, the reading of prompts included, / a plain step
    same_tokens: bool

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the measurement."""
        return self.predicted / self.measured.value - 1


def predicted_speedup(passes: Sequence[tuple[int, int]], alpha: float, pass_cost: float) -> float:
    """From (drafted, accepted) of passes seen elsewhere; only how much was drafted counts here, alpha says the rest.
    `pass_cost`: mean cost of a pass in plain steps."""
    return sum(expected_accepted_length(alpha, drafted) for drafted, _ in passes) / len(passes) / pass_cost


def halves(task: str, tokenizer, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """`count` prompts to learn from and `count` others, in turns."""
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
    """Every drafter on every task. A prediction uses nothing of the half that it is held against."""
    trials = []
    for task in tasks:
        on_progress(task)
        both = [ids for pair in zip(*halves(task, target.tokenizer, count)) for ids in pair]
        runs = rounds(target, drafters, both, new_tokens, repeats, costs, lengths)
        seen, timed = ({name: [one[half::2] for one in kept] for name, kept in runs.items()} for half in (0, 1))
        plain_s = statistics.median(seconds_a_token(one) for one in seen["plain"])
        trials += [_trial(name, task, lengths.get(name, FIXED), _guess(sum(seen[name], []), plain_s), timed) for name in drafters]
    return trials


def _guess(completions: Sequence[Speculated], plain_s: float) -> tuple[float, float, float]:
    """alpha, predicted speed-up and c."""
    whole = total(completions)
    tally, alpha = whole.tally, whole.alpha or 0.0
    pass_s = (tally.draft_s + tally.verify_s + tally.overhead_s) / tally.target_passes
    c = tally.draft_s / max(1, tally.drafted) / plain_s
    return alpha, predicted_speedup(tally.passes, alpha, pass_s / plain_s), c


def _trial(name: str, task: str, length: int, guess: tuple[float, float, float], runs: dict) -> Trial:
    alpha, predicted, c = guess
    plain, mine = ([seconds_a_token(one) for one in runs[key]] for key in ("plain", name))
    whole = total(runs[name][-1])
    same = all(a.tokens == b.tokens for a, b in zip(runs[name][-1], runs["plain"][-1]))
    return Trial(name, task, length, alpha, predicted, median_ratio([p / m for p, m in zip(plain, mine)]),
                 whole.alpha, whole.draft_yield, whole.accepted_length, c, same)  # fmt: skip
