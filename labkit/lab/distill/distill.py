"""Make a draft of a target: prompts, the target's answers, training, a file.

    plan      prompts of three kinds in a fixed mix, and library text: the first `texts` of a pool
    answer    by the target on fast kernels, with hidden states; the cache folder keeps them
    start     from the target's last layer (`start.fitted_start`)
    train     `fit`, with a checkpoint next to the file; a killed run continues
    score     alpha on held-out prompts

`labkit distill` runs this. No evaluation text is read: the prompts are labkit's own, and the
library text is from its training part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.files import cache_dir
from labkit.lab.distill.corpus import Job, Text, generate_corpus
from labkit.lab.distill.loss import acceptance, chain_loss
from labkit.lab.distill.medusa_loss import head_agreement, medusa_loss
from labkit.lab.distill.start import fitted_start
from labkit.lab.distill.train import Progress, Training, fit
from labkit.model.decoder import Decoder
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.model.native.parts import format_of
from labkit.speculate.medusa import MedusaNet
from labkit.speculate.trained import check_output, save_draft

POOL = {"chat": (2800, 112), "code": (760, 128), "edit": (520, 144)}  # prompts, new tokens each
MORE = {"chat": (1200, 112), "functions": (1200, 112), "edit": (400, 144)}  # of another seed
HELD_OUT = {"chat": (64, 128), "code": (64, 128), "edit": (64, 128)}
LIBRARY_TOKENS = 30_000  # of each kind
PIECE, LONGEST = 256, 420  # tokens of a piece of library text; of the longest prompt
SAYABLE = 12_288  # tokens that a draft can say: the target's most frequent ones


@dataclass(frozen=True)
class Recipe:
    """How to make a draft: `texts` of the pool (6,600 on Python 3.11), `held_out` of each kind."""

    kind: str = "hidden_state"
    texts: int = 2304
    held_out: int = 16
    sayable: int = SAYABLE
    seed: int = 1
    training: Training = field(default_factory=Training)

    def __post_init__(self):
        if self.kind not in ("hidden_state", "medusa"):
            raise BadRequest(
                f"A draft of kind {self.kind!r} is not trained here; choose hidden_state or medusa."
            )
        if self.texts < 1 or not 1 <= self.held_out <= 64:
            raise BadRequest(
                f"texts is {self.texts} and held_out {self.held_out}; give at least 1, and 1 to 64."
            )


def training_jobs(tokenizer, seed: int = 1) -> list[Job]:
    """Return the shuffled pool and further jobs behind it.

    Three answers in five are greedy, the others are sampled at temperature 0.8.
    """
    from labkit.lab.texts import documents

    first, more = _prompted(POOL, seed, tokenizer), _prompted(MORE, seed + 1, tokenizer)
    for kind in ("code", "prose"):
        tokens = 0
        for document in documents(kind, "training", seed):
            ids = tokenizer.encode(document.text)[: 4 * PIECE]
            pieces = [tuple(ids[at : at + PIECE]) for at in range(0, len(ids), PIECE)]
            pieces = [piece for piece in pieces if len(piece) > 64]
            first += [Job("library", piece, 0) for piece in pieces]
            tokens += sum(map(len, pieces))
            if tokens > LIBRARY_TOKENS:
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
    """Return `count` greedy jobs of each kind, with prompts of another seed than training."""
    return [
        Job(kind, prompt[:LONGEST], new)
        for kind, (most, new) in HELD_OUT.items()
        for prompt in _encoded(kind, most, seed, tokenizer)[:count]
    ]


def _encoded(kind: str, count: int, seed: int, tokenizer) -> list[tuple[int, ...]]:
    from labkit.lab.texts.training_prompts import training_prompts

    return [
        tuple(tokenizer.chat(p.text) if p.chat else tokenizer.encode(p.text))
        for p in training_prompts(kind, count, seed)
    ]


def said_most(texts: Sequence[Text], count: int, vocab_size: int) -> Tensor:
    """Return the `count` tokens most frequent in the answers, filled up with the lowest ids."""
    seen = Counter(token for text in texts for token in text.tokens[text.start :].tolist())
    chosen = dict.fromkeys(token for token, _ in seen.most_common(count))
    chosen |= dict.fromkeys(range(min(count, vocab_size)))
    return torch.tensor(sorted(list(chosen)[: min(count, vocab_size)]))


def corpus_of(
    target: Decoder, jobs: Sequence[Job], on_progress=lambda done, jobs, tokens: None
) -> list[Text]:
    """Return the jobs' texts, answered on fast kernels if possible, and cached in a folder."""
    fast = target.device.type == "cpu" and unsupported_reason(target.config, "int8") is None
    name = f"{target.name}-{target.revision}".replace("/", "-")
    model = accelerate(target, "int8") if fast else target
    return generate_corpus(model, jobs, cache_dir() / "distill" / name, on_progress=on_progress)


def _prompt(text: Text) -> tuple[int, ...]:
    return tuple(text.tokens[: text.start].tolist())


def distill(
    target: Decoder,
    file: Path,
    recipe: Recipe,
    on_answers: Callable[[int, int, int], object] = lambda done, jobs, tokens: None,
    on_training: Callable[[Progress], object] = lambda progress: None,
) -> dict:
    """Train a draft of `target` (a plain decoder) and write it to `file`; return its record.

    A killed run of the same recipe continues. Raises BadRequest, before any work, if the file
    name or the model is not suitable.
    """
    if file.suffix != ".safetensors":
        raise BadRequest(
            f"{str(file)!r} is not a .safetensors file; choose such a name for the draft."
        )
    check_output(file)
    if any(
        format_of(module)
        for module in (target.embed_tokens, target.head, *target.layers.modules())
        if hasattr(module, "weight")
    ):
        raise BadRequest(
            f"{target.name} is quantized and a draft is trained on plain weights; give the model "
            "that it was made from."
        )
    if target.tokenizer is None:
        raise BadRequest("The prompts are text and this model has no tokenizer; load one that has.")
    started = time.monotonic()
    jobs = training_jobs(target.tokenizer, recipe.seed)[: recipe.texts]
    texts = corpus_of(target, jobs, on_answers)
    learnt = {_prompt(text) for text in texts}
    held_out = corpus_of(target, held_out_jobs(target.tokenizer, recipe.held_out))
    held_out = [text for text in held_out if _prompt(text) not in learnt]
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
