"""Every notebook of the lab: paired with its script, of one form, small, and readable without seeing it."""

import ast
import re
import sys
from pathlib import Path

import nbformat
import pytest

from labkit.lab.runner.notebooks import check_notebook, read_parameters, tags
from labkit_course.start import WATCHED, bootstrap, project_address
from labkit_course.sync import badges, cells_of, differs, read_script, sync

FOLDER = Path(__file__).parents[2] / "notebooks"
SCRIPTS = sorted((FOLDER / "scripts").glob("[0-9][0-9]_*.py"))
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))

scripts = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_text(cell) -> str:
    """The source that Python reads: IPython's own lines (%magic, !command) left out."""
    return re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.MULTILINE)


def names_read(source: str) -> set[str]:
    return {
        n.id
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }


# ---- the form of each ------------------------------------------------------------------------------------------


def test_every_script_has_its_notebook_and_every_notebook_its_script():
    assert [path.stem for path in SCRIPTS] == [path.stem for path in NOTEBOOKS]


@scripts
def test_the_pair_says_the_same(path):
    assert not differs(path), f"{path.name} and its .ipynb differ; run python -m labkit_course sync"


@scripts
def test_it_opens_with_a_title_cell(path):
    title = read_script(path).cells[0]
    assert title.cell_type == "markdown"
    assert len(re.findall(r"^# ", title.source, re.MULTILINE)) == 1, "one H1"
    others = "\n".join(
        cell.source for cell in read_script(path).cells[1:] if cell.cell_type == "markdown"
    )
    assert not re.search(r"^# ", others, re.MULTILINE), "and none after it"
    assert "minutes" in title.source.lower() and "memory" in title.source.lower()
    assert badges(path.stem) in title.source, "badges are generated: python -m labkit_course sync"


@scripts
def test_the_bootstrap_cell_is_the_one_of_all(path):
    cell = read_script(path).cells[1]
    assert cell.cell_type == "code" and tags(cell) == ["bootstrap"]
    assert cell.source == bootstrap()


@scripts
def test_parameters_come_annotated_in_one_cell_before_any_use(path):
    notebook = read_script(path)
    parameters = read_parameters(notebook, path.name)
    assert parameters["scale"] == "quick" and {"model", "device", "threads"} <= set(parameters)
    for cell in code(notebook)[1:]:
        if "parameters" in tags(cell):
            return
        assert not set(parameters) & names_read(code_text(cell))


@scripts
def test_lines_and_cells_are_short(path):
    for number, cell in enumerate(read_script(path).cells, 1):
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert len(lines) <= 25, f"cell {number} has {len(lines)} lines"
            assert all(len(line) <= 88 for line in lines), (
                f"cell {number} has a line over 88 columns"
            )
            ast.parse(code_text(cell))


@scripts
def test_it_ends_by_writing_its_results(path):
    last = code(read_script(path))[-1].source
    assert "closing.write" in last and "results.jsonl" in last


@scripts
def test_it_uses_the_lab_and_does_not_redefine_it(path):
    source = "\n".join(code_text(cell) for cell in code(read_script(path))[1:])
    assert "from labkit" in source
    defined = [n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
    assert not set(defined) & {"KVCache", "ContiguousCache", "Decoder", "Sampling"}


# ---- what is committed -----------------------------------------------------------------------------------------


@notebooks
def test_it_is_small_without_widget_state_and_from_no_ones_machine(path):
    assert path.stat().st_size <= 300_000
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    assert "papermill" not in notebook.metadata
    assert "widget-view" not in path.read_text(encoding="utf-8")
    check_notebook(path, {})


@notebooks
def test_it_carries_the_outputs_of_a_run_without_an_error(path):
    cells = [cell for cell in code(nbformat.read(path, as_version=4)) if cell.source.strip()]
    assert all(cell.execution_count for cell in cells), (
        "run `labkit run`, then python -m labkit_course sync --outputs"
    )
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


@notebooks
def test_every_figure_has_words_for_those_who_do_not_see_it(path):
    for number, cell in enumerate(code(nbformat.read(path, as_version=4)), 1):
        for output in cell.outputs:
            check_alt(output, f"code cell {number}")


def check_alt(output, where: str) -> None:
    data, metadata = output.get("data", {}), output.get("metadata", {})
    for kind in data:
        if kind.startswith("image/"):
            alt = metadata.get(kind, {}).get("alt") or metadata.get("alt") or ""
            assert len(alt) >= 20, f"{where} shows an image without a description"
    for image in re.findall(r"<img\b[^>]*>", "".join(data.get("text/html", ""))):
        assert re.search(r'alt="[^"]{20,}"', image), f"{where} shows an image without a description"


# ---- the checks and the sync themselves ------------------------------------------------------------------------

SCRIPT = """\
# %% [markdown]
# # A title
# <!-- badges -->
# <!-- /badges -->

# %% tags=["bootstrap"]
"old"

# %% tags=["parameters"]
scale: str = "quick"

# %%
print(1)
"""


def test_sync_writes_bootstrap_and_badges_once_and_keeps_outputs(tmp_path):
    script = tmp_path / "scripts" / "01_x.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    assert differs(script)
    assert [path.name for path in sync(tmp_path)] == ["01_x.py", "01_x.ipynb"]
    assert not differs(script) and sync(tmp_path) == []
    cells = read_script(script).cells
    assert cells[1].source == bootstrap() and badges("01_x") in cells[0].source
    pair = tmp_path / "01_x.ipynb"
    notebook = nbformat.read(pair, as_version=4)
    notebook.cells[3].outputs = [nbformat.v4.new_output("stream", text="1\n")]
    nbformat.write(notebook, pair)
    script.write_text(script.read_text().replace("# # A title", "# # Another title"))
    sync(tmp_path)
    assert nbformat.read(pair, as_version=4).cells[3].outputs[0].text == "1\n"
    script.write_text(script.read_text().replace("print(1)", "print(2)"))
    sync(tmp_path)
    assert nbformat.read(pair, as_version=4).cells[3].outputs == [], (
        "an output of other source is not its output"
    )


def test_sync_takes_outputs_of_a_run_without_its_marks(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "01_x.py").write_text(SCRIPT)
    sync(tmp_path)
    ran = nbformat.read(tmp_path / "01_x.ipynb", as_version=4)
    ran.cells.insert(
        3, nbformat.v4.new_code_cell('scale = "quick"', metadata={"tags": ["injected-parameters"]})
    )
    view = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
        "text/plain": "IntSlider()",
    }
    ran.cells[4].outputs = [
        nbformat.v4.new_output("display_data", view),
        nbformat.v4.new_output("stream", text="1\n"),
    ]
    ran.cells[4].execution_count = 4
    ran.metadata["papermill"], ran.metadata["widgets"] = {"output_path": "/home/x"}, {"state": {}}
    (tmp_path / "runs").mkdir()
    nbformat.write(ran, tmp_path / "runs" / "01_x.ipynb")
    sync(tmp_path, outputs=tmp_path / "runs")
    notebook = nbformat.read(tmp_path / "01_x.ipynb", as_version=4)
    assert cells_of(notebook) == cells_of(read_script(tmp_path / "scripts" / "01_x.py"))
    assert [output.output_type for output in notebook.cells[3].outputs] == ["stream"]
    assert "papermill" not in notebook.metadata and "widgets" not in notebook.metadata
    assert sync(tmp_path, outputs=tmp_path / "elsewhere") == [], "it did not run; outputs stay"


