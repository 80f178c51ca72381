"""The table of methods: RTN, GPTQ, AWQ, clipping and their sums on one model, over several calibration seeds.

    python -m labkit.evals.quantization_table [RECORDS] [SEEDS] [TOKENS A SLICE]

A record a trial (KL in nats a token, slice `all`, interval over passages; the slices in its details), and the ratio to
rounding is a ratio of records. A seed chooses the calibration text and nothing else; the spread over seeds says which
differences between methods are the methods'. A killed run goes on where it stopped.
Cost: minutes a trial, one Hessian of every layer in memory (0.4 GB on the default model). Head and embedding stay in
float32, and so does the arithmetic: what is measured is what the weights of the blocks lost.
"""

from __future__ import annotations

import sys

import torch

from labkit.evals.reading import cut
from labkit.evals.text import TextTask
from labkit.evals.trial import PartLoss, Trial, Trials, parts_by_depth
from labkit.formats import get_format
from labkit.measure.record import Record, RecordWriter
from labkit.model.load import load_model
from labkit.quant.calibrate import Calibration, collect
from labkit.quant.recipe import search
from labkit.texts import calibration_documents, calibration_text

WHAT = "quantization.kl"
ROUNDED = (
    "int8_channel", "int6_g64_zp", "int5_g64_zp", "int5_channel", "int4_g16_zp", "int4_g32_zp", "int4_g64_zp",
    "int4_channel", "int3_g64_zp", "int4_g32_min",
)  # fmt: skip
CALIBRATED = (
    ("int3_g64_zp", "awq+gptq"),
    ("int4_g64_zp", "gptq"),
    ("int4_g64_zp", "awq"),
    ("int4_g64_zp", "gptq+clip"),
    ("int4_g64_zp", "awq+gptq+clip"),
    ("int4_g64_zp", "awq+clip"),
    ("int3_g64_zp", "awq+gptq+clip"),
)
SEQUENCES, LENGTH = 48, 256
BUDGET, SEARCHED = 5.0, ("int3_g64_zp", "int4_g64_zp", "int5_g64_zp", "int6_g64_zp", "int8_g64_zp")


def calibration(model, seed: int, sequences: int = SEQUENCES, length: int = LENGTH) -> Calibration:
    """Code and prose in equal shares, other documents with another seed."""
    texts = [calibration_text(kind, seed, 400_000) for kind in ("code", "prose")]
    return Calibration.from_text(texts, model.tokenizer, length, sequences, batch=8, seed=seed)


def record_of(trial: Trial, model, seed: int | None = None, tokens: int | None = None, **details) -> Record:
    """A trial as a record: what it lost, on how many bits, and its slices."""
    value, low, high = trial.kl()
    slices = {s: {"kl": trial.kl(s), "top1": trial.top1(s), "n": trial.tokens(s)} for s in ("code", "prose")}
    return Record(
        WHAT, value, "nats/token", n=trial.tokens(), low=low, high=high, seed=seed, model=model.name,
        revision=model.revision, dtype="float32", device=str(model.device), threads=torch.get_num_threads(),
        item=f"{trial.name}, seed {seed}",
        details={"format": trial.name.split()[0], "method": trial.method, "bits": trial.bits,
                 "calibration_tokens": tokens, "slices": slices, **details},
    )  # fmt: skip


def mixed(trials: Trials, budget: float = BUDGET, tokens: int = 64) -> dict[str, str]:
    """Formats by layer: `budget` bits spent by the loss of each matrix alone in four bits, on calibration text.

    Other bits are not measured one by one: a bit less is four times the loss (the error's square)."""
    model, pieces = trials.model, []
    for kind in ("code", "prose"):
        documents = ((one.name, one.text) for one in calibration_documents(kind, seed=1))
        pieces += cut(documents, kind, model.tokenizer, tokens, tokens)
    loss = PartLoss(model, pieces, parts_by_depth(model, len(model.layers)))
    alone = {part: loss({part: "int4_g64_zp"}) for part in loss.parts}

    def by_rule(overrides: dict[str, str]) -> float:
        ((part, format),) = overrides.items()
        return alone[part] * 4.0 ** (4 - get_format(format).bits)

    return loss.expand(search(loss.shapes(), by_rule, budget, SEARCHED)[0].overrides)


def run(path, seeds=(0, 1, 2), limit: int = 1024, name: str = "default", methods=CALIBRATED) -> None:
    """Every trial that the file does not hold yet, rounding first, then seed by seed."""
    model = load_model(name)
    trials = Trials(model, TextTask(model.tokenizer, limit).items())
    with RecordWriter(path) as writer:

        def add(format: str, method: str, seed: int | None, overrides=None, **details) -> None:
            if writer.done(WHAT, f"{format} {method}, seed {seed}"):
                return
            base = "int4_g64_zp" if overrides else format
            trial = trials.run(base, method, name=f"{format} {method}", overrides=overrides or {})
            writer.write(record_of(trial, model, seed, **details))
            print(f"{format} {method}, seed {seed}", flush=True)

        if not writer.done(WHAT, "mixed rtn, seed None"):
            overrides = mixed(trials)
            add("mixed", "rtn", None, overrides, formats=overrides)
        for format in ROUNDED:
            add(format, "rtn", None)
        for seed in seeds:
            if all(writer.done(WHAT, f"{format} {method}, seed {seed}") for format, method in methods):
                continue
            text = calibration(model, seed)
            names = [n for n, m in model.layers.named_modules(prefix="layers") if isinstance(m, torch.nn.Linear)]
            trials.statistics = collect(model, names, text, lambda m, tokens, counts: m.hidden_states(tokens))
            for format, method in methods:
                add(format, method, seed, tokens=text.tokens)


if __name__ == "__main__":
    given = sys.argv[1:]
    run(
        given[0] if given else "quantization_trials.jsonl",
        range(int(given[1]) if len(given) > 1 else 3),
        int(given[2]) if len(given) > 2 else 1024,
    )
