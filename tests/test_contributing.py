"""The four recipes of CONTRIBUTING.md work as they are printed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## Add a (?:number )?(\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def blocks(recipe: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", SECTIONS[recipe], re.M | re.S)


@pytest.fixture
def registries():
    """The registries that the recipes add to; what a recipe adds is removed after its test."""
    import labkit.cache
    import labkit.formats.names
    import labkit.formats.tensor
    import labkit.lab.evals
    import labkit.speculate

    places = {
        "CACHES": labkit.cache,
        "DRAFTERS": labkit.speculate,
        "FLOATS": labkit.formats.names,
        "CODECS": labkit.formats.tensor,
        "TASKS": labkit.lab.evals,
    }
    tables = {name: getattr(module, name) for name, module in places.items()}
    before = {name: dict(table) for name, table in tables.items()}
    yield tables
    for name, table in tables.items():
        table.clear()
        table.update(before[name])


def run(recipe: str, namespace: dict) -> dict:
    for block in blocks(recipe):
        exec(compile(block, f"CONTRIBUTING.md: {recipe}", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("recipe", ["cache", "drafter", "format"])
def test_a_recipe_works_as_printed(recipe, registries, capsys):
    assert len(blocks(recipe)) >= 3
    run(recipe, dict(registries))


def test_the_task_recipe_works_as_printed(registries, monkeypatch):
    from fakes import byte_model_of
    from labkit.lab.evals import make_task
    from labkit.lab.evals.task import run as run_task

    module = types.ModuleType("labkit.lab.evals.copying")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    new_file, line = blocks("task")
    exec(compile(new_file, "copying.py", "exec"), module.__dict__)
    exec(line, dict(registries))
    model = byte_model_of()
    task = make_task("copying", model, limit=3)
    scores = run_task(task, model)
    assert [score.item for score in scores] == ["0", "1", "2"]
    assert all(score.metrics["exact"][1] == 1.0 for score in scores)


def test_the_rule_that_the_page_adds_is_a_cache_like_the_others(registries):
    namespace = run("cache", dict(registries))
    from labkit.cache import make_cache

    model = namespace["model"]
    cache = make_cache("newest", model.config.kv_shape)
    assert type(cache).__name__ == "Newest" and cache.length == 0
