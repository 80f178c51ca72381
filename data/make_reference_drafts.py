"""Train what else could draft for the default model: Medusa heads and four kept layers.

    python data/make_reference_drafts.py            about 10 minutes on one core; resumes

Both learn from the answers that the shipped draft learned from. Notebook 08 trains them
briefly and shows these longer runs next to it. Their scores go into the shipped draft's
record; the weights are not kept. `text` of the four layers is their quality as a
replacement of the target.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from labkit.files import cache_dir, data_path
from labkit.lab.distill.corpus import Text
from labkit.lab.distill.distill import SAYABLE, corpus_of, held_out_jobs, said_most, training_jobs
from labkit.lab.distill.medusa_loss import head_agreement, medusa_loss
from labkit.lab.distill.train import Progress, Training, fit
from labkit.lab.evals import text as scoring
from labkit.lab.evals.report import results
from labkit.lab.evals.task import run
from labkit.lab.stack.open import load_model
from labkit.lab.texts import calibration_text
from labkit.model.decoder import Decoder
from labkit.speculate.medusa import MedusaNet
from labkit_course.experiments.prune import Pruned, influence, pruned, pruned_agreement, pruned_loss

TEXTS, TOKENS, LAYERS, SCORED = 2304, 512, 4, 4096
STEPS = {"medusa": 150, "pruned": 150}


def text_task(target: Decoder, scored: int = SCORED) -> scoring.Text:
    """Return held-out text, code and prose, as notebook 08 scores it against `target`."""
    return scoring.Text(target.tokenizer, scored, ("code", "prose"), length=160, overlap=0).against(
        target
    )


def judged(candidate, task: scoring.Text) -> dict[str, float]:
    """Return {metric: value} of `candidate` over both slices."""
    rows = results(task.metrics, "text", run(task, candidate))
    return {row["metric"]: row["value"] for row in rows if row["slice"] == "all"}


def calibration_pieces(tokenizer, each: int = 384) -> list[torch.Tensor]:
    """The tokens over which influence is measured, in pieces of 128: `each` of code and of prose."""
    sample = [
        t
        for kind in ("code", "prose")
        for t in tokenizer.encode(calibration_text(kind, characters=2400))[:each]
    ]
    return [torch.tensor(sample[at : at + 128]) for at in range(0, len(sample), 128)]


def medusa(
    target: Decoder, texts: list[Text], held: list[Text], training: Training, report
) -> dict:
    """Agreement of each head, where the heads before it agreed."""
    net = MedusaNet(target.config, said_most(texts, SAYABLE, target.config.vocab_size)).bind(target)
    _fit(net, texts, medusa_loss, training, "medusa", report)
    return head_agreement(net, held)


def four_layers(
    target: Decoder, texts: list[Text], held: list[Text], training: Training, report
) -> dict:
    """Agreement before and after, and what the trained layers are worth as a model of their own."""
    cut = pruned(target, LAYERS, influence(target, calibration_pieces(target.tokenizer)))
    net = Pruned(cut, said_most(texts, SAYABLE, target.config.vocab_size))
    before = pruned_agreement(net, held)
    _fit(net, texts, pruned_loss, training, "pruned", report)
    return {
        "layers": LAYERS,
        "steps": training.steps,
        "before": before,
        "agreement": pruned_agreement(net, held),
        "text": judged(cut, text_task(target)),
        "text_tokens": SCORED,
    }


def _fit(net, texts, loss, training: Training, name: str, report) -> None:
    loss = partial(loss, net)
    fit(net, texts, loss, training, _checkpoint(name), on_progress=report)


def _checkpoint(name: str) -> Path:
    return cache_dir() / "distill" / f"{name}.checkpoint"


def main() -> None:
    """The command above."""
    argparse.ArgumentParser(
        description="Train Medusa heads and four kept layers; their scores go into the draft's record."
    ).parse_args()
    target = load_model()
    texts = corpus_of(target, training_jobs(target.tokenizer)[:TEXTS])
    held = corpus_of(target, held_out_jobs(target.tokenizer, 16))
    for name, make in (("medusa", medusa), ("pruned", four_layers)):
        training = Training(steps=STEPS[name], tokens=TOKENS, warmup=20, every=50, averaging=0.95)

        def report(progress: Progress, name: str = name) -> None:
            if progress.step % 10 == 0:
                print(
                    f"{name}: step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, {progress.seconds:.0f} s",
                    flush=True,
                )

        found = make(target, texts, held, training, report)
        place = data_path("draft.json")
        record = json.loads(place.read_text(encoding="utf-8"))
        record.setdefault("others", {})[name] = found
        place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _checkpoint(name).unlink(missing_ok=True)
        print(json.dumps({name: found}))


if __name__ == "__main__":
    main()
