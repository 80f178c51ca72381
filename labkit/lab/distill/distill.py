"""Make a draft of a target: `labkit distill` runs `distill`.

1. Prompts: the first `texts` of a shuffled pool of prompts and library text.
2. Answers: the target generates them, and the cache folder stores them.
3. Start: `fitted_start` initializes a hidden-state draft from the target's last layer.
4. Training: `fit` writes checkpoints next to the file. A stopped run continues.
5. Score: alpha on held-out prompts.

No evaluation text is used. The prompts are labkit's own, and the library text comes
from the training part of the standard library.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from labkit.errors import BadRequest, OneOf, Whole, check_fields
from labkit.files import cache_dir
from labkit.lab.distill.corpus import Job, Text, generate_corpus
from labkit.lab.distill.loss import acceptance, chain_loss
from labkit.lab.distill.medusa_loss import head_agreement, medusa_loss
from labkit.lab.distill.start import fitted_start
from labkit.lab.distill.train import Progress, Training, fit
from labkit.lab.texts import documents
from labkit.lab.texts.training_prompts import training_prompts
from labkit.model.decoder import Decoder
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.model.native.parts import format_of
from labkit.speculate.medusa import MedusaNet
from labkit.speculate.trained import check_output, save_draft

# Number of prompts of each kind, and new tokens of each answer.
POOL = {"chat": (2800, 112), "code": (760, 128), "edit": (520, 144)}
MORE = {"chat": (1200, 112), "functions": (1200, 112), "edit": (400, 144)}  # of another seed
HELD_OUT = {"chat": (64, 128), "code": (64, 128), "edit": (64, 128)}
LIBRARY_TOKENS = 30_000  # of code, and as many of prose
PIECE = 256  # tokens of a piece of library text
LONGEST = 420  # tokens of the longest prompt
SAYABLE = 12_288  # number of tokens that a draft can predict: the target's most frequent ones


@dataclass(frozen=True)
class Recipe:
    """The settings of a draft. Raises BadRequest if one is not valid.

    `texts` is the number of texts of the pool (6,600 on Python 3.11), `held_out` the
    number of held-out prompts per kind, and `sayable` the number of tokens that the
    draft can predict.
    """

    kind: str = "hidden_state"
    texts: int = 2304
    held_out: int = 16
    sayable: int = SAYABLE
    seed: int = 1
    training: Training = field(default_factory=Training)

    def __post_init__(self):
        check_fields(self, kind=OneOf("hidden_state", "medusa"), texts=Whole(1))
        check_fields(self, held_out=Whole(1, 64))


def training_jobs(tokenizer, seed: int = 1) -> list[Job]:
    """Return the shuffled jobs of `POOL` and library text, then those of `MORE`.

    Three of five answers are greedy. The others are sampled at temperature 0.8.
    """
    pool = [_sampled(job) for job in _jobs(POOL, seed, tokenizer) if len(job.prompt) <= LONGEST]
    more = [_sampled(job) for job in _jobs(MORE, seed + 1, tokenizer) if len(job.prompt) <= LONGEST]
    for kind in ("code", "prose"):
        tokens = 0
        for document in documents(kind, "training", seed):
            ids = tuple(tokenizer.encode(document.text)[: 4 * PIECE])
            pieces = [ids[at : at + PIECE] for at in range(0, len(ids) - 64, PIECE)]
            pool += [Job("library", piece, 0) for piece in pieces]
            tokens += sum(map(len, pieces))
            if tokens > LIBRARY_TOKENS:
                break
    Random(0).shuffle(pool)
    Random(0).shuffle(more)
    known = {job.prompt for job in pool}
    return pool + [job for job in more if job.prompt not in known]


def _sampled(job: Job) -> Job:
    return replace(job, temperature=0.0 if job.seed % 5 < 3 else 0.8)


def held_out_jobs(tokenizer, count: int, seed: int = 99) -> list[Job]:
    """Return `count` greedy jobs per kind, with another seed than the training."""
    jobs = [job for job in _jobs(HELD_OUT, seed, tokenizer) if job.seed < count]
    return [replace(job, prompt=job.prompt[:LONGEST], seed=0) for job in jobs]


def _jobs(pool: Mapping[str, tuple[int, int]], seed: int, tokenizer) -> Iterator[Job]:
    """Yield a greedy job per prompt. Its seed is the prompt's number in its kind."""
    for kind, (count, new_tokens) in pool.items():
        for number, prompt in enumerate(training_prompts(kind, count, seed)):
            yield Job(kind, tuple(prompt.ids(tokenizer)), new_tokens, 0.0, number)


