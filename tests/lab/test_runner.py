"""Test the runner on small notebooks; failures that nbclient ignores must be errors."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.errors import BadRequest
from labkit.lab.runner import run_notebooks
from labkit.lab.runner.client import StrictClient
from labkit.lab.runner.limits import Limits, NotebookFailure
from labkit.lab.runner.notebooks import check_notebook, find_notebooks
from labkit.lab.runner.progress import Progress

PARAMETERS = new_code_cell(
    'scale: str = "quick"  # quick | standard | full', metadata={"tags": ["parameters"]}
)
WRITE = """
import os, pathlib, json
folder = pathlib.Path(os.environ["LABKIT_RUN_DIR"])
record = {"what": "x", "value": 1, "unit": "", "machine": {}, "versions": {}}
(folder / "results.jsonl").write_text(json.dumps(record) + "\\n")
"""


def write_notebook(
    folder: Path, name: str, *sources: str, parameters=PARAMETERS, results=True, metadata=None
) -> Path:
    cells = [new_markdown_cell("# A notebook"), *([parameters] if parameters else [])]
    cells += [new_code_cell(source) for source in sources]
    if results:
        cells.append(new_code_cell(WRITE))
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=metadata or {}), path)
    return path


class Quiet:
    """A progress that stores the calls."""

    def __init__(self):
        self.seen = []

    def start(self, name):
        self.seen.append(name)

    def cell(self, number, of_how_many):
        self.seen.append((number, of_how_many))

    def end(self, error):
        self.seen.append(error)


@pytest.fixture
def run(tmp_path):
    """Runs the notebooks of `tmp_path`; results lie in `tmp_path/runs`."""

    def call(*names, **options):
        options.setdefault("progress", Quiet())
        return run_notebooks(names, folder=tmp_path, runs=tmp_path / "runs", **options)

    return call


def executed(tmp_path: Path, name: str) -> nbformat.NotebookNode:
    return nbformat.read(tmp_path / "runs" / "quick" / f"{name}.ipynb", as_version=4)


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


# ---- runs that succeed ------------------------------------------------------------------------------------


def test_a_run_leaves_notebook_results_and_no_temporary_file(tmp_path, run):
    write_notebook(
        tmp_path,
        "01_good",
        "import sys, os\nprint(sys.executable, scale, os.environ['LABKIT_STATIC'], os.environ['TQDM_DISABLE'])",
        "for _ in range(10_000):\n    print('.', end='', flush=True)\nprint('sentinel')",
        metadata={"kernelspec": {"name": "x_env", "display_name": "x", "language": "python"}},
    )
    progress = Quiet()
    report = run("01", scale="standard", progress=progress)
    assert report.ok, report.notebooks
    assert set(report.as_dict()) == {"ok", "seconds", "notebooks"}
    assert {"name", "ok", "seconds"} <= set(report.as_dict()["notebooks"][0])
    assert progress.seen[0] == "01_good" and progress.seen[-1] is None and (4, 4) in progress.seen
    notebook = nbformat.read(tmp_path / "runs" / "standard" / "01_good.ipynb", as_version=4)
    text = printed(notebook)
    assert text.startswith(f"{sys.executable} standard 1 1"), "whatever kernel the metadata names"
    assert "." * 10_000 + "sentinel" in text
    assert (tmp_path / "runs" / "01_good" / "standard" / "results.jsonl").exists()
    assert not list((tmp_path / "runs").rglob("*.partial*"))


def test_outputs_of_an_old_run_are_removed(tmp_path, run):
    path = write_notebook(tmp_path, "01_old", "x = 1")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].outputs = [new_output("error", ename="OldError", evalue="", traceback=[])]
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
    nbformat.write(notebook, path)
    assert run().ok
    assert not any(
        o.output_type == "error"
        for c in executed(tmp_path, "01_old").cells
        for o in c.get("outputs", ())
    )
    assert "widgets" not in executed(tmp_path, "01_old").metadata


def test_progress_is_printed_while_a_cell_runs():
    stream = io.StringIO()
    progress = Progress(stream, every_s=0.02)
    progress.start("01_x")
    progress.cell(2, 3)
    time.sleep(0.2)
    progress.end(None)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("01_x: starting") and lines[-1].startswith("01_x: done")
    assert sum(line.startswith("01_x: cell 2/3") for line in lines) >= 3


# ---- errors before anything runs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters_cell", "given", "sentence"),
    [
        (PARAMETERS, {"scael": "quick"}, "no parameter 'scael'; did you mean 'scale'"),
        (PARAMETERS, {"scale": 3}, "scale of 01_x.ipynb is 3; give a value of type str"),
        (None, {}, "has 0 cells tagged 'parameters'"),
        (
            new_code_cell("scale = 'quick'", metadata={"tags": ["parameters"]}),
            {},
            "name: type = constant",
        ),
        (
            new_code_cell("scale: str = f()", metadata={"tags": ["parameters"]}),
            {},
            "name: type = constant",
        ),
    ],
)
def test_parameters_that_a_notebook_would_ignore_are_errors(
    tmp_path, parameters_cell, given, sentence
):
    path = write_notebook(tmp_path, "01_x", parameters=parameters_cell)
    with pytest.raises(BadRequest, match=sentence.replace("(", r"\(")):
        check_notebook(path, given)


@pytest.mark.parametrize("tag", ["raises-exception", "skip-execution"])
def test_tags_that_hide_errors_or_cells_are_errors(tmp_path, tag):
    path = write_notebook(tmp_path, "01_x", "1 / 0")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].metadata["tags"] = [tag]
    nbformat.write(notebook, path)
    with pytest.raises(BadRequest, match=f"Cell 2 of 01_x.ipynb is tagged '{tag}'"):
        check_notebook(path, {})


def test_names_select_by_prefix_and_an_unknown_name_lists_the_notebooks(tmp_path):
    for name in ("01_a", "02_b", "10_c"):
        write_notebook(tmp_path, name)
    assert [path.stem for path in find_notebooks((), tmp_path)] == ["01_a", "02_b", "10_c"]
    assert [path.stem for path in find_notebooks(("10", "notebooks/01_a.ipynb"), tmp_path)] == [
        "01_a",
        "10_c",
    ]
    with pytest.raises(BadRequest, match="begins with '03'; choose from 01_a, 02_b, 10_c"):
        find_notebooks(("03",), tmp_path)
    with pytest.raises(BadRequest, match="begins with ''"):
        find_notebooks(("",), tmp_path)


def test_an_unknown_scale_is_an_error(run, tmp_path):
    write_notebook(tmp_path, "01_x")
    with pytest.raises(BadRequest, match="'quik' is unknown; choose one of quick, standard, full"):
        run(scale="quik")


def test_two_runs_cannot_write_to_one_folder(run, tmp_path):
    from filelock import FileLock

    write_notebook(tmp_path, "01_x")
    (tmp_path / "runs" / "quick").mkdir(parents=True)
    with (
        FileLock(tmp_path / "runs" / "quick" / ".lock"),
        pytest.raises(BadRequest, match="Another run writes"),
    ):
        run()


# ---- failures that nbclient does not report ------------------------------------------------------------------


def test_failures_are_named_and_the_other_notebooks_still_run(tmp_path, run):
    write_notebook(tmp_path, "01_raises", "print('before')", "raise ValueError('the reason')")
    write_notebook(tmp_path, "02_no_results", results=False)
    write_notebook(tmp_path, "03_ends_itself", "import sys\nsys.exit(0)")
    write_notebook(tmp_path, "04_good")
    stale = tmp_path / "runs" / "02_no_results" / "quick" / "results.jsonl"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}\n")
    report = run()
    assert not report.ok
    errors = {notebook.name: notebook.error for notebook in report.notebooks}
    assert "cell 3" in errors["01_raises"] and "ValueError: the reason" in errors["01_raises"]
    assert "no result file" in errors["02_no_results"], (
        "the result file of an older run must not count"
    )
    assert errors["03_ends_itself"]
    assert errors["04_good"] is None
    assert "before" in printed(executed(tmp_path, "01_raises")), "outputs so far are kept"


def test_a_kernel_that_dies_fails_the_run_in_seconds_and_keeps_the_outputs(tmp_path, run):
    write_notebook(
        tmp_path,
        "01_dies",
        "print('so far')",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    )
    began = time.monotonic()
    report = run()
    assert time.monotonic() - began < 30
    assert "lost its kernel" in report.notebooks[0].error and "cell 3" in report.notebooks[0].error
    assert "so far" in printed(executed(tmp_path, "01_dies"))


def test_a_notebook_is_stopped_at_its_time_limit(tmp_path, run):
    write_notebook(tmp_path, "01_slow", "import time\ntime.sleep(60)")
    began = time.monotonic()
    report = run(limits=Limits(seconds=4))
    assert time.monotonic() - began < 25
    assert (
        "cell 2 ('import time') was still running after the limit of 4 s"
        in report.notebooks[0].error
    )


def test_a_cell_that_prints_without_end_is_stopped_and_named(tmp_path, run):
    write_notebook(
        tmp_path, "01_floods", "print('first', flush=True)\nwhile True:\n    print('more')"
    )
    began = time.monotonic()
    report = run(limits=Limits(seconds=60))
    assert time.monotonic() - began < 40
    assert "cell 2" in report.notebooks[0].error and "300 lines" in report.notebooks[0].error
    assert 100 < printed(executed(tmp_path, "01_floods")).count("more") <= 300


def test_what_a_thread_prints_after_its_cell_is_kept_or_fails_the_run(tmp_path, run):
    write_notebook(
        tmp_path,
        "01_late",
        "import threading, time\n"
        "def late():\n    time.sleep(0.5)\n    print('late', flush=True)\n"
        "threading.Thread(target=late).start()",
        "time.sleep(1.5)",
    )
    error = run().notebooks[0].error  # ipykernel versions differ in which cell they count it to
    assert "after its end" in error if error else "late" in printed(executed(tmp_path, "01_late"))


def test_a_lost_message_is_a_failure(tmp_path, run, monkeypatch):
    write_notebook(tmp_path, "01_loses", "for piece in range(5):\n    print(piece, flush=True)")
    dropped = []
    original = StrictClient.async_start_new_kernel_client

    async def lossy(self, **options):
        client = await original(self, **options)
        watched = client.iopub_channel.get_msg

        async def get_msg(*args, **kwargs):
            message = await watched(*args, **kwargs)
            if (
                message["msg_type"] == "stream" and not dropped
            ):  # as if the socket had dropped it: nobody saw it
                dropped.append(message)
                self._received.discard(message["metadata"]["labkit_serial"])
                return await watched(*args, **kwargs)
            return message

        client.iopub_channel.get_msg = get_msg
        return client

    monkeypatch.setattr(StrictClient, "async_start_new_kernel_client", lossy)
    assert "lost 1 of its messages" in (run().notebooks[0].error or "")


# ---- many runs, kills --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_notebooks_in_one_process_leave_no_thread_behind(tmp_path, run):
    for number in range(10):
        write_notebook(tmp_path, f"{number:02}_x")
    run("00")
    before = (
        threading.active_count(),
        len(os.listdir("/proc/self/task")) if Path("/proc").exists() else 0,
    )
    assert run().ok
    after = (
        threading.active_count(),
        len(os.listdir("/proc/self/task")) if Path("/proc").exists() else 0,
    )
    assert after <= before


def start_cli(tmp_path: Path) -> subprocess.Popen:
    code = (
        "import signal, sys; from pathlib import Path; from labkit.lab.runner import run_notebooks\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell's job in the background ignores
        "folder = Path(sys.argv[1])\n"
        "report = run_notebooks(folder=folder, runs=folder / 'runs')\n"
        "sys.exit(0 if report.ok else 1)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.05)


def wait_until_gone(process_id: int) -> None:
    deadline, stat = time.monotonic() + 15, Path(f"/proc/{process_id}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the kernel outlives its runner"
        time.sleep(0.1)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_sigterm_ends_labkit_run_with_one_sentence_and_stops_the_kernel(tmp_path):
    marker = tmp_path / "at_work"
    (tmp_path / "notebooks").mkdir()
    write_notebook(
        tmp_path / "notebooks",
        "01_x",
        f"import os, pathlib, time\npathlib.Path({str(marker)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)",
    )
    command = [sys.executable, "-m", "labkit", "run", "01"]
    environment = os.environ | {"LABKIT_RUNS": str(tmp_path / "runs")}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for(marker)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "Traceback" not in errors, errors
    assert errors.splitlines()[-1] == "labkit: The run was ended by SIGTERM."
    wait_until_gone(int(marker.read_text()))


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_can_be_run_again(tmp_path, run, kill):
    marker = tmp_path / "at_work"
    write_notebook(
        tmp_path,
        "01_x",
        f"import os, pathlib, time\nm = pathlib.Path({str(marker)!r})\nagain = m.exists()\n"
        "m.write_text(str(os.getpid()))\nif not again:\n    time.sleep(60)",
    )
    process = start_cli(tmp_path)
    wait_for(marker)
    time.sleep(0.2)
    process.send_signal(kill)
    assert process.wait(timeout=30) != 0
    wait_until_gone(int(marker.read_text()))
    assert run().ok
    assert json.loads((tmp_path / "runs/01_x/quick/results.jsonl").read_text())["what"] == "x"


def test_the_failure_is_an_exception_of_its_own():
    assert not issubclass(NotebookFailure, BadRequest)
