"""What a prefix hit is worth, and what it tells: times to first token by who asks, and what a guess can learn from them.

`ttft_by_asker`   one prompt: its own tenant's second time (hit), another tenant's while the first one's is held, and
                  anyone's when nothing is held. The last two must be equal within noise.
`guess`           somebody asks with each candidate in turn and takes the fastest for what a victim has asked before.
                  `salted`: tenants apart, as the store does. Not salted: all in one tenant, what a store must not do.

Every request computes one token. When it loses: on a busy machine a single guess is noise; repeat it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from labkit.bench.lengths import random_tokens
from labkit.cache.pages import PagePool
from labkit.cache.prefix import PrefixStore, PrefixView
from labkit.cache.prefix_identity import Fingerprint
from labkit.generate.loop import generate
from labkit.generate.prefixes import generate_with_prefixes
from labkit.measure.clock import Timing

HIT, OTHER, NOBODY = "hit", "another tenant", "nobody's"


def make_store(model, tokens: int, **options) -> PrefixStore:
    """A store over a pool for `tokens` tokens of this model, of which entries may hold half."""
    pool = PagePool(model.config.kv_shape, -(-tokens // 16), dtype=model.dtype, device=model.device)
    return PrefixStore(pool, pool.total * pool.block_bytes // 2, **options)


def ttft(model, tokens: Sequence[int], view: PrefixView) -> float:
    """Seconds from the prompt to its first token, the look-up included."""
    known = []
    start = perf_counter()
    generate_with_prefixes(model, list(tokens), view, max_new_tokens=1, end_ids=(), on_token=lambda _: known.append(perf_counter()))
    return known[0] - start


@dataclass(frozen=True)
class Askers:
    """Seconds to the first token by who asked, round by round, and how many tokens each had to compute."""

    times: dict[str, Timing]
    computed: dict[str, int]


def ttft_by_asker(model, fingerprint: Fingerprint, system_tokens: int, question_tokens: int, *, repeats: int = 5,
                  on_round: Callable[[int], None] | None = None) -> Askers:  # fmt: skip
    """Fresh tokens in every round, each asker first in turn; the first round is warm-up and is thrown away."""
    store = make_store(model, 4 * (system_tokens + question_tokens + 64))
    views = {name: store.open(name, "", fingerprint) for name in ("mine", "yours")}
    times: dict[str, list[float]] = {HIT: [], OTHER: [], NOBODY: []}
    computed = {}
    for turn in range(repeats + 1):
        text = random_tokens(model, system_tokens + 2 * question_tokens, seed=turn)
        system, earlier, now = text[:system_tokens], text[system_tokens:-question_tokens], text[-question_tokens:]
        names = list(times)
        for name in names[turn % 3 :] + names[: turn % 3]:
            store.forget(scope="")
            if name != NOBODY:
                ttft(model, [*system, *earlier], views["mine"])
            before = store.counters.tokens_found
            times[name].append(ttft(model, [*system, *now], views["mine" if name == HIT else "yours"]))
            computed[name] = len(system) + len(now) - (store.counters.tokens_found - before)
        if on_round is not None:
            on_round(turn)
    return Askers({name: Timing(tuple(seconds[1:])) for name, seconds in times.items()}, computed)


def prefill_times(model, lengths: Sequence[int], *, repeats: int = 3) -> dict[int, float]:
    """{tokens: best seconds of a prefill of so many}, for predictions."""
    return {
        n: min(generate(model, random_tokens(model, n, seed), max_new_tokens=1, end_ids=()).ttft_s for seed in range(repeats))
        for n in lengths
    }


@dataclass(frozen=True)
class Guess:
    """Seconds of each candidate, and which of them the victim had asked."""

    seconds: tuple[float, ...]
    truth: int

    @property
    def right(self) -> bool:
        return min(range(len(self.seconds)), key=self.seconds.__getitem__) == self.truth


def guess(model, fingerprint: Fingerprint, candidates: Sequence[Sequence[int]], question: Sequence[int], truth: int, *,
          salted: bool) -> Guess:  # fmt: skip
    """The victim asks with candidate `truth`; then somebody else asks with each one, once, in another order each time."""
    store = make_store(model, sum(map(len, candidates)) * 2 + 64 * len(candidates))
    victim = store.open("victim", "", fingerprint)
    other = store.open("attacker" if salted else "victim", "", fingerprint)
    ttft(model, [*candidates[truth], *question[::-1]], victim)
    seconds = [0.0] * len(candidates)
    for which in random.Random(truth).sample(range(len(candidates)), len(candidates)):
        seconds[which] = ttft(model, [*candidates[which], *question], other)
    return Guess(tuple(seconds), truth)
