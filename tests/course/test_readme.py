"""The README does what it says: its ten lines run, its commands and variables exist, its links lead somewhere."""

import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
QUICKSTART = next(text for kind, text in BLOCKS if kind == "python")
INLINE = [
    " ".join(code.split())
    for code in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S))
]
LINES = [
    line.split("#")[0].strip() for kind, text in BLOCKS if kind == "" for line in text.splitlines()
]
COMMANDS = [code.removeprefix(".venv/bin/") for code in [*INLINE, *LINES]]


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_quickstart_is_ten_lines_and_imports_what_exists():
    assert len([line for line in QUICKSTART.splitlines() if line.strip()]) <= 10
    for node in ast.walk(ast.parse(QUICKSTART)):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                assert hasattr(importlib.import_module(node.module), name.name), (
                    node.module,
                    name.name,
                )


@pytest.mark.slow
@pytest.mark.real_model
def test_the_quickstart_runs_and_says_what_the_readme_says(capsys):
    exec(compile(QUICKSTART, "README.md", "exec"), {})
    without, with_cache, kv = capsys.readouterr().out.splitlines()
    assert without.split(", ", 1)[1] == with_cache.split(", ", 1)[1]
    assert int(kv.split()[0]) > 0


def test_make_targets_and_variables_are_the_makefiles():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("make ")]
    assert ["lab"] in used and ["test"] in used
    for word in {word for words in used for word in words}:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^#\s+{name}=" if is_variable else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), word


def test_labkit_commands_and_options_exist():
    import typer

    from labkit.lab.cli.app import app

    group = typer.main.get_command(app)
    used = [shlex.split(command)[1:] for command in COMMANDS if re.match(r"labkit \w", command)]
    assert {words[0] for words in used} >= {"run", "pull", "doctor"}
    for name, *rest in used:
        assert name in group.commands, name
        command = group.commands[name]
        if hasattr(command, "commands"):  # bench decode, bench speculate ...
            command = command.commands[rest[0]]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in rest if word.startswith("--")} <= known, (name, rest)


def test_every_notebook_stands_in_the_table_with_its_minutes():
    rows = dict(
        re.findall(r"^\| \[[^\]]+\]\(notebooks/(\w+)\.ipynb\) \|(.*)\|$", README, re.MULTILINE)
    )
    assert set(rows) == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    for stem, row in rows.items():
        read, run, exercises = (cell.strip() for cell in row.split("|")[1:])
        title = "".join(
            json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text("utf-8"))["cells"][0][
                "source"
            ]
        )
        runs = f"{run} minute" + "s" * (run != "1")
        assert f"{read} minutes reading, {runs} running at `quick`, {exercises} minutes" in title, (
            stem
        )


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_the_figure_has_a_description():
    pictures = re.findall(r"!\[([^\]]*)\]\(", README)
    assert pictures and all(len(alt.split()) >= 6 for alt in pictures)


def test_windows_needs_three_lines():
    block = README.split("**Windows.**")[1].split("```")[1]
    assert len(block.strip().splitlines()) == 3
    assert re.search(
        r"^name: labkit$", (ROOT / "environment.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
