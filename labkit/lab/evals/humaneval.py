"""The task `humaneval`: 164 functions to write, judged by running their tests.

    bits_per_byte   -log2 p(reference solution | prompt) / its bytes. A small model can show this,
                    so it is the primary metric
    pass@1          share of problems whose greedy program passes all tests; pass@k if `samples`
                    are drawn at a temperature
    control_right   the reference solutions in the same sandbox; must be 1
    control_wrong   two stubs in the same sandbox; must be 0

The mode `plain` continues the unchanged prompt; `chat` asks for the function. See
humaneval_programs.py for how each becomes a program. bits_per_byte uses the plain text in both
modes. Generated code runs only in the sandbox. If none may be used, nothing is generated, `notes`
gives the reason, and bits_per_byte remains. A problem whose controls fail on this machine (it may
be too slow) is an error of pass@k and not a 0. 164 problems cannot show a difference of two
points: six must flip.
Cost: up to 164 x 256 tokens, decoded in batches, and about 0.1 s of a core for each of four
programs per problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from labkit.errors import BadRequest, OneOf, OrNone, Whole, check_fields
from labkit.generate import Completion, Sampling, generate
from labkit.lab.evals.humaneval_programs import (
    ODD,
    REQUEST,
    STOP,
    STUBS,
    chat_program,
    pass_at_k,
    plain_program,
)
from labkit.lab.evals.likelihood import NotScorable, Reader, split
from labkit.lab.evals.sandbox import (
    Limits,
    Sample,
    SandboxUnavailable,
    Verdict,
    best_isolation,
    check_all,
)
from labkit.lab.evals.task import NOT_JUDGED, ItemScore, Metric
from labkit.lab.texts import Problem, humaneval

_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object in memory: differs in every run


@dataclass(frozen=True)
class Item:
    id: str
    problem: Problem
    index: int  # in the published order


def make(model, limit: int | None = None, mode: str | None = None, **options) -> HumanEval:
    """Return the task. `mode` None is chat for a model with a chat template, plain for others."""
    if mode is None:
        template = getattr(getattr(model, "tokenizer", None), "chat_template", None)
        mode = "plain" if template is None else "chat"
    return HumanEval(limit=limit, mode=mode, **options)


@dataclass(frozen=True)
class HumanEval:
    """Score the first `limit` problems (None: all).

    `execute` None runs programs if a sandbox may be used, True raises if none may, False scores
    the references only. More than one of `samples` needs `sampling` with a temperature; `k` lists
    the pass@k to compute from them. `reader` are options of `likelihood.Reader`, to read and
    generate through another cache.
    """

    limit: int | None = None
    mode: str = "plain"
    max_new_tokens: int = 256
    samples: int = 1
    k: tuple[int, ...] = (1,)
    sampling: Sampling = field(default_factory=Sampling)
    execute: bool | None = None
    limits: Limits = field(default_factory=Limits)
    workers: int | None = None
    reader: dict = field(default_factory=dict)
    name = "humaneval"

    def __post_init__(self):
        check_fields(self, mode=OneOf("plain", "chat"), limit=OrNone(Whole(1)))
        for k in self.k:
            pass_at_k(self.samples, 0, k)
        if self.samples > 1 and self.sampling.temperature == 0:
            raise BadRequest(
                f"{self.samples} greedy samples are all equal; give a temperature above 0, such "
                "as 0.8."
            )
        if self.execute:
            best_isolation()

    @cached_property
    def _blocked(self) -> str | None:
        """Why no program runs here, or None if they do."""
        if self.execute is False:
            return "Programs are not run: only the reference solutions are scored."
        try:
            best_isolation()
        except SandboxUnavailable as reason:
            return f"{reason} Only the reference solutions are scored."
        return None

    @property
    def notes(self) -> list[str]:
        """Lines that a report prints next to the numbers."""
        odd = [f"{id} ({why})" for id, why in ODD.items()]
        run = self._blocked or f"Programs run in {best_isolation().describe()}."
        return [run, f"Scored like all others, but odd: {'; '.join(odd)}."]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        metrics = [Metric("bits_per_byte", "bits/byte", higher_is_better=False)]
        if self._blocked is None:
            metrics += [Metric(f"pass@{k}", share=self.samples == 1, chance=0.0) for k in self.k]
            metrics.append(Metric("control_right", share=True))
            metrics.append(Metric("control_wrong", share=True, higher_is_better=False))
        return tuple(metrics)

    def items(self) -> list[Item]:
        problems = humaneval()[: self.limit]
        return [Item(problem.task_id, problem, index) for index, problem in enumerate(problems)]

    def score(self, model, items: Sequence[Item]) -> Iterator[ItemScore]:
        """Generate and judge one batch together; the references are read one by one."""
        if model.tokenizer is None:
            raise BadRequest("HumanEval is text and this model has no tokenizer; load another.")
        prompts = [self.prompt_ids(model, item.problem) for item in items]
        written, judged = [[] for _ in items], [[] for _ in items]
        if self._blocked is None:
            written = self._write(model, items, prompts)
            judged = self._judge(items, written)
        reader = Reader(model, **self.reader)
        for item, prompt, completions, verdicts in zip(items, prompts, written, judged):
            try:
                metrics = {"bits_per_byte": self.reference(reader, model, item.problem)}
            except NotScorable as reason:
                yield ItemScore(item.id, error=str(reason))
                continue
            metrics |= self._shares(len(completions), verdicts)
            details = _details(prompt, completions, verdicts)
            yield ItemScore(item.id, "all", metrics, details=details)

    def prompt_ids(self, model, problem: Problem) -> list[int]:
        """Return the prompt itself, or the request for it in the checkpoint's chat template."""
        if self.mode == "plain":
            return model.tokenizer.encode(problem.prompt, special=False)
        return model.tokenizer.chat(REQUEST.format(prompt=problem.prompt))

    def reference(self, reader: Reader, model, problem: Problem) -> tuple[float, float]:
        """Return (bits, bytes) of the reference solution behind the prompt.

        Both count from the first token that the two texts do not share.
        """
        parts = split(model.tokenizer, problem.prompt, [problem.canonical_solution])
        known = len(model.tokenizer.decode(parts.context).encode())
        nbytes = len((problem.prompt + problem.canonical_solution).encode()) - known
        (answer,) = reader.log_likelihoods(parts)
        return -answer.nats / math.log(2), float(nbytes)

    def program(self, problem: Problem, text: str) -> str:
        return (plain_program if self.mode == "plain" else chat_program)(problem, text)

    def _write(self, model, items: Sequence[Item], prompts: list) -> list[list[Completion]]:
        options = {
            "max_new_tokens": self.max_new_tokens,
            "stop": STOP if self.mode == "plain" else (),
            "cache": self.reader.get("make_cache", "contiguous"),
            "prefill_chunk": self.reader.get("chunk"),
        }
        if self.samples == 1 and self.sampling.temperature == 0:
            return [[one] for one in generate(model, prompts, sampling=self.sampling, **options)]
        written = []
        for item, prompt in zip(items, prompts):
            # Samples depend on the problem's place in the published order, not on the batch.
            seeded = replace(self.sampling, seed=self.sampling.seed + 100_003 * item.index)
            written.append(generate(model, [prompt] * self.samples, sampling=seeded, **options))
        return written

    def _judge(self, items: Sequence[Item], written: list) -> list[list[Verdict]]:
        """Return per problem the verdicts of its samples, the reference and the stubs."""
        samples = []
        for item, completions in zip(items, written):
            problem = item.problem
            codes = [self.program(problem, one.text) for one in completions]
            codes += [problem.prompt + body for body in (problem.canonical_solution, *STUBS)]
            rest = (problem.test, problem.entry_point, problem.prompt)
            samples += [Sample(code, *rest) for code in codes]
        verdicts = iter(check_all(samples, self.limits, workers=self.workers))
        return [list(islice(verdicts, len(row) + 1 + len(STUBS))) for row in written]

    def _shares(self, n: int, verdicts: Sequence[Verdict]) -> dict[str, tuple[float, float]]:
        """Return pass@k of `n` samples and both controls; nothing if no program ran."""
        if not verdicts:
            return {}
        passed = [verdict.passed for verdict in verdicts]
        own, right, stubs = passed[:n], passed[n], passed[n + 1 :]
        names = [*(f"pass@{k}" for k in self.k), "control_right", "control_wrong"]
        shares = dict.fromkeys(names, NOT_JUDGED)
        if right is not None:
            shares["control_right"] = (float(right), 1.0)
        if None not in stubs:
            shares["control_wrong"] = (float(any(stubs)), 1.0)
        if right and stubs == [False] * len(stubs) and None not in own:
            shares |= {f"pass@{k}": (pass_at_k(n, sum(own), k), 1.0) for k in self.k}
        return shares


def _details(prompt: list[int], completions: Sequence[Completion], judged: Sequence) -> dict:
    """Return what is kept for reading; no timings, so that equal runs are equal."""
    samples = [
        {
            "ids": list(one.tokens),
            "text": one.text,
            "stop_reason": one.stop_reason,
            "outcome": verdict.outcome,
            "kind": verdict.kind,
            "message": _ADDRESS.sub("0x...", verdict.message),
        }
        for one, verdict in zip(completions, judged)
    ]
    controls = [[verdict.outcome, verdict.kind] for verdict in judged[len(completions) :]]
    return {"prompt_ids": list(prompt), "samples": samples, "controls": controls}
