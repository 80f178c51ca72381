"""Speculative decoding predicted, then measured: constants and alpha from one half of the prompts, speed on the other.

    alpha, lengths of the drafts      from the first half: accepted / examined, and how many tokens were drafted each pass
    costs                             c and verify(n) timed one by one (`labkit.speculate.costs`), no text accepted or refused
    predicted                         mean of (1 - alpha^(d + 1)) / (1 - alpha) over mean cost of a pass, over drafts of d
    measured                          plain seconds a token / speculative ones, second half, all arms in turns

Where every pass drafts alike this is the textbook formula; look-up drafts in some passes only, so its lengths are a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from labkit.bench.speculate import FIXED, LENGTHS, rounds, seconds_a_token, total
from labkit.measure.clock import Ratio, median_ratio
from labkit.plan.time import SpeculationCosts, expected_accepted_length
from labkit.speculate import Drafter, generate
from labkit.speculate.costs import MeasuredCosts
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
    c: float
    same_tokens: bool

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the measurement."""
        return self.predicted / self.measured.value - 1


def predicted_speedup(passes: Sequence[tuple[int, int]], alpha: float, costs: SpeculationCosts) -> float:
    """From (drafted, accepted) of passes seen elsewhere; only how much was drafted counts here, alpha says the rest."""
    tokens = sum(expected_accepted_length(alpha, drafted) for drafted, _ in passes)
    return tokens / sum(costs.pass_cost(drafted) for drafted, _ in passes)


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
    """Every drafter on every task, predicted before anything of the second half is run."""
    trials = []
    for task in tasks:
        on_progress(task)
        learnt, timed = halves(task, target.tokenizer, count)
        guesses = {}
        for name, drafter in drafters.items():
            length = lengths.get(name, FIXED)
            seen = total([generate(target, text, drafter=drafter, draft_length=length, max_new_tokens=new_tokens) for text in learnt])
            alpha = min(seen.alpha or 0.0, 1.0)
            guesses[name] = length, alpha, predicted_speedup(seen.tally.passes, alpha, costs.of(name))
        trials += _measure(target, drafters, task, timed, guesses, costs, new_tokens, repeats)
    return trials


def _measure(target, drafters, task, timed, guesses, costs, new_tokens, repeats) -> list[Trial]:
    lengths = {name: length for name, (length, _, _) in guesses.items()}
    runs = rounds(target, drafters, timed, new_tokens, repeats, costs, lengths)
    plain = [seconds_a_token(one) for one in runs["plain"]]
    trials = []
    for name, (length, alpha, predicted) in guesses.items():
        mine, whole = [seconds_a_token(one) for one in runs[name]], total(runs[name][-1])
        same = all(a.tokens == b.tokens for a, b in zip(runs[name][-1], runs["plain"][-1]))
        trials.append(Trial(name, task, length, alpha, predicted, median_ratio([p / m for p, m in zip(plain, mine)]),
                            whole.alpha, whole.draft_yield, whole.accepted_length, costs.of(name).draft, same))  # fmt: skip
    return trials
