"""The target's own answers to many prompts, with its hidden states: what a draft is trained on.

A draft is right when it says what the target says, so its text comes from the target: greedy answers, and some sampled
ones, which lead to places that greedy text never visits. The hidden states fall out of generating, so they are kept
(E numbers a token in bfloat16) and no second pass is needed. Library text is read, not continued.

    corpus = generate_corpus(target, plan, folder)     shards of some hundred texts; finished ones are found again

Continuous batching in its shortest form: a row that ends is emptied and takes the next prompt in the same pass. Cost: a
pass reads the weights once for all rows, so 2 cores make about 1,000 tokens a second of the default model.
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

from labkit.assets.whole import save_tensors
from labkit.errors import BadRequest

SHARD = 128  # texts a file: what a killed run loses at most


@dataclass(frozen=True)
class Job:
    """One text to be: its prompt's tokens, how many are to follow, at which temperature (0: greedy)."""

    kind: str
    prompt: tuple[int, ...]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Text:
    """tokens [T] and the state that the target's head read at each of them [T, E]; from `start` on it is the answer."""

    kind: str
    tokens: Tensor
    hidden: Tensor
    start: int

    @property
    def before_answer(self) -> int:
        """The place of the last token before the answer: from its state the target said the answer's first."""
        return max(self.start - 1, 0)


def generate_corpus(target, jobs: Sequence[Job], folder: Path, batch: int = 32,
                    on_progress: Callable[[int, int, int], object] = lambda done, jobs, tokens: None) -> list[Text]:
    """Carry out the jobs, or find them done; `on_progress(jobs done, jobs, tokens)`."""
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
    """Every job's text, in the order of the jobs."""
    batch, ends = min(batch, len(jobs)), set(target.config.eos_ids)
    cache = target.new_cache(batch, max(len(job.prompt) + job.new_tokens for job in jobs))
    slots: list[int | None] = [None] * batch
    tokens = [list(job.prompt) for job in jobs]
    states: list[list[Tensor]] = [[] for _ in jobs]
    waiting, generators = iter(range(len(jobs))), {}
    while True:
        pieces: list[list[int]] = []
        for slot, held in enumerate(slots):
            if held is None and (held := next(waiting, None)) is not None:
                slots[slot] = held
                cache.rewind([0 if i == slot else n for i, n in enumerate(cache.lengths)])
                generators[held] = torch.Generator().manual_seed(jobs[held].seed)
            pieces.append([] if held is None else tokens[held][cache.lengths[slot] :])
        counts = [len(piece) for piece in pieces]
        if not any(counts):
            break
        padded = torch.tensor([piece + [0] * (max(counts) - len(piece)) for piece in pieces])
        logits, hidden = target(padded, cache, counts, last_only=True, return_hidden=True)
        for slot, held in enumerate(slots):
            if held is None:
                continue
            job = jobs[held]
            states[held].append(hidden[slot, : counts[slot]].to(torch.bfloat16))
            made = len(tokens[held]) - len(job.prompt)
            if made >= job.new_tokens or (made and tokens[held][-1] in ends):
                slots[slot] = None
            else:
                tokens[held].append(_choose(logits[slot, 0], job.temperature, generators[held]))
    return [Text(job.kind, torch.tensor(said, dtype=torch.int32), torch.cat(state), len(job.prompt) if job.new_tokens else 0)
            for job, said, state in zip(jobs, tokens, states)]  # fmt: skip


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    noise = torch.empty_like(logits).exponential_(generator=generator)  # argmax of p / Exp(1) is a draw from p
    return int((logits / temperature - noise.log()).argmax())


def _fingerprint(target, jobs: Sequence[Job]) -> str:
    said = json.dumps([target.name, target.revision, [asdict(job) for job in jobs]])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _save(path: Path, texts: Sequence[Text]) -> None:
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]),
        "hidden": torch.cat([text.hidden for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "starts": torch.tensor([text.start for text in texts]),
    }
    save_tensors(path, tensors, {"kinds": json.dumps([text.kind for text in texts])})


def load_texts(path: Path) -> list[Text]:
    """The texts of one shard."""
    with safe_open(path, "pt") as file:
        lengths, starts = file.get_tensor("lengths").tolist(), file.get_tensor("starts").tolist()
        tokens = file.get_tensor("tokens").split(lengths)
        hidden = file.get_tensor("hidden").split(lengths)
        return [Text(*parts) for parts in zip(json.loads(file.metadata()["kinds"]), tokens, hidden, starts)]