def test_a_tag_alone_makes_a_pair_differ(tmp_path):
    script = tmp_path / "scripts" / "01_x.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    sync(tmp_path)
    script.write_text(
        script.read_text().replace("# %%\nprint(1)", '# %% tags=["exercise"]\nprint(1)')
    )
    assert differs(script)


def test_an_image_without_words_is_found():
    image = nbformat.v4.new_output(
        "display_data", {"image/png": "aGk="}, metadata={"image/png": {"alt": ""}}
    )
    with pytest.raises(AssertionError):
        check_alt(image, "a cell")
    image.metadata["image/png"]["alt"] = "a curve that rises from left to right"
    check_alt(image, "a cell")


# ---- the bootstrap cell ----------------------------------------------------------------------------------------


def test_the_bootstrap_cell_is_short_heard_and_before_torch():
    text = bootstrap()
    assert len(text.splitlines()) <= 25 and max(map(len, text.splitlines())) <= 88
    assert project_address() in text
    assert "import torch" not in text and "-q" not in text and "DEVNULL" not in text
    assert all(name in text for name in WATCHED)


@pytest.mark.parametrize("checkout", [True, False])
def test_the_bootstrap_cell_installs_labkit_and_keeps_what_is_loaded(
    checkout, tmp_path, monkeypatch, capsys
):
    """Run as in a fresh session: labkit is not found, and pip is a stand-in."""
    import importlib.util
    import subprocess

    commands = []

    class Pip:
        returncode = 0

        def __init__(self, command, **options):
            commands.append(command)
            self.stdout = ["Collecting …\n"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    if checkout:
        (tmp_path / "labkit").mkdir()
        (tmp_path / "labkit" / "__init__.py").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "Popen", Pip)
    exec(compile(bootstrap(), "bootstrap", "exec"), {})
    (command,) = commands
    if checkout:
        assert command[-2:] == ["-e", str(tmp_path)]
        assert {str(tmp_path), str(tmp_path / "notebooks")} <= set(sys.path)
    else:
        assert command[-1] == f"git+{project_address()}"
    pins = Path(command[command.index("-c") + 1]).read_text()
    from importlib.metadata import version

    assert f"torch=={version('torch')}\n" in pins and f"numpy=={version('numpy')}\n" in pins
    assert "Collecting" in capsys.readouterr().out


def test_a_loaded_library_that_changed_on_disk_asks_for_a_restart(monkeypatch):
    import numpy

    from labkit.errors import BadRequest
    from labkit_course.start import begin

    monkeypatch.setattr(numpy, "__version__", "0.0.1")
    with pytest.raises(BadRequest, match="numpy changed on disk .* restart"):
        begin()


def test_begin_prints_what_a_reader_needs(tmp_path, monkeypatch, capsys):
    from labkit_course.start import begin

    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "01_x.py").write_text(
        SCRIPT.replace("# # A title", "# # A title\n# | Time | **20 minutes** reading |")
    )
    sync(tmp_path)
    monkeypatch.setenv("LABKIT_NOTEBOOK", str(tmp_path / "01_x.ipynb"))
    begin()
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("machine", "device", "versions", "torch"))
    assert "minutes   20 minutes reading" in printed
