"""Measure the time that a prefix hit saves, and what other tenants can learn from it.

`ttft_by_asker`   one prompt, asked again by its tenant (hit), by another tenant, and with nothing
                  stored. The last two must be equal within noise.
`guess`           an attacker tries each candidate; the fastest is the guess of the victim's prompt.
                  `salted`: tenants are separated, as the store does; otherwise they share.

Every request computes one token. Limitation: on a busy machine a single guess is noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.entry import Fingerprint
from labkit.cache.prefix.store import PrefixStore, PrefixView
from labkit.generate import generate
from labkit.lab.measure.clock import Timing
from labkit_course.experiments.cache_or_not import random_tokens

HIT, OTHER, NOBODY = "hit", "another tenant", "nobody's"


def make_store(model, tokens: int, **options) -> PrefixStore:
    """Return a store over a pool for `tokens` tokens; entries may use half of it."""
    pool = PagePool(model.config.kv_shape, -(-tokens // 16), dtype=model.dtype, device=model.device)
    return PrefixStore(pool, pool.total * pool.block_bytes // 2, **options)


def ttft(model, tokens: Sequence[int], view: PrefixView) -> float:
    """Return the seconds from the prompt to its first token, with the look-up."""
    known = []
    start = perf_counter()
    generate(
        model,
        list(tokens),
        prefixes=view,
        max_new_tokens=1,
        end_ids=(),
        on_token=lambda _: known.append(perf_counter()),
    )
    return known[0] - start


@dataclass(frozen=True)
class Askers:
    """Seconds to the first token by asker and round, and the number of computed tokens."""

    times: dict[str, Timing]
    computed: dict[str, int]


def ttft_by_asker(
    model,
    fingerprint: Fingerprint,
    system_tokens: int,
    question_tokens: int,
    *,
    repeats: int = 5,
    on_round: Callable[[int], None] | None = None,
) -> Askers:
    """Time each asker on fresh tokens in every round; the first round is warm-up."""
    store = make_store(model, 4 * (system_tokens + question_tokens + 64))
    views = {name: store.open(name, "", fingerprint) for name in ("mine", "yours")}
    times: dict[str, list[float]] = {HIT: [], OTHER: [], NOBODY: []}
    computed = {}
    for turn in range(repeats + 1):
        text = random_tokens(model, system_tokens + 2 * question_tokens, seed=turn)
        system, earlier, now = (
            text[:system_tokens],
            text[system_tokens:-question_tokens],
            text[-question_tokens:],
        )
        names = list(times)
        for name in names[turn % 3 :] + names[: turn % 3]:
            store.forget(scope="")
            if name != NOBODY:
                ttft(model, [*system, *earlier], views["mine"])
            before = store.counters.tokens_found
            times[name].append(
                ttft(model, [*system, *now], views["mine" if name == HIT else "yours"])
            )
            computed[name] = len(system) + len(now) - (store.counters.tokens_found - before)
        if on_round is not None:
            on_round(turn)
    return Askers({name: Timing(tuple(seconds[1:])) for name, seconds in times.items()}, computed)


def prefill_times(model, lengths: Sequence[int], *, repeats: int = 3) -> dict[int, float]:
    """Return {tokens: best seconds of a prefill of that length}, for predictions."""
    return {
        n: min(
            generate(model, random_tokens(model, n, seed), max_new_tokens=1, end_ids=()).ttft_s
            for seed in range(repeats)
        )
        for n in lengths
    }


@dataclass(frozen=True)
class Guess:
    """Seconds of each candidate, and the index of the victim's prompt."""

    seconds: tuple[float, ...]
    truth: int

    @property
    def right(self) -> bool:
        return min(range(len(self.seconds)), key=self.seconds.__getitem__) == self.truth


def guess(
    model,
    fingerprint: Fingerprint,
    candidates: Sequence[Sequence[int]],
    question: Sequence[int],
    truth: int,
    *,
    salted: bool,
) -> Guess:
    """Let the victim ask candidate `truth`, then time each candidate once in random order."""
    store = make_store(model, sum(map(len, candidates)) * 2 + 64 * len(candidates))
    victim = store.open("victim", "", fingerprint)
    other = store.open("attacker" if salted else "victim", "", fingerprint)
    ttft(model, [*candidates[truth], *question[::-1]], victim)
    seconds = [0.0] * len(candidates)
    for which in random.Random(truth).sample(range(len(candidates)), len(candidates)):
        seconds[which] = ttft(model, [*candidates[which], *question], other)
    return Guess(tuple(seconds), truth)
