"""Every exercise has a check, a solution, a difficulty and minutes; untouched cells are quiet; solutions pass."""

import ast
import importlib
import re
from pathlib import Path

import jupytext
import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks" / "scripts").glob("[0-9][0-9]_*.py"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def checks_of(path):
    """The module that the notebook imports as `exercises`."""
    name = re.search(
        r"from (labkit_course\.checks) import (\w+) as exercises", path.read_text("utf-8")
    )
    return importlib.import_module(f"{name[1]}.{name[2]}")


def exercise_cells(path):
    """(text before, the exercise's code, text after) of each cell tagged `exercise`."""
    cells = jupytext.read(path, fmt="py:percent").cells
    return [
        (cells[i - 1].source, cell.source, cells[i + 1].source)
        for i, cell in enumerate(cells)
        if "exercise" in cell.metadata.get("tags", ())
    ]


@each_notebook
def test_each_exercise_says_how_hard_and_how_long_and_folds_its_solution(path):
    assert exercise_cells(path)
    for before, _, after in exercise_cells(path):
        assert re.search(r"\| difficulty \| minutes \|\n\|---\|---\|\n\| \w+ \| \d+ \|", before)
        assert after.startswith("<details><summary>Solution</summary>") and "</details>" in after


@each_notebook
def test_an_untouched_exercise_says_so_and_does_not_stop_the_run(path, capsys):
    for _, code, _ in exercise_cells(path):
        exec(code, {"exercises": checks_of(path), "torch": torch})
        assert "not attempted" in capsys.readouterr().out


@each_notebook
def test_solutions_in_code_pass_their_own_check(path, capsys):
    for _, code, after in exercise_cells(path):
        solution = re.search(r"```python\n(.*?)```", after, re.DOTALL)
        if solution:
            names = {"exercises": checks_of(path), "torch": torch}
            exec(solution[1], names)
            check = ast.unparse(ast.parse(code).body[-1])
            assert check.startswith("exercises.check_")
            exec(check, names)
            assert capsys.readouterr().out.rstrip().endswith("passed")


@each_notebook
def test_the_minutes_of_the_exercises_are_those_of_the_title(path):
    minutes = sum(
        int(re.search(r"\| \w+ \| (\d+) \|", before)[1]) for before, _, _ in exercise_cells(path)
    )
    title = jupytext.read(path, fmt="py:percent").cells[0].source
    assert f"{minutes} minutes of exercises" in title
