"""`labkit distill`: train a draft of a model on its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from labkit.errors import BadRequest
from labkit.lab.cli.answer import Json, Model, Steps, Threads, answer, use_threads


def distill(
    output: Annotated[Path, Argument(help="The .safetensors file to write.")],
    kind: Annotated[str, Option(help="hidden_state or medusa.")] = "hidden_state",
    texts: Annotated[int, Option(min=1, help="Answers to train on; up to 6,600.")] = 6600,
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 1600,
    tokens: Annotated[int, Option(min=1, help="Answer tokens per step.")] = 1024,
    learning_rate: Annotated[float, Option(help="The peak learning rate.")] = 1e-3,
    held_out: Annotated[int, Option(min=1, max=64, help="Held-out prompts per kind.")] = 16,
    model: Model = "default",
    seed: Annotated[int, Option(help="Chooses the prompts and their order.")] = 1,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train a draft of a model on the model's own answers.

    A stopped run continues when it is started again.

    \b
    Example:  labkit distill draft.safetensors
              labkit distill small.safetensors --texts 128 --steps 40
    Then:     labkit generate --prompt "Why is the sea salty?" --drafter
    draft.safetensors
    """
    if output.suffix != ".safetensors":
        raise BadRequest(f"The file is {str(output)!r}; give a name that ends in .safetensors")
    from labkit.lab.distill.distill import Recipe
    from labkit.lab.distill.distill import distill as run_distill
    from labkit.lab.distill.train import Training
    from labkit.lab.stack.open import load_model

    use_threads(threads)
    pace = {"warmup": min(20, steps), "averaging": 0.95, "every": max(1, steps // 20)}
    training = Training(steps=steps, tokens=tokens, learning_rate=learning_rate, **pace)
    recipe = Recipe(kind, texts, held_out, seed=seed, training=training)
    show = Steps()

    def on_answers(done: int, jobs: int, tokens: int) -> None:
        show(f"answers: {done} of {jobs}, {tokens:,} tokens")

    def on_training(p) -> None:
        place = f"step {p.step} of {p.steps}: loss {p.loss:.3f}, {p.seconds:.0f} s"
        show(place + _scores(p.score))

    show_both = {"on_answers": on_answers, "on_training": on_training}
    record = run_distill(load_model(model), output, recipe, **show_both)
    after = record["held_out"]["after"]
    keys = ("file_bytes", "answer_tokens", "answer_seconds", "training_seconds")
    result = {key: record[key] for key in keys} | {
        "ok": True,
        "file": output,
        "alpha": after,
        "alpha_before": record["held_out"]["before"],
        "texts": sum(record["prompts"].values()),
        "steps": steps,
    }
    text = f"wrote {output}: {record['file_bytes']:,} B; on held-out prompts{_scores(after)}"
    answer(result, as_json, text)


def _scores(score: dict[str, float] | None) -> str:
    scores = [f"{kind} {value:.2f}" for kind, value in (score or {}).items()]
    return f": alpha {', '.join(scores)}" if scores else ""
