"""Prompts with a known answer, judged by likelihood and by the text that the model writes.

    bits_per_byte   -log2 p(reference | prompt) / bytes of the reference
    margin          log p(reference) / bytes - log p(wrong) / bytes, in nats per byte
    prefers         1 if the margin is above 0; a random choice gives 50 %
    right           1 if the greedy answer passes the item's check. Checks of JSON also give
                    `valid_json`, `schema_valid` and `exact`

The task `structured` and your own data use it. A small model fails most of what it must write, so
a change does not show there. It does show in which of two answers the model prefers.

Prompts use the chat template of the checkpoint if it has one. Texts are generated one by one, so
that no text depends on the other items of a batch. Answers are stripped on both sides before they
are compared.
Cost: one prompt per item and, with `generate`, up to `max_new_tokens` steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import BadRequest
from labkit.lab.evals.checks import Check, json_hits, judge
from labkit.lab.evals.likelihood import NotScorable, Reader, split
from labkit.lab.evals.task import ItemScore, Metric

METRICS = (
    Metric("margin", "nats/byte"),
    Metric("bits_per_byte", higher_is_better=False),
    Metric("prefers", share=True, chance=0.5),
    Metric("right", share=True),
    Metric("valid_json", share=True),
    Metric("schema_valid", share=True),
    Metric("exact", share=True),
)


@dataclass(frozen=True)
class Asked:
    """One prompt.

    reference: a right answer.
    wrong: a plausible wrong answer.
    check: judges the text that the model writes; None compares it with the reference.
    """

    id: str
    slice: str
    prompt: str
    reference: str | None = None
    wrong: str | None = None
    check: Check | None = None

    def __post_init__(self):
        if self.reference is None and self.check is None:
            raise BadRequest(f"Item {self.id} has neither a reference nor a check; give one.")
        if self.wrong is not None and (self.reference is None or self.wrong == self.reference):
            raise BadRequest(f"Item {self.id}: give a reference that differs from `wrong`.")


@dataclass(frozen=True)
class AnswerTask:
    """A task of prompts.

    generate: also let the model write an answer.
    chat: use the chat template; None uses it if the checkpoint has one.
    reader: options of `likelihood.Reader`, to read through another cache.
    """

    name: str
    asked: Sequence[Asked]
    generate: bool = True
    max_new_tokens: int = 128
    chat: bool | None = None
    reader: dict = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        able = {"margin", "prefers"} if any(item.wrong for item in self.asked) else set()
        able |= {"bits_per_byte"} if any(item.reference for item in self.asked) else set()
        if self.generate:
            able |= {"right"}
            checks = [item.check for item in self.asked if item.check]
            for check in checks:
                able |= set(json_hits(check)) if check.kind == "json" else set()
        return tuple(metric for metric in METRICS if metric.name in able)

    def items(self) -> Sequence[Asked]:
        return self.asked

    def score(self, model, items: Sequence[Asked]) -> Iterator[ItemScore]:
        reader = Reader(model, **self.reader)
        for item in items:
            try:
                yield self._score(reader, item)
            except NotScorable as reason:
                yield ItemScore(item.id, item.slice, error=str(reason))

    def prompt(self, tokenizer, item: Asked) -> str | list[int]:
        """Return token ids if a chat template is used, else the unchanged text."""
        chat = tokenizer.chat_template is not None if self.chat is None else self.chat
        return tokenizer.chat(item.prompt) if chat else item.prompt

    def _score(self, reader: Reader, item: Asked) -> ItemScore:
        prompt = self.prompt(reader.model.tokenizer, item)
        metrics, details = {}, {}
        answers = [answer for answer in (item.reference, item.wrong) if answer is not None]
        parts = split(reader.model.tokenizer, prompt, answers or ["."])
        if answers:
            nats = reader.log_likelihoods(parts)
            sizes = [len(answer.encode()) for answer in answers]
            metrics["bits_per_byte"] = (-nats[0] / math.log(2), sizes[0])
            if item.wrong is not None:
                margin = nats[0] / sizes[0] - nats[1] / sizes[1]
                metrics |= {"margin": (margin, 1.0), "prefers": (float(margin > 0), 1.0)}
        if self.generate:
            written = reader.write(prompt, self.max_new_tokens)
            verdict = judge(written.text, item.check, item.reference)
            metrics |= {name: (float(hit), 1.0) for name, hit in verdict.hits.items()}
            details |= {"written": written.text, "fault": verdict.fault}
            details |= {"stopped": written.stop_reason}
        details["prompt_ids"] = list(parts.context)
        return ItemScore(item.id, item.slice, metrics, details=details)


def asked_from(entry: Mapping[str, Any], id: str, slice: str = "all") -> Asked:
    """Return an item from plain data. Raises BadRequest if a field is not valid."""
    texts = ("id", "slice", "prompt", "reference", "wrong")
    for name in sorted(set(entry) - {*texts, "check"}):
        allowed = ", ".join(sorted((*texts, "check")))
        raise BadRequest(f"it has an unknown field {name!r}; allowed are {allowed}.")
    for name in texts:
        value = entry.get(name)
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise BadRequest(f"its {name} is {value!r}; give a text that is not empty.")
    if entry.get("prompt") is None:
        raise BadRequest("it has no prompt; add a prompt for the model to answer.")
    check = Check.from_entry(entry["check"]) if entry.get("check") is not None else None
    answers = (entry.get("reference"), entry.get("wrong"))
    name, part = entry.get("id") or id, entry.get("slice") or slice
    return Asked(name, part, entry["prompt"], *answers, check)
