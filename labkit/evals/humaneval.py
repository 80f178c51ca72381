"""The task `humaneval`: 164 functions to write, judged by running their tests, and how likely the reference solutions are.

    bits_per_byte   -log2 p(reference solution | prompt) / its bytes: what a small model can show, and the primary metric
    pass@1          share of problems whose greedy program passes all tests; pass@k with `samples` drawn at a temperature
    control_right, control_wrong    the reference solutions (must be 1) and two stubs (must be 0) through the same sandbox

`plain` continues the prompt, whose bytes nobody touches; `chat` asks for the function (humaneval_programs.py says how a
program is made of either). bits_per_byte is of the plain text in both. Generated code runs only in the sandbox; where none
may be used, nothing is generated, `notes` says why, and bits_per_byte remains. A problem whose controls fail on this machine
(too slow, perhaps) could not be judged: an error of pass@k, not a 0. 164 problems cannot show two points: six must flip.
Cost: at most 164 x 256 tokens, decoded in batches, and about 0.1 s of a core for each of four programs a problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from labkit.errors import BadRequest
from labkit.evals.humaneval_programs import (
    ODD,
    REQUEST,
    STOP,
    STUBS,
    chat_program,
    pass_at_k,
    plain_program,
)
from labkit.evals.likelihood import NotScorable, Reader, split
from labkit.evals.sandbox import Limits, Sample, SandboxUnavailable, Verdict, best_isolation, check_all
from labkit.evals.task import NOT_JUDGED, ItemScore, Metric
from labkit.generate import Completion, Sampling, generate
from labkit.texts import Problem, humaneval

MODES = ("plain", "chat")
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # where an object lies in memory: another place in every run


@dataclass(frozen=True)
class Item:
    id: str
    problem: Problem
    index: int  # in the published order


def make(model, limit: int | None = None, mode: str | None = None, **options) -> HumanEval:
    """`mode`: None is chat for a model made to chat, which continues no prompt willingly, and plain for the others."""
    if mode is None:
        mode = "plain" if getattr(getattr(model, "tokenizer", None), "chat_template", None) is None else "chat"
    return HumanEval(limit=limit, mode=mode, **options)


@dataclass(frozen=True)
class HumanEval:
    """`execute`: None runs programs where a sandbox may be used; True insists on it; False scores the references only.

    `k` counts samples a problem are drawn for; more than one needs `sampling` with a temperature. `reader`: how the model
    reads and generates (`make_cache`, `chunk`: through a quantised KV cache)."""

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
        if self.mode not in MODES:
            raise BadRequest(f"HumanEval has no mode {self.mode!r}; choose from {', '.join(MODES)}.")
        if self.limit is not None and self.limit < 1:
            raise BadRequest(f"A limit of {self.limit} leaves no problem; give at least 1, or none for all 164.")
        for k in self.k:
            pass_at_k(self.samples, 0, k)
        if self.samples > 1 and self.sampling.temperature == 0:
            raise BadRequest(f"{self.samples} greedy samples are the same one; give a temperature above 0, such as 0.8.")
        if self.execute:
            best_isolation()

    @cached_property
    def _blocked(self) -> str | None:
        """Why no program runs here; None where they do."""
        if self.execute is False:
            return "Programs are not run: only the reference solutions are scored."
        try:
            best_isolation()
        except SandboxUnavailable as reason:
            return f"{reason} Only the reference solutions are scored."
        return None

    @property
    def notes(self) -> list[str]:
        """What a report says beside the numbers."""
        odd = [f"{id} ({why})" for id, why in ODD.items()]
        run = self._blocked or f"Programs run in {best_isolation().describe()}."
        return [run, f"Scored like all others, but odd: {'; '.join(odd)}."]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        found = [Metric("bits_per_byte", "bits/byte", higher_is_better=False)]
        if self._blocked is None:
            found += [Metric(f"pass@{k}", share=self.samples == 1, chance=0.0) for k in self.k]
            found += [Metric("control_right", share=True), Metric("control_wrong", share=True, higher_is_better=False)]
        return tuple(found)

    def items(self) -> list[Item]:
        return [Item(problem.task_id, problem, index) for index, problem in enumerate(humaneval()[: self.limit])]

    def score(self, model, items: Sequence[Item]) -> Iterator[ItemScore]:
        """One batch: generated together, judged together; the references are read one by one."""
        if model.tokenizer is None:
            raise BadRequest("HumanEval is text and this model has no tokenizer; load one that has.")
        prompts = [self.prompt_ids(model, item.problem) for item in items]
        written = self._write(model, items, prompts) if self._blocked is None else [[] for _ in items]
        verdicts = iter(self._judge(items, written))
        reader = Reader(model, **self.reader)
        for item, prompt, completions in zip(items, prompts, written):
            judged = [next(verdicts) for _ in range(len(completions) + 1 + len(STUBS))] if self._blocked is None else []
            try:
                bits = self.reference(reader, model, item.problem)
            except NotScorable as reason:
                yield ItemScore(item.id, error=str(reason))
                continue
            yield ItemScore(item.id, "all", {"bits_per_byte": bits, **self._shares(completions, judged)},
                            details=_details(prompt, completions, judged))  # fmt: skip

    def prompt_ids(self, model, problem: Problem) -> list[int]:
        """The prompt's own bytes, or the request around them in the checkpoint's chat template."""
        if self.mode == "plain":
            return model.tokenizer.encode(problem.prompt, special=False)
        return model.tokenizer.chat(REQUEST.format(prompt=problem.prompt))

    def reference(self, reader: Reader, model, problem: Problem) -> tuple[float, float]:
        """(bits, bytes) of the reference solution behind the prompt, from the first token that the two do not share."""
        parts = split(model.tokenizer, problem.prompt, [problem.canonical_solution])
        known = len(model.tokenizer.decode(parts.context).encode())
        nbytes = len((problem.prompt + problem.canonical_solution).encode()) - known
        (found,) = reader.log_likelihoods(parts)
        return -found.nats / math.log(2), float(nbytes)

    def program(self, problem: Problem, text: str) -> str:
        return (plain_program if self.mode == "plain" else chat_program)(problem, text)

    def _write(self, model, items: Sequence[Item], prompts: list[list[int]]) -> list[list[Completion]]:
        options = {
            "max_new_tokens": self.max_new_tokens, "stop": STOP if self.mode == "plain" else (),
            "cache": self.reader.get("make_cache", "contiguous"), "prefill_chunk": self.reader.get("chunk"),
        }  # fmt: skip
        if self.samples == 1 and self.sampling.temperature == 0:
            return [[one] for one in generate(model, prompts, sampling=self.sampling, **options)]
        found = []  # a problem's samples depend on its place in the published order, not on what stands beside it
        for item, prompt in zip(items, prompts):
            seeded = Sampling(**{**vars(self.sampling), "seed": self.sampling.seed + 100_003 * item.index})
            found.append(generate(model, [prompt] * self.samples, sampling=seeded, **options))
        return found

    def _judge(self, items: Sequence[Item], written: list[list[Completion]]) -> list[Verdict]:
        """Of each problem: its samples, the reference, the stubs."""
        if self._blocked is not None:
            return []
        samples = []
        for item, completions in zip(items, written):
            problem = item.problem
            codes = [self.program(problem, one.text) for one in completions]
            codes += [problem.prompt + body for body in (problem.canonical_solution, *STUBS)]
            samples += [Sample(code, problem.test, problem.entry_point, problem.prompt) for code in codes]
        return check_all(samples, self.limits, workers=self.workers)

    def _shares(self, completions: Sequence[Completion], judged: Sequence[Verdict]) -> dict[str, tuple[float, float]]:
        if not judged:
            return {}
        own, right, stubs = judged[: len(completions)], judged[len(completions)], judged[len(completions) + 1 :]
        found = dict.fromkeys([*(f"pass@{k}" for k in self.k), "control_right", "control_wrong"], NOT_JUDGED)
        if right.passed is not None:
            found["control_right"] = (float(right.passed), 1.0)
        if all(stub.passed is not None for stub in stubs):
            found["control_wrong"] = (float(any(stub.passed for stub in stubs)), 1.0)
        sound = found.get("control_right") == (1.0, 1.0) and found.get("control_wrong") == (0.0, 1.0)
        if sound and all(one.passed is not None for one in own):
            passed = sum(one.passed for one in own)
            found |= {f"pass@{k}": (pass_at_k(len(own), passed, k), 1.0) for k in self.k}
        return found


def _details(prompt: list[int], completions: Sequence[Completion], judged: Sequence[Verdict]) -> dict:
    """What is kept for reading: final ids, texts and verdicts; no timings, so that equal runs are equal."""
    samples = [
        {"ids": list(one.tokens), "text": one.text, "stop_reason": one.stop_reason, "outcome": verdict.outcome,
         "kind": verdict.kind, "message": _ADDRESS.sub("0x...", verdict.message)}
        for one, verdict in zip(completions, judged)
    ]  # fmt: skip
    controls = [[verdict.outcome, verdict.kind] for verdict in judged[len(completions) :]]
    return {"prompt_ids": list(prompt), "samples": samples, "controls": controls}
