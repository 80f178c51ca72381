"""Make the table of methods: RTN, GPTQ, AWQ, clipping and their sums, over calibration seeds.

    python data/make_quantization_trials.py [RECORDS] [SEEDS: 3] [TOKENS PER SLICE: 2048]

RECORDS defaults to data/quantization_trials.jsonl. Each trial is one record: KL in nats per
token of the slice `all` with an interval over passages, and the slices in its details. A
seed chooses the calibration text and nothing else, so the spread over seeds tells which
differences are due to the methods. A killed run resumes. Head, embedding and arithmetic
stay in float32: the KL is what the weights of the blocks lost.
Cost: minutes per trial, and one Hessian per layer in memory (0.4 GB on the default model).
"""

from __future__ import annotations

import sys
from functools import cache

import torch

from labkit.files import data_path
from labkit.lab.evals.text import Text
from labkit.lab.measure.record import Record, RecordWriter
from labkit.lab.stack.open import load_model
from labkit.lab.texts.calibration import library_calibration
from labkit.quant.calibrate import LENGTH, SEQUENCES, Calibration, collect
from labkit_course.experiments.compare_methods import (
    PartLoss,
    Trial,
    Trials,
    hidden_states,
    parts_by_depth,
)
from labkit_course.experiments.mixed_precision import calibration_passages, mixed_formats
from labkit_course.experiments.quantization_records import FILE, SLICES

WHAT = "quantization.kl"
ROUNDED = (
    "int8_channel",
    "int6_g64_zp",
    "int5_g64_zp",
    "int5_g128_zp",
    "int5_channel",
    "int4_g16_zp",
    "int4_g32_zp",
    "int4_g64_zp",
    "int4_channel",
    "int3_g64_zp",
    "int4_g32_min",
)
CALIBRATED = (
    ("int3_g64_zp", "awq+gptq"),
    ("int4_g64_zp", "gptq"),
    ("int4_g64_zp", "awq"),
    ("int4_g64_zp", "gptq+clip"),
    ("int4_g64_zp", "awq+gptq+clip"),
    ("int4_g64_zp", "awq+clip"),
    ("int3_g64_zp", "awq+gptq+clip"),
)
# The text is read anew after every layer (labkit.quant.layer_by_layer).
LAYER_BY_LAYER = (("int3_g64_zp", "awq+gptq"), ("int4_g64_zp", "awq+gptq+clip"))
# With the first seed only: a mixed recipe, with and without a method, and what it stands against.
AT_FIVE = (("mixed", "rtn"), ("mixed", "awq+gptq+clip"), ("int5_g64_zp", "awq+gptq+clip"))
BUDGET, SEEDS = 5.0, (0, 1, 2)


def calibration(model, seed: int, sequences: int = SEQUENCES, length: int = LENGTH) -> Calibration:
    """Three parts code and one prose, other documents with another seed."""
    return library_calibration(model.tokenizer, length, sequences, seed)


def item_of(name: str, seed: int | None, limit: int) -> str:
    return f"{name}, seed {seed}, {limit} tokens a slice"


def record_of(
    trial: Trial, model, limit: int, seed: int | None = None, tokens: int | None = None, **details
) -> Record:
    """A trial as a record: what it lost, on how many bits, and its slices."""
    value, low, high = trial.kl()
    slices = {s: {"kl": trial.kl(s), "top1": trial.top1(s), "n": trial.tokens(s)} for s in SLICES}
    return Record(
        WHAT,
        value,
        "nats/token",
        n=trial.tokens(),
        low=low,
        high=high,
        seed=seed,
        model=model.name,
        revision=model.revision,
        dtype="float32",
        device=str(model.device),
        threads=torch.get_num_threads(),
        item=item_of(trial.name, seed, limit),
        details={
            "format": trial.name.split()[0],
            "method": trial.method,
            "bits": trial.bits,
            "calibration_tokens": tokens,
            "slices": slices,
            **details,
        },
    )


def mixed(trials: Trials, budget: float = BUDGET) -> dict[str, str]:
    """Formats by layer within `budget`: every matrix measured alone on calibration text of another seed."""
    model = trials.model
    pieces = [
        one for kind in SLICES for one in calibration_passages(model.tokenizer, kind, SEEDS[0] + 1)
    ]
    loss = PartLoss(model, pieces, parts_by_depth(model, len(model.layers)))
    return mixed_formats(loss, trials.statistics, budget)


def run(path, seeds=SEEDS, limit: int = 2048, name: str = "default", methods=CALIBRATED) -> None:
    """Every trial that the file does not hold yet, rounding first, then seed by seed."""
    model = load_model(name)
    trials = Trials(model, Text(model.tokenizer, limit, SLICES, overlap=0).items())
    with RecordWriter(path) as writer:

        def missing(format: str, method: str, seed: int | None) -> bool:
            return not writer.done(WHAT, item_of(f"{format} {method}", seed, limit))

        def add(
            format: str, method: str, seed: int | None, overrides=None, layerwise=None, **details
        ) -> None:
            said = f"{method}, layer by layer" if layerwise else method
            if missing(format, said, seed):
                base = "int4_g64_zp" if overrides else format
                name = f"{format} {said}"
                trial = trials.run(
                    base, method, name=name, overrides=overrides or {}, layerwise=layerwise
                )
                writer.write(record_of(trial, model, limit, seed, method=said, **details))
                print(f"{name}, seed {seed}", flush=True)

        for format in ROUNDED:
            add(format, "rtn", None)
        text_of = cache(lambda seed: calibration(model, seed))
        for seed in seeds:
            wanted = (*methods, *(AT_FIVE if seed == seeds[0] else ()))
            if not any(missing(format, method, seed) for format, method in wanted):
                continue
            text = text_of(seed)
            names = [
                n
                for n, m in model.layers.named_modules(prefix="layers")
                if isinstance(m, torch.nn.Linear)
            ]
            trials.statistics = collect(model, names, text, hidden_states)
            for format, method in methods:
                add(format, method, seed, tokens=text.tokens)
            if any(missing(format, method, seed) for format, method in wanted):
                formats = mixed(trials)
                for format, method in AT_FIVE:
                    chosen = formats if format == "mixed" else None
                    add(format, method, seed, chosen, tokens=text.tokens, formats=chosen)
        for seed in seeds:
            for format, method in LAYER_BY_LAYER:
                if missing(format, f"{method}, layer by layer", seed):
                    add(format, method, seed, layerwise=text_of(seed), tokens=text_of(seed).tokens)


if __name__ == "__main__":
    given = sys.argv[1:]
    run(
        given[0] if given else data_path(FILE),
        range(int(given[1]) if len(given) > 1 else 3),
        int(given[2]) if len(given) > 2 else 2048,
    )
