"""Arithmetic on shapes: memory, time and break-even. Nothing here needs torch.

    plan.report("llama-3.1-8b", tokens=8192, sequences=4, recipe="int4", budget="16GiB")   # text for people
    plan.memory.plan(...)                                                                   # the same as a dict
"""


def report(model="default", tokens: int = 4096, sequences: int = 1, recipe: str | None = None,
           kv_format: str | None = None, budget: str | int | None = None) -> str:
    """The memory plan of a model as a table."""
    from labkit.plan.memory import plan, render
    return render(plan(model, tokens, sequences, recipe, kv_format, budget))