def said_most(texts: Sequence[Text], count: int, vocab_size: int) -> Tensor:
    """Return the sorted ids of the `count` most frequent tokens of the answers.

    The lowest ids fill the rest if the answers have fewer different tokens.
    """
    seen = Counter(token for text in texts for token in text.tokens[text.start :].tolist())
    chosen = dict.fromkeys(token for token, _ in seen.most_common(count))
    chosen |= dict.fromkeys(range(min(count, vocab_size)))
    return torch.tensor(sorted(list(chosen)[: min(count, vocab_size)]))


def corpus_of(
    target: Decoder, jobs: Sequence[Job], on_progress=lambda done, jobs, tokens: None
) -> list[Text]:
    """Return the texts of the jobs, generated on fast kernels if possible.

    The cache folder stores the texts.
    """
    fast = target.device.type == "cpu" and unsupported_reason(target.config, "int8") is None
    name = f"{target.name}-{target.revision}".replace("/", "-")
    model = accelerate(target, "int8") if fast else target
    return generate_corpus(model, jobs, cache_dir() / "distill" / name, on_progress=on_progress)


def distill(
    target: Decoder,
    file: Path,
    recipe: Recipe,
    on_answers: Callable[[int, int, int], object] = lambda done, jobs, tokens: None,
    on_training: Callable[[Progress], object] = lambda progress: None,
) -> dict:
    """Train a draft of `target`, write it to `file`, and return its record.

    `target` is a plain decoder. A stopped run of the same recipe continues. Raises
    BadRequest before any work if the file cannot be written or the model is not
    suitable.
    """
    check_output(file)
    if any(format_of(part) for part in target.modules() if hasattr(part, "weight")):
        raise BadRequest(f"{target.name} is quantized; give the model that it was made from.")
    if target.tokenizer is None:
        raise BadRequest(f"{target.name} has no tokenizer; give a model that has one.")
    started = time.monotonic()
    jobs = training_jobs(target.tokenizer, recipe.seed)[: recipe.texts]
    texts = corpus_of(target, jobs, on_answers)
    known = {job.prompt for job in jobs}
    others = held_out_jobs(target.tokenizer, recipe.held_out)
    held_out = corpus_of(target, [job for job in others if job.prompt not in known])
    answered = time.monotonic() - started
    ids = said_most(texts, recipe.sayable, target.config.vocab_size)
    if recipe.kind == "medusa":
        net = MedusaNet(target.config, ids).bind(target)
        loss, score = partial(medusa_loss, net), partial(head_agreement, net, held_out)
    else:
        net = fitted_start(target, ids, [text.tokens for text in texts[:24]])
        loss, score = partial(chain_loss, net), partial(acceptance, net, held_out)
    before = score()
    checkpoint = file.with_suffix(".checkpoint")
    history = fit(net, texts, loss, recipe.training, checkpoint, score, on_training)
    record = {
        "kind": recipe.kind,
        "model": target.name,
        "revision": target.revision,
        "recipe": asdict(recipe),
        "prompts": Counter(text.kind for text in texts),
        "tokens": sum(len(text.tokens) for text in texts),
        "answer_tokens": sum(len(text.tokens) - text.start for text in texts),
        "answer_seconds": round(answered, 1),
        "training_seconds": history[-1]["seconds"],
        "held_out_texts": len(held_out),
        "held_out": {"before": before, "after": score()},
        "history": history,
    }
    record["file_bytes"] = save_draft(net, file, record)
    checkpoint.unlink(missing_ok=True)
    return record
