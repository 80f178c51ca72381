"""What else could have been trained for the same target: Medusa heads and four kept layers, on the shipped draft's answers.

    python -m labkit.evals.reference_drafts            about 10 minutes of one core; goes on where it was stopped

Notebook 08 trains both for a moment and shows these longer runs beside it. Their scores go into the shipped draft's record;
the weights are not kept. `text` of the four layers is what they are worth as a replacement of the target.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from labkit.assets import cache_dir, data_path
from labkit.evals import text as scoring
from labkit.evals.reading import Remembered
from labkit.model.decoder import Decoder
from labkit.model.load import load_model
from labkit.speculate.corpus import Text
from labkit.speculate.distill import SAYABLE, corpus_of, held_out_jobs, said_most, training_jobs
from labkit.speculate.fit import Progress, Training, fit
from labkit.speculate.medusa import MedusaNet, head_agreement, medusa_loss
from labkit.speculate.prune import Pruned, influence, pruned, pruned_agreement, pruned_loss
from labkit.texts import calibration_text

TEXTS, TOKENS, LAYERS, SCORED = 2304, 512, 4, 4096
STEPS = {"medusa": 150, "pruned": 150}


def passages_of(target: Decoder, scored: int = SCORED) -> list:
    """Held-out text, code and prose, as notebook 08 scores it."""
    return scoring.TextTask(target.tokenizer, limit=scored, length=160).items()


def judged(candidate, passages: list, reference: Remembered) -> dict[str, float]:
    """{metric: value} of `candidate` over both slices."""
    rows = scoring.results(scoring.evaluate(candidate, passages, reference))
    return {row["metric"]: row["value"] for row in rows if row["slice"] == "all"}


def calibration_pieces(tokenizer, each: int = 384) -> list[torch.Tensor]:
    """The tokens over which influence is measured, in pieces of 128: `each` of code and of prose."""
    sample = [t for kind in ("code", "prose") for t in tokenizer.encode(calibration_text(kind, characters=2400))[:each]]
    return [torch.tensor(sample[at : at + 128]) for at in range(0, len(sample), 128)]


def medusa(target: Decoder, texts: list[Text], held: list[Text], training: Training, report) -> dict:
    """Agreement of each head, where the heads before it agreed."""
    net = MedusaNet(target.config, said_most(texts, SAYABLE, target.config.vocab_size)).bind(target)
    _fit(net, texts, medusa_loss, training, "medusa", report)
    return head_agreement(net, held)


def four_layers(target: Decoder, texts: list[Text], held: list[Text], training: Training, report) -> dict:
    """Agreement before and after, and what the trained layers are worth as a model of their own."""
    cut = pruned(target, LAYERS, influence(target, calibration_pieces(target.tokenizer)))
    net = Pruned(cut, said_most(texts, SAYABLE, target.config.vocab_size))
    before = pruned_agreement(net, held)
    _fit(net, texts, pruned_loss, training, "pruned", report)
    passages = passages_of(target)
    return {"layers": LAYERS, "steps": training.steps, "before": before, "agreement": pruned_agreement(net, held),
            "text": judged(cut, passages, Remembered(target, passages)), "text_tokens": SCORED}  # fmt: skip


def _fit(net, texts, loss, training: Training, name: str, report) -> None:
    fit(net, texts, lambda some: loss(net, some), training, _checkpoint(name), None, report)


def _checkpoint(name: str) -> Path:
    return cache_dir() / "distill" / f"{name}.checkpoint"


def main() -> None:
    """The command above."""
    argparse.ArgumentParser(description="Train Medusa heads and four kept layers; their scores go into the draft's record.").parse_args()
    target = load_model()
    texts = corpus_of(target, training_jobs(target.tokenizer)[:TEXTS])
    held = corpus_of(target, held_out_jobs(target.tokenizer, 16))
    for name, make in (("medusa", medusa), ("pruned", four_layers)):
        training = Training(steps=STEPS[name], tokens=TOKENS, warmup=20, every=50, averaging=0.95)

        def report(progress: Progress, name: str = name) -> None:
            if progress.step % 10 == 0:
                print(f"{name}: step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, {progress.seconds:.0f} s", flush=True)

        found = make(target, texts, held, training, report)
        place = data_path("draft.json")
        record = json.loads(place.read_text(encoding="utf-8"))
        record.setdefault("others", {})[name] = found
        place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _checkpoint(name).unlink(missing_ok=True)
        print(json.dumps({name: found}))


if __name__ == "__main__":
    main()
