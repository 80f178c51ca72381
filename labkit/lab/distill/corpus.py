"""The target's own answers to many prompts, with its hidden states: what a draft is trained on.

A draft should predict what the target says, so it trains on the target's text: greedy answers,
and some sampled ones, which reach text that greedy decoding never visits. Generating computes
the hidden states anyway, so they are stored (E bfloat16 numbers per token) and no second pass is
needed. Library text is read, not continued.

    corpus = generate_corpus(target, jobs, folder)     finished shards of 128 texts are reused

This is continuous batching in its shortest form: a row that ends takes the next prompt in the
same pass. Cost: a pass reads the weights once for all rows, so 2 cores make about 1,000 tokens
per second of the default model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from labkit.errors import BadRequest
from labkit.files import save_tensors

SHARD = 128  # texts per file; a killed run loses one file at most


@dataclass(frozen=True)
class Job:
    """One text to generate: prompt tokens, number of new tokens, temperature (0: greedy)."""

    kind: str
    prompt: tuple[int, ...]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Text:
    """Tokens [T] and the target's last hidden states [T, E]; the answer begins at `start`."""

    kind: str
    tokens: Tensor
    hidden: Tensor
    start: int

    @property
    def before_answer(self) -> int:
        """The position whose state predicts the answer's first token."""
        return max(self.start - 1, 0)


def generate_corpus(
    target,
    jobs: Sequence[Job],
    folder: Path,
    batch: int = 32,
    on_progress: Callable[[int, int, int], object] = lambda done, jobs, tokens: None,
) -> list[Text]:
    """Return the jobs' texts, generated or read from `folder`; calls `on_progress(done, jobs, tokens)`."""
    if not jobs:
        raise BadRequest("There is nothing to generate: a corpus needs at least one prompt.")
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[Text] = []
    for first in range(0, len(jobs), SHARD):
        part = jobs[first : first + SHARD]
        path = folder / f"{first // SHARD:04d}-{_fingerprint(target, part)}.safetensors"
        if not path.is_file():
            _save(path, _answers(target, part, batch))
        texts += load_texts(path)
        on_progress(len(texts), len(jobs), sum(len(text.tokens) for text in texts))
    return texts


@torch.inference_mode()
def _answers(target, jobs: Sequence[Job], batch: int) -> list[Text]:
    """Generate every job's text, in the order of the jobs."""
    batch, ends = min(batch, len(jobs)), set(target.config.eos_ids)
    cache = target.new_cache(batch, max(len(job.prompt) + job.new_tokens for job in jobs))
    slots: list[int | None] = [None] * batch
    tokens = [list(job.prompt) for job in jobs]
    states: list[list[Tensor]] = [[] for _ in jobs]
    waiting, generators = iter(range(len(jobs))), {}
    while True:
        pieces: list[list[int]] = []
        for slot, job in enumerate(slots):
            if job is None and (job := next(waiting, None)) is not None:
                slots[slot] = job
                cache.rewind([0 if i == slot else n for i, n in enumerate(cache.lengths)])
                generators[job] = torch.Generator().manual_seed(jobs[job].seed)
            pieces.append([] if job is None else tokens[job][cache.lengths[slot] :])
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
            made = len(text) - len(job.prompt)
            if made >= job.new_tokens or (made and text[-1] in ends):
                slots[slot] = None
            else:
                text.append(_choose(logits[slot, 0], job.temperature, generators[number]))
    texts = []
    for job, ids, parts in zip(jobs, tokens, states):
        start = len(job.prompt) if job.new_tokens else 0
        texts.append(Text(job.kind, torch.tensor(ids, dtype=torch.int32), torch.cat(parts), start))
    return texts


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    noise = torch.empty_like(logits).exponential_(generator=generator)
    # argmax of p / Exp(1) is a draw from p.
    return int((logits / temperature - noise.log()).argmax())


def _fingerprint(target, jobs: Sequence[Job]) -> str:
    text = json.dumps([target.name, target.revision, [asdict(job) for job in jobs]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _save(path: Path, texts: Sequence[Text]) -> None:
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]),
        "hidden": torch.cat([text.hidden for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "starts": torch.tensor([text.start for text in texts]),
    }
    save_tensors(path, tensors, {"kinds": json.dumps([text.kind for text in texts])})


def load_texts(path: Path) -> list[Text]:
    """Return the texts of one shard."""
    with safe_open(path, "pt") as file:
        lengths, starts = file.get_tensor("lengths").tolist(), file.get_tensor("starts").tolist()
        tokens = file.get_tensor("tokens").split(lengths)
        hidden = file.get_tensor("hidden").split(lengths)
        kinds = json.loads(file.metadata()["kinds"])
        return [Text(*parts) for parts in zip(kinds, tokens, hidden, starts)]
