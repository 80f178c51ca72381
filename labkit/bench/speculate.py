"""`bench speculate`: drafters on tasks, against plain decoding of the same weights, prompt by prompt in turns.

An arm `DRAFTER:TASK` continues the task's prompts, as the model would end them; `plain` is labkit's own tuned decoding in
the recipe asked for. Seconds run from the first token to the last, so a drafter's look at the prompt is in them; ratios are
of seconds a token, round by round. Fixed lengths are `LENGTHS`, `auto` adapts them with costs measured just before. The
numbers of each arm say why it is as fast as it is: alpha, yield, accepted length, and the time in draft, verify and the rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from labkit.bench.arms import load
from labkit.bench.decode import shown
from labkit.bench.harness import table
from labkit.errors import BadRequest
from labkit.generate import generate as plain
from labkit.measure.bandwidth import using_threads
from labkit.measure.clock import median_ratio
from labkit.speculate import generate as speculate
from labkit.speculate import make_drafter
from labkit.speculate.costs import MeasuredCosts, measure_costs
from labkit.speculate.report import Speculated, Tally
from labkit.texts.prompt_kinds import KINDS, prompts

ARMS = ("lookup:copy", "lookup:edit", "int4_g32_zp:humaneval", "int4_g32_zp:chat", "draft:humaneval", "draft:chat",
        "auto:copy", "auto:edit", "auto:humaneval", "auto:chat")  # fmt: skip
LENGTHS = {"lookup": 8}  # tokens drafted a pass; others draft FIXED
FIXED = 3


def run(
    model="default",
    arms: Sequence[str] = ARMS,
    recipe: str = "bf16",
    threads: int | None = None,
    num_prompts: int = 4,
    new_tokens: int = 64,
    repeats: int = 3,
    draft_length: int | str | None = None,
    device="cpu",
    kernels: str = "auto",
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """The keys of the command `bench speculate`. `draft_length`: None is `LENGTHS`."""
    asked = check(arms, num_prompts, new_tokens, repeats)
    with using_threads(threads) as used:
        on_progress(f"loading {recipe}")
        target = load(model, recipe, device, kernels)
        drafters, missing = build({drafter for drafter, _ in asked}, target)
        probe = prompts(asked[0][1])[-1].ids(target.tokenizer)
        costs = measure_costs(target, {name: d for name, d in drafters.items() if name != "auto"}, probe)
        for name in costs.draft_s:
            drafters[name].cost = costs.of(name).draft
        result = {"arms": {}, "ratios": {}, "ratio_intervals": {}, "missing": missing}
        for task in dict.fromkeys(task for _, task in asked):
            own = {name: d for name, d in drafters.items() if (name, task) in asked}
            if own:
                on_progress(f"{task}: {', '.join(own)}")
                texts = [prompt.ids(target.tokenizer) for prompt in prompts(task)[:num_prompts]]
                runs = rounds(target, own, texts, new_tokens, repeats, costs, draft_length)
                add(result, task, runs, costs)
    return {**result, "costs": {"plain_ms": 1000 * costs.plain_s, "verify": costs.verify,
                                "c": {name: costs.of(name).draft for name in costs.draft_s}},
            "recipe": recipe, "threads": used, "device": str(device), "model": str(model), "prompts": num_prompts,
            "new_tokens": new_tokens, "repeats": repeats}  # fmt: skip


def check(arms: Sequence[str], num_prompts: int, new_tokens: int, repeats: int) -> list[tuple[str, str]]:
    """(drafter, task) of each arm."""
    asked = []
    for arm in arms:
        drafter, _, task = arm.rpartition(":")
        if not drafter or task not in KINDS or arms.count(arm) > 1:
            raise BadRequest(f"there is no arm {arm!r}; write DRAFTER:TASK once each, with a task of {', '.join(KINDS)}.")
        asked.append((drafter, task))
    if not asked or num_prompts < 1 or new_tokens < 2 or repeats < 1:
        raise BadRequest(f"{len(asked)} arms, {num_prompts} prompts, {new_tokens} new tokens and {repeats} rounds time nothing; "
                         "give at least 1, 1, 2 and 1.")
    return asked


def build(names: set[str], target) -> tuple[dict, dict[str, str]]:
    """The drafters, and why some are not here. `auto` is look-up before the target in INT4, adapting its lengths."""
    drafters, missing = {}, {}
    for name in sorted(names):
        try:
            drafters[name] = make_drafter("lookup_first" if name == "auto" else name, target)
            drafters[name].check(target)
        except BadRequest as reason:
            if name != "draft":  # the one that is trained for one model
                raise
            missing[name] = str(reason)
    return drafters, missing


def rounds(target, drafters: dict, texts: list[list[int]], new_tokens: int, repeats: int, costs: MeasuredCosts,
           draft_length: int | str | Mapping[str, int] | None = None) -> dict[str, list[list]]:  # fmt: skip
    """{arm: one list of completions a round}; `plain` is among them. Each prompt runs through all arms before the next.

    `draft_length`: one for all, or by name; None is `LENGTHS`."""
    lengths = LENGTHS if draft_length is None else draft_length

    def one(name: str):
        if name == "plain":
            return lambda text, most: plain(target, text, max_new_tokens=most)
        length = lengths.get(name, FIXED) if isinstance(lengths, Mapping) else lengths
        drafter = drafters[name]
        if name == "auto" or length == "auto":
            drafter, length = drafter.adaptive(costs.verify), 12
        return lambda text, most: speculate(target, text, drafter=drafter, draft_length=length, max_new_tokens=most)

    calls = {name: one(name) for name in ("plain", *drafters)}
    for call in calls.values():
        call(texts[-1][:32], 4)  # warm-up
    done: dict[str, list[list]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in calls:
            done[name].append([])
        for i, text in enumerate(texts):
            order = list(calls)
            first = (turn + i) % len(order)
            for name in order[first:] + order[:first]:
                done[name][-1].append(calls[name](text, new_tokens))
    return done


def seconds_a_token(completions: Sequence) -> float:
    """After the first, over all prompts."""
    spent = sum(done.token_times_s[-1] - done.token_times_s[0] for done in completions)
    return spent / max(1, sum(len(done.tokens) - 1 for done in completions))


def total(completions: Sequence[Speculated]) -> Speculated:
    """All prompts of a round as one: counts and seconds added up."""
    tokens = sum((done.tokens[1:] for done in completions), (0,))
    return replace(completions[0], tokens=tokens, tally=sum((done.tally for done in completions), Tally()))


def add(result: dict, task: str, runs: dict[str, list[list]], costs: MeasuredCosts) -> None:
    """One task's arms and ratios."""
    seconds = {name: [seconds_a_token(one) for one in kept] for name, kept in runs.items()}
    for name, kept in runs.items():
        middle = statistics.median(seconds[name])
        entry = {"tok_s": 1 / middle, "tpot_ms": 1000 * middle}
        if name != "plain":
            whole = total(kept[-1])
            same = [a.tokens == b.tokens for a, b in zip(kept[-1], runs["plain"][-1])]
            entry |= {"alpha": whole.alpha, "draft_yield": whole.draft_yield, "accepted_length": whole.accepted_length,
                      "c": whole.c, **whole.counts(), "draft_s": whole.tally.draft_s,
                      "verify_s": whole.tally.verify_s, "overhead_s": whole.tally.overhead_s, "same_tokens": sum(same) / len(same)}  # fmt: skip
            ratio = median_ratio([a / b for a, b in zip(seconds["plain"], seconds[name])])
            result["ratios"][f"{name}:{task}/plain"] = ratio.value
            result["ratio_intervals"][f"{name}:{task}/plain"] = [ratio.low, ratio.high]
        result["arms"][f"{name}:{task}"] = entry


def render(result: dict) -> str:
    """The result as a table for people."""
    rows = []
    for name, arm in result["arms"].items():
        ratio, (low, high) = result["ratios"].get(f"{name}/plain"), result["ratio_intervals"].get(f"{name}/plain", (0, 0))
        rows.append((name, f"{arm['tok_s']:.1f}", "-" if ratio is None else f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
                     *(shown(arm.get(key)) for key in ("alpha", "draft_yield", "accepted_length", "c"))))  # fmt: skip
    head = (f"speculate: {result['recipe']}, {result['prompts']} prompts a task, up to {result['new_tokens']} new tokens, "
            f"{result['threads']} threads on {result['device']}, {result['repeats']} rounds")  # fmt: skip
    lines = [head, table(("arm", "tok/s", "times plain", "alpha", "yield", "tokens a pass", "c"), rows)]
    lines += [f"{name} is not here: {reason}" for name, reason in result["missing"].items()]
    return "\n".join(lines)
