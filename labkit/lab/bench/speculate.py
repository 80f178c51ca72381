"""`bench speculate`: drafters on tasks, against plain decoding, interleaved.

An arm `DRAFTER:TASK` continues the task's prompts until the model ends them; `plain` is
labkit's own fast decoding in the same recipe. Seconds run from the first token to the
last, so they include the time for reading the prompt with the drafter. Ratios are of
seconds per token, paired by round. Draft lengths are fixed (`LENGTHS`), except that
`auto` adapts them to costs measured just before. Each arm's numbers explain its speed:
alpha, yield, accepted length, and the time in drafting, verifying and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from labkit.errors import BadRequest, Whole, check_fields
from labkit.generate import generate
from labkit.generate.adaptive import LONGEST, adaptive
from labkit.generate.row import Completion, Tally
from labkit.lab.bench import harness
from labkit.lab.bench.harness import Progress, silent
from labkit.lab.bench.speculation_costs import MeasuredCosts, measure_costs
from labkit.lab.measure.bandwidth import using_threads
from labkit.lab.measure.clock import median_ratio
from labkit.lab.stack.open import open_drafter, open_model
from labkit.lab.texts.prompt_kinds import KINDS, prompts

ARMS = (
    "lookup:copy lookup:edit int4_g32_zp:humaneval int4_g32_zp:chat draft:humaneval draft:chat "
    "auto:copy auto:edit auto:humaneval auto:chat"
).split()
LENGTHS = {"lookup": 8}  # tokens drafted per pass; other drafters draft FIXED
FIXED = 3
COLUMNS = {
    "tok/s": "{tok_s:.1f}",
    "alpha": "{alpha:.2f}",
    "yield": "{draft_yield:.2f}",
    "tokens per pass": "{accepted_length:.2f}",
    "c": "{c:.2f}",
}
HEADLINE = (
    "speculate: {recipe}, {prompts} prompts per task, up to {new_tokens} new tokens, "
    "{threads} threads on {device}, {repeats} rounds"
)


@dataclass(frozen=True)
class Settings:
    """The settings of `bench speculate`. `draft_length` None means LENGTHS.

    Raises BadRequest for an arm that is not DRAFTER:TASK and for counts that are too
    small.
    """

    arms: Sequence[str] = tuple(ARMS)
    recipe: str = "bf16"
    model: str = "default"
    prompts: int = 4
    new_tokens: int = 64
    repeats: int = 3
    draft_length: int | str | None = None
    threads: int | None = None
    device: str = "cpu"
    kernels: str = "auto"

    def __post_init__(self):
        check_fields(self, prompts=Whole(1), new_tokens=Whole(2), repeats=Whole(1))
        for arm in self.arms:
            drafter, _, task = arm.rpartition(":")
            if not drafter or task not in KINDS or self.arms.count(arm) > 1:
                allowed = f"DRAFTER:TASK, each arm once, with one of the tasks {', '.join(KINDS)}"
                raise BadRequest(f"Arm {arm!r} is not valid; write {allowed}.")


def run(settings: Settings, *, on_progress: Progress = silent) -> dict:
    """Return the result of `bench speculate`."""
    tasks: dict[str, list[str]] = {}  # and their drafters
    for arm in settings.arms:
        drafter, _, task = arm.rpartition(":")
        tasks.setdefault(task, []).append(drafter)
    result: dict = {"arms": {}, "ratios": {}, "ratio_intervals": {}}
    with using_threads(settings.threads) as threads:
        on_progress(f"loading {settings.recipe}")
        where = {"device": settings.device, "kernels": settings.kernels}
        target = open_model(settings.model, settings.recipe, **where)
        drafters, missing = build(sorted(set(sum(tasks.values(), []))), target)
        probe = prompts(next(iter(tasks)))[-1].ids(target.tokenizer)
        timed = {name: drafter for name, drafter in drafters.items() if name != "auto"}
        costs = measure_costs(target, timed, probe)
        c = {name: costs.of(name).draft for name in timed}
        for name, drafter in timed.items():
            drafter.cost = c[name]
        for task, names in tasks.items():
            own = {name: drafters[name] for name in sorted(names) if name in drafters}
            if own:
                on_progress(f"{task}: {', '.join(own)}")
                texts = [p.ids(target.tokenizer) for p in prompts(task)[: settings.prompts]]
                counts = (settings.new_tokens, settings.repeats)
                runs = rounds(target, own, texts, *counts, costs, settings.draft_length)
                add(result, task, runs)
    measured = {"plain_ms": 1000 * costs.plain_s, "verify": costs.verify, "c": c}
    result |= {"missing": missing, "costs": measured, "threads": threads}
    return asdict(settings) | result


def build(names: Sequence[str], target) -> tuple[dict, dict[str, str]]:
    """Return the drafters, and the reasons for those that are missing.

    `auto` looks up first and falls back on the target in INT4; it adapts its draft
    lengths.
    """
    drafters, missing = {}, {}
    for name in names:
        try:
            drafter = open_drafter("lookup_first" if name == "auto" else name, target)
            drafter.check(target)
            drafters[name] = drafter
        except BadRequest as reason:
            if name != "draft":  # trained for one model only, so it may be missing
                raise
            missing[name] = str(reason)
    return drafters, missing


def rounds(
    target,
    drafters: dict,
    texts: list[list[int]],
    new_tokens: int,
    repeats: int,
    costs: MeasuredCosts,
    draft_length: int | str | Mapping[str, int] | None = None,
) -> dict[str, list[list]]:
    """Return {arm: one list of completions per round}; `plain` is one of the arms.

    All arms continue a prompt before the next prompt begins. `draft_length` is one
    length for all drafters, or a mapping from names to lengths. None means LENGTHS.
    """
    lengths = LENGTHS if draft_length is None else draft_length

    def one(name: str):
        if name == "plain":
            return lambda text, most: generate(target, text, max_new_tokens=most)
        drafter = drafters[name]
        length = lengths.get(name, FIXED) if isinstance(lengths, Mapping) else lengths
        if name == "auto" or length == "auto":
            drafter, length = adaptive(drafter, costs.verify), LONGEST
        options = {"drafter": drafter, "draft_length": length}
        return lambda text, most: generate(target, text, max_new_tokens=most, **options)

    calls = {name: one(name) for name in ("plain", *drafters)}
    for call in calls.values():
        call(texts[-1][:32], 4)  # warm-up
    completions: dict[str, list[list]] = {name: [[] for _ in range(repeats)] for name in calls}
    order = list(calls)
    for turn in range(repeats):
        for i, text in enumerate(texts):
            first = (turn + i) % len(order)
            for name in order[first:] + order[:first]:
                completions[name][turn].append(calls[name](text, new_tokens))
    return completions


def seconds_per_token(completions: Sequence) -> float:
    """Return the seconds per token after the first, over all prompts."""
    spent = sum(done.token_times_s[-1] - done.token_times_s[0] for done in completions)
    return spent / max(1, sum(len(done.tokens) - 1 for done in completions))


def total(completions: Sequence[Completion]) -> Completion:
    """Return all prompts of a round as one completion, with summed counts and times."""
    tokens = sum((done.tokens[1:] for done in completions), ())
    tally = Tally()
    for done in completions:
        tally += done.tally
    return replace(completions[0], tokens=(0, *tokens), tally=tally)


def add(result: dict, task: str, runs: dict[str, list[list]]) -> None:
    """Add one task's arms and ratios to the result."""
    seconds = {name: [seconds_per_token(one) for one in each] for name, each in runs.items()}
    for name, completions in runs.items():
        entry = harness.rate(seconds[name])
        entry["tpot_ms"] = 1000 / entry["tok_s"]
        if name != "plain":
            whole = total(completions[-1])
            keys = ("alpha", "draft_yield", "accepted_length", "c")
            entry |= {key: getattr(whole, key) for key in keys} | whole.counts()
            keys = ("draft_s", "verify_s", "overhead_s")
            entry |= {key: getattr(whole.tally, key) for key in keys}
            pairs = zip(completions[-1], runs["plain"][-1])
            entry["same_tokens"] = fmean(a.tokens == b.tokens for a, b in pairs)
            ratio = median_ratio([a / b for a, b in zip(seconds["plain"], seconds[name])])
            for key, value in harness.ratio_keys({f"{name}:{task}/plain": ratio}).items():
                result[key] |= value
        result["arms"][f"{name}:{task}"] = entry


def render(result: dict) -> str:
    """Return the result as a table."""
    reasons = [f"{name} is missing: {reason}" for name, reason in result["missing"].items()]
    return "\n".join([harness.render(result, HEADLINE, COLUMNS), *reasons])
