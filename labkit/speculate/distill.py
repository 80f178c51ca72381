"""Make a draft of a target: prompts, its own answers, training, a file. `labkit distill` is this, with a command line.

    plan      prompts of three kinds in a fixed mix, and library text       the first `texts` of a pool
    answer    by the target on the fast kernels, with its hidden states     kept in the cache folder, found again
    start     from the target's own last layer                              (`hidden_net.fitted_start`)
    train     `fit`, with checkpoints beside the file                       a run that was killed goes on
    score     alpha on held-out prompts of other wordings' combinations     what the training reports

Nothing that is evaluated is read: prompts are labkit's own, library text is of its training part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from labkit.assets import cache_dir
from labkit.errors import BadRequest
from labkit.model.decoder import Decoder
from labkit.model.native_decoder import accelerate, why_not
from labkit.model.native_parts import format_held
from labkit.speculate.chain import acceptance, chain_loss
from labkit.speculate.corpus import Job, Text, generate_corpus
from labkit.speculate.fit import Progress, Training, fit
from labkit.speculate.hidden_net import fitted_start
from labkit.speculate.medusa import MedusaNet, head_agreement, medusa_loss
from labkit.speculate.trained import check_output, save_draft

POOL = {"chat": (2800, 112), "code": (760, 128), "edit": (520, 144)}  # prompts, new tokens each
MORE = {"chat": (1200, 112), "functions": (1200, 112), "edit": (400, 144)}  # behind it, of another seed
HELD_OUT = {"chat": (64, 128), "code": (64, 128), "edit": (64, 128)}
LIBRARY_TOKENS, PIECE, LONGEST = 30_000, 256, 420  # of each kind; a piece; the longest prompt
SAYABLE = 12_288  # tokens that a draft can say, of those that the target says most


@dataclass(frozen=True)
class Recipe:
    """`texts` of the pool (6,600 in all on Python 3.11), `held_out` of each kind; `steps` and the rest as in `Training`."""

    kind: str = "hidden_state"
    texts: int = 2304
    held_out: int = 16
    sayable: int = SAYABLE
    seed: int = 1
    training: Training = field(default_factory=Training)

    def __post_init__(self):
        if self.kind not in ("hidden_state", "medusa"):
            raise BadRequest(f"A draft of kind {self.kind!r} is not trained here; choose hidden_state or medusa.")
        if self.texts < 1 or not 1 <= self.held_out <= 64:
            raise BadRequest(f"{self.texts} texts and {self.held_out} held out were asked for; give at least 1, and 1 to 64.")


def training_jobs(tokenizer, seed: int = 1) -> list[Job]:
    """The whole pool, shuffled, and more behind it: three answers in five are greedy, the others drawn at temperature 0.8."""
    from labkit.texts import training_documents

    first, more = _prompted(POOL, seed, tokenizer), _prompted(MORE, seed + 1, tokenizer)
    for kind in ("code", "prose"):
        held = 0
        for document in training_documents(kind, seed):
            ids = tokenizer.encode(document.text)[: 4 * PIECE]
            pieces = [tuple(ids[at : at + PIECE]) for at in range(0, len(ids), PIECE)]
            first += [Job("library", piece, 0) for piece in pieces if len(piece) > 64]
            held += sum(len(piece) for piece in pieces if len(piece) > 64)
            if held > LIBRARY_TOKENS:
                break
    Random(0).shuffle(first)
    Random(0).shuffle(more)
    known = {job.prompt for job in first}
    return first + [job for job in more if job.prompt not in known]


def _prompted(pool: dict, seed: int, tokenizer) -> list[Job]:
    return [
        Job(kind, prompt, new_tokens, 0.0 if i % 5 < 3 else 0.8, i)
        for kind, (count, new_tokens) in pool.items()
        for i, prompt in enumerate(_encoded(kind, count, seed, tokenizer))
        if len(prompt) <= LONGEST
    ]


def held_out_jobs(tokenizer, count: int, seed: int = 99) -> list[Job]:
    """`count` greedy answers of each kind, to prompts of another seed that training does not have."""
    return [Job(kind, prompt[:LONGEST], new) for kind, (most, new) in HELD_OUT.items()
            for prompt in _encoded(kind, most, seed, tokenizer)[:count]]  # fmt: skip


def _encoded(kind: str, count: int, seed: int, tokenizer) -> list[tuple[int, ...]]:
    from labkit.texts.training_prompts import training_prompts

    return [tuple(tokenizer.chat(p.text) if p.chat else tokenizer.encode(p.text)) for p in training_prompts(kind, count, seed)]


def said_most(texts: Sequence[Text], count: int, vocab_size: int) -> Tensor:
    """The `count` tokens most frequent in the answers; then the lowest ids, which a tokenizer learnt first."""
    seen = Counter(token for text in texts for token in text.tokens[text.start :].tolist())
    chosen = dict.fromkeys(token for token, _ in seen.most_common(count))
    chosen |= dict.fromkeys(range(min(count, vocab_size)))
    return torch.tensor(sorted(list(chosen)[: min(count, vocab_size)]))


def corpus_of(target: Decoder, jobs: Sequence[Job], on_progress=lambda done, jobs, tokens: None) -> list[Text]:
    """The jobs' texts, answered on the fast kernels where there are some and kept in the cache folder."""
    fast = accelerate(target, "int8") if why_not(target.config, "int8") is None and target.device.type == "cpu" else target
    return generate_corpus(fast, jobs, cache_dir() / "distill" / f"{target.name}-{target.revision}".replace("/", "-"), on_progress=on_progress)


