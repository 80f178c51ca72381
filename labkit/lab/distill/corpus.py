"""Generate the text that a draft is trained on: the target's answers to prompts.

A draft should predict the target, so it learns from the target's text. Most answers are
greedy. Some are sampled, because they contain text that greedy decoding does not reach.
The hidden states are stored with the tokens (E bfloat16 numbers per token), so no
second pass is needed. Text of the standard library is read and not continued.

    corpus = generate_corpus(target, jobs, folder)     reuses the files of `folder`

This is a short form of continuous batching: when a row ends, the next prompt takes its
place in the next pass. A pass reads the weights once for all rows. Two cores make about
1,000 tokens per second of the default model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from labkit.errors import BadRequest
from labkit.files import save_tensors

SHARD = 128  # texts per file; an interrupted run loses one unfinished file


@dataclass(frozen=True)
class Job:
    """One text to generate. A temperature of 0 is greedy decoding."""

    kind: str
    prompt: tuple[int, ...]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Text:
    """Tokens [T] with the target's last hidden states [T, E].

    The answer begins at token `start`.
    """

    kind: str
    tokens: Tensor
    hidden: Tensor
    start: int

    @property
    def before_answer(self) -> int:
        """The position whose state predicts the first token of the answer."""
        return max(self.start - 1, 0)


def generate_corpus(
    target,
    jobs: Sequence[Job],
    folder: Path,
    batch: int = 32,
    on_progress: Callable[[int, int, int], object] = lambda done, jobs, tokens: None,
) -> list[Text]:
    """Return the texts of the jobs, in their order.

    Texts that `folder` has are read from it. The others are generated and stored there.
    Calls `on_progress(texts done, jobs, tokens)` after each file of 128 texts. Raises
    BadRequest if there are no jobs.
    """
    if not jobs:
        raise BadRequest("There are no prompts to answer; give at least one.")
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[Text] = []
    for first in range(0, len(jobs), SHARD):
        part = jobs[first : first + SHARD]
        key = json.dumps([target.name, target.revision, [asdict(job) for job in part]])
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        path = folder / f"{first // SHARD:04d}-{digest}.safetensors"
        if not path.is_file():
            _save(path, _answers(target, part, batch))
        tensors = load_file(path)
        lengths = tensors["lengths"].tolist()
        tokens, hidden = (tensors[name].split(lengths) for name in ("tokens", "hidden"))
        kinds = [job.kind for job in part]
        texts += map(Text, kinds, tokens, hidden, tensors["starts"].tolist())
        on_progress(len(texts), len(jobs), sum(len(text.tokens) for text in texts))
    return texts


@torch.inference_mode()
def _answers(target, jobs: Sequence[Job], batch: int) -> list[Text]:
    """Generate the text of every job, in the order of the jobs."""
    batch, ends = min(batch, len(jobs)), set(target.config.eos_ids)
    cache = target.new_cache(batch, max(len(job.prompt) + job.new_tokens for job in jobs))
    slots: list[int | None] = [None] * batch  # the number of the job in each row
    tokens = [list(job.prompt) for job in jobs]
    states: list[list[Tensor]] = [[] for _ in jobs]
    waiting, generators = iter(range(len(jobs))), {}
    while True:
        pieces: list[list[int]] = []
        for slot, number in enumerate(slots):
            if number is None and (number := next(waiting, None)) is not None:
                slots[slot] = number
                cache.rewind([0 if i == slot else n for i, n in enumerate(cache.lengths)])
                generators[number] = torch.Generator().manual_seed(jobs[number].seed)
            pieces.append([] if number is None else tokens[number][cache.lengths[slot] :])
        counts = [len(piece) for piece in pieces]
        if not any(counts):
            break
        padded = torch.tensor([piece + [0] * (max(counts) - len(piece)) for piece in pieces])
        logits, hidden = target(padded, cache, counts, last_only=True, return_hidden=True)
        for slot, number in enumerate(slots):
            if number is None:
                continue
            job, text = jobs[number], tokens[number]
            states[number].append(hidden[slot, : counts[slot]].to(torch.bfloat16))
            new = len(text) - len(job.prompt)
            if new >= job.new_tokens or (new and text[-1] in ends):
                slots[slot] = None
            else:
                text.append(_choose(logits[slot, 0], job.temperature, generators[number]))
    starts = [len(job.prompt) if job.new_tokens else 0 for job in jobs]
    ids = [torch.tensor(text, dtype=torch.int32) for text in tokens]
    return list(map(Text, [job.kind for job in jobs], ids, map(torch.cat, states), starts))


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    noise = torch.empty_like(logits).exponential_(generator=generator)
    # argmax of p / Exp(1) is a sample from p.
    return int((logits / temperature - noise.log()).argmax())


def _save(path: Path, texts: Sequence[Text]) -> None:
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]),
        "hidden": torch.cat([text.hidden for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "starts": torch.tensor([text.start for text in texts]),
    }
    save_tensors(path, tensors, {"kinds": json.dumps([text.kind for text in texts])})
