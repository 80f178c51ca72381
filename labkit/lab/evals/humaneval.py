"""The task `humaneval`: 164 functions to write, judged by running their tests.

    bits_per_byte   -log2 p(reference solution | prompt) / bytes of the solution. A small model
                    shows differences here, so it is the primary metric
    pass@1          share of problems whose greedy program passes all tests
    control_right   the reference solutions in the same sandbox; must be 1
    control_wrong   two stubs in the same sandbox; must be 0

The mode `plain` continues the unchanged prompt; `chat` asks for the function.
humaneval_programs.py turns both kinds of answers into programs. bits_per_byte uses the plain text
in both modes.

Generated code runs only in the sandbox. If no sandbox may be used, no program is generated and only
bits_per_byte is computed; `notes` gives the reason. If the controls of a problem fail, for example
on a slow machine, the problem counts as an error of pass@1 and not as a 0. 164 problems cannot show
a difference of two points, because at least six problems must flip.

Cost: up to 164 x 256 tokens, decoded in batches, and about 0.1 s of a core for each of four
programs per problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from labkit.errors import BadRequest, OneOf, OrNone, Whole, check_fields
from labkit.generate import Completion, generate
from labkit.lab.evals.humaneval_programs import ODD, REQUEST, STOP, STUBS, program
from labkit.lab.evals.likelihood import NotScorable, Reader, split
from labkit.lab.evals.sandbox.isolation import SandboxUnavailable
from labkit.lab.evals.sandbox.pool import Sample, Verdict, best_isolation, check_all
from labkit.lab.evals.task import NOT_JUDGED, ItemScore, Metric
from labkit.lab.texts import Problem, humaneval

_ADDRESS = re.compile(r"0x[0-9a-f]+")  # the address of an object, which differs in every run


@dataclass(frozen=True)
class Item:
    id: str
    problem: Problem


def make(model, limit: int | None = None, mode: str | None = None, **options) -> HumanEval:
    """Return the task.

    If `mode` is None, it is chat for a model with a chat template and plain for others.
    """
    if mode is None:
        template = getattr(getattr(model, "tokenizer", None), "chat_template", None)
        mode = "plain" if template is None else "chat"
    return HumanEval(limit=limit, mode=mode, **options)


@dataclass(frozen=True)
class HumanEval:
    """Score the first `limit` problems; None scores all.

    `reader` are options of `likelihood.Reader`. With them the task reads and generates through
    another cache.
    """

    limit: int | None = None
    mode: str = "plain"
    max_new_tokens: int = 256
    reader: dict = field(default_factory=dict)
    name = "humaneval"

    def __post_init__(self):
        check_fields(self, mode=OneOf("plain", "chat"), limit=OrNone(Whole(1)))

    @cached_property
    def _blocked(self) -> str | None:
        """Why no program runs here, or None if programs run."""
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
        bits = Metric("bits_per_byte", "bits/byte", higher_is_better=False)
        if self._blocked is not None:
            return (bits,)
        wrong = Metric("control_wrong", higher_is_better=False, share=True)
        passed = Metric("pass@1", share=True, chance=0.0)
        return bits, passed, Metric("control_right", share=True), wrong

    def items(self) -> list[Item]:
        return [Item(problem.task_id, problem) for problem in humaneval()[: self.limit]]

    def score(self, model, items: Sequence[Item]) -> Iterator[ItemScore]:
        """Generate and judge one batch together; read the references one by one."""
        if model.tokenizer is None:
            raise BadRequest("HumanEval needs a tokenizer and this model has none; load another.")
        prompts = [self.prompt_ids(model, item.problem) for item in items]
        written, judged = [None] * len(items), [()] * len(items)
        if self._blocked is None:
            written = self._write(model, prompts)
            judged = self._judge(items, written)
        reader = Reader(model, **self.reader)
        for item, prompt, completion, verdicts in zip(items, prompts, written, judged):
            try:
                metrics = {"bits_per_byte": self.reference(reader, model, item.problem)}
            except NotScorable as reason:
                yield ItemScore(item.id, error=str(reason))
                continue
            details = _details(prompt, completion, verdicts)
            yield ItemScore(item.id, "all", metrics | _shares(verdicts), details=details)

    def prompt_ids(self, model, problem: Problem) -> list[int]:
        """Return the prompt itself, or the request for it in the checkpoint's chat template."""
        if self.mode == "plain":
            return model.tokenizer.encode(problem.prompt, special=False)
        return model.tokenizer.chat(REQUEST.format(prompt=problem.prompt))

    def reference(self, reader: Reader, model, problem: Problem) -> tuple[float, float]:
        """Return (bits, bytes) of the reference solution after the prompt.

        Both count from the first token that differs between the prompt and the whole text.
        """
        parts = split(model.tokenizer, problem.prompt, [problem.canonical_solution])
        counts = model.tokenizer.byte_counts([*parts.context, *parts.tails[0]])
        nbytes = sum(counts[len(parts.context) :])
        (nats,) = reader.log_likelihoods(parts)
        return -nats / math.log(2), float(nbytes)

    def _write(self, model, prompts: list) -> list[Completion]:
        options = {
            "max_new_tokens": self.max_new_tokens,
            "stop": STOP if self.mode == "plain" else (),
            "cache": self.reader.get("make_cache", "contiguous"),
            "prefill_chunk": self.reader.get("chunk"),
        }
        return generate(model, prompts, **options)

    def _judge(self, items: Sequence[Item], written: list) -> list[list[Verdict]]:
        """Return per problem the verdicts of its program, its reference and the stubs."""
        samples = []
        for problem, completion in zip((item.problem for item in items), written):
            codes = [program(problem, completion.text, self.mode)]
            codes += [problem.prompt + body for body in (problem.canonical_solution, *STUBS)]
            rest = (problem.test, problem.entry_point, problem.prompt)
            samples += [Sample(code, *rest) for code in codes]
        verdicts = iter(check_all(samples))
        return [list(islice(verdicts, 2 + len(STUBS))) for _ in items]


def _shares(verdicts: Sequence[Verdict]) -> dict[str, tuple[float, float]]:
    """Return pass@1 and both controls, or nothing if no program ran."""
    if not verdicts:
        return {}
    own, right, *stubs = [verdict.passed for verdict in verdicts]
    shares = dict.fromkeys(("pass@1", "control_right", "control_wrong"), NOT_JUDGED)
    if right is not None:
        shares["control_right"] = (float(right), 1.0)
    if None not in stubs:
        shares["control_wrong"] = (float(any(stubs)), 1.0)
    if right and not any(stubs) and None not in (own, *stubs):
        shares["pass@1"] = (float(own), 1.0)
    return shares


def _details(prompt: list[int], completion: Completion | None, verdicts: Sequence) -> dict:
    """Return what a person may want to read. Timings are left out, so equal runs stay equal."""
    samples = []
    if completion is not None:
        own, *verdicts = verdicts
        sample = {"ids": list(completion.tokens), "text": completion.text}
        sample |= {"stop_reason": completion.stop_reason, "outcome": own.outcome}
        sample |= {"kind": own.kind, "message": _ADDRESS.sub("0x...", own.message)}
        samples = [sample]
    controls = [[verdict.outcome, verdict.kind] for verdict in verdicts]
    return {"prompt_ids": list(prompt), "samples": samples, "controls": controls}
