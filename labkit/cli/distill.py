"""`labkit distill`: train a draft of a model on its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.answer import Json, Model, Steps, Threads, answer, use_threads
from labkit.errors import BadRequest


def distill(
    output: Annotated[Path, typer.Argument(help="The .safetensors file to write; its checkpoint lies beside it.")],
    kind: Annotated[str, typer.Option(help="hidden_state (one layer) or medusa (heads).")] = "hidden_state",
    texts: Annotated[int, typer.Option(min=1, help="Answers to train on; there are prompts for about 6,600.")] = 6600,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 1600,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers a step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="The highest; it rises to it and falls to 0.")] = 1e-3,
    held_out: Annotated[int, typer.Option(min=1, max=64, help="Held-out prompts of each kind, for the score.")] = 16,
    model: Model = "default",
    seed: Annotated[int, typer.Option(help="Which prompts, and their order.")] = 1,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train a draft of a model on the model's own answers; a run that was stopped goes on when started again.

    \b
    Example:  labkit distill draft.safetensors
              labkit distill small.safetensors --texts 128 --steps 40
    Then:     labkit generate --prompt "Why is the sea salty?" --drafter draft.safetensors
    """
    if output.suffix != ".safetensors":
        raise BadRequest(f"{str(output)!r} is not a .safetensors file; choose such a name for the draft")
    from labkit.model.load import load_model
    from labkit.speculate.distill import Recipe
    from labkit.speculate.distill import distill as run_distill
    from labkit.speculate.fit import Training

    use_threads(threads)

    training = Training(steps=steps, tokens=tokens, learning_rate=learning_rate, warmup=min(20, steps), averaging=0.95,
                        every=max(1, steps // 20))  # fmt: skip
    recipe = Recipe(kind, texts, held_out, seed=seed, training=training)
    show = Steps()
    record = run_distill(
        load_model(model), output, recipe,
        on_answers=lambda done, jobs, said: show(f"answers: {done} of {jobs}, {said:,} tokens"),
        on_training=lambda p: show(f"step {p.step} of {p.steps}: loss {p.loss:.3f}, {p.seconds:.0f} s" + _scores(p.score)),
    )  # fmt: skip
    after = record["held_out"]["after"]
    result = {"ok": True, "file": output, "file_bytes": record["file_bytes"], "alpha": after, "alpha_before": record["held_out"]["before"],
              "texts": sum(record["prompts"].values()), "answer_tokens": record["answer_tokens"], "steps": steps,
              "answer_seconds": record["answer_seconds"], "training_seconds": record["training_seconds"]}  # fmt: skip
    answer(result, as_json, f"wrote {output}: {record['file_bytes']:,} B; on held-out prompts" + _scores(after))


def _scores(score: dict[str, float] | None) -> str:
    return "" if not score else ": alpha " + ", ".join(f"{kind} {value:.2f}" for kind, value in score.items())