def distill(
    target: Decoder,
    file: Path,
    recipe: Recipe,
    on_answers: Callable[[int, int, int], object] = lambda done, jobs, tokens: None,
    on_training: Callable[[Progress], object] = lambda progress: None,
) -> dict:
    """Train a draft of `target` (a plain decoder) and write it to `file`; returns its record.

    Goes on where a killed run of the same recipe stood. Raises BadRequest before any work where it cannot be done."""
    if file.suffix != ".safetensors":
        raise BadRequest(f"{str(file)!r} is not a .safetensors file; choose such a name for the draft.")
    check_output(file)
    if any(format_held(module) for module in (target.embed_tokens, target.head, *target.layers.modules()) if hasattr(module, "weight")):
        raise BadRequest(f"{target.name} is quantised and a draft is trained on plain weights; give the model it was made from.")
    if target.tokenizer is None:
        raise BadRequest("The prompts are text and this model has no tokenizer; load one that has.")
    started = time.monotonic()
    texts = corpus_of(target, training_jobs(target.tokenizer, recipe.seed)[: recipe.texts], on_answers)
    held = corpus_of(target, held_out_jobs(target.tokenizer, recipe.held_out))
    learnt = {tuple(text.tokens[: text.start].tolist()) for text in texts}
    held = [text for text in held if tuple(text.tokens[: text.start].tolist()) not in learnt]
    answered = time.monotonic() - started
    ids = said_most(texts, recipe.sayable, target.config.vocab_size)
    if recipe.kind == "medusa":
        net = MedusaNet(target.config, ids).bind(target)
        loss, score = (lambda some: medusa_loss(net, some)), (lambda: head_agreement(net, held))
    else:
        net = fitted_start(target, ids, [text.tokens for text in texts[:24]])
        loss, score = (lambda some: chain_loss(net, some)), (lambda: acceptance(net, held))
    before = score()
    checkpoint = file.with_suffix(".checkpoint")
    history = fit(net, texts, loss, recipe.training, checkpoint, score, on_training)
    record = {
        "kind": recipe.kind, "model": target.name, "revision": target.revision, "recipe": asdict(recipe),
        "prompts": Counter(text.kind for text in texts), "tokens": sum(len(text.tokens) for text in texts),
        "answer_tokens": sum(len(text.tokens) - text.start for text in texts), "answer_seconds": round(answered, 1),
        "training_seconds": history[-1]["seconds"], "held_out_texts": len(held), "held_out": {"before": before, "after": score()}, "history": history,
    }  # fmt: skip
    record["file_bytes"] = save_draft(net, file, record)
    checkpoint.unlink(missing_ok=True)
    return record
