"""Executing notebooks strictly: a run that says it is well, is.

    report = run_notebooks(["01"], scale="quick")
    report.ok, report.seconds, [(n.name, n.ok, n.seconds, n.error) for n in report.notebooks]

papermill executes; on top of it come the refusals of `labkit.runner.notebooks`, the checks of
`labkit.runner.client`, and, when the last cell has run: every cell did run, and the notebook wrote its
result file in this run, readable and not empty. A notebook at work lies under a temporary name and is
renamed at its end; it stays on failure, with the outputs so far. The lock is held by the operating system,
so that nothing is left to clear up after a kill.

    runs/SCALE/NN_name.ipynb                 the executed notebook
    runs/NN_name/SCALE/results.jsonl         its result file, runs/NN_name/SCALE/figures/ its figures
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from labkit.errors import BadRequest
from labkit.runner.limits import Limits, NotebookFailure


@dataclass(frozen=True)
class NotebookResult:
    """How one notebook ended; `error` is the sentence that says why it failed."""

    name: str
    ok: bool
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class RunReport:
    """How a run ended."""

    seconds: float
    notebooks: list[NotebookResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every notebook ran to its end and wrote its results."""
        return all(notebook.ok for notebook in self.notebooks)

    def as_dict(self) -> dict:
        """The keys of `labkit run --json`."""
        return {"ok": self.ok, **asdict(self)}


def run_notebooks(
    names: Sequence[str] = (),
    scale: str = "quick",
    *,
    parameters: Mapping[str, object] | None = None,
    folder: Path | None = None,
    runs: Path | None = None,
    limits: Limits | None = None,
    progress=None,
) -> RunReport:
    """Execute the notebooks that begin with `names` (all without) at `scale`, one after another.

    `parameters` go to every notebook chosen and must be known to each. A notebook that fails does not stop
    the others. Raises `BadRequest`, before anything runs, for names, parameters or notebooks that cannot work.
    """
    from filelock import FileLock, Timeout

    from labkit.runner.notebooks import SCALES, check_notebook, find_notebooks, runs_folder
    from labkit.runner.progress import Progress

    if scale not in SCALES:
        raise BadRequest(f"scale {scale!r} is unknown; choose one of {', '.join(SCALES)}")
    parameters = {"scale": scale, **(parameters or {})}
    paths = find_notebooks(names, folder)
    notebooks = {path: check_notebook(path, parameters) for path in paths}
    runs = Path(runs).resolve() if runs is not None else runs_folder()
    (runs / scale).mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results = []
    try:
        with FileLock(runs / scale / ".lock", timeout=0):
            for path in paths:
                results.append(_run_one(path, notebooks[path], parameters, runs, scale, limits, progress or Progress()))
    except Timeout:
        raise BadRequest(
            f"another run is writing to {runs / scale}; wait for it, or set LABKIT_RUNS to another folder"
        ) from None
    return RunReport(round(time.perf_counter() - began, 3), results)


def _run_one(path, notebook, parameters, runs, scale, limits, progress) -> NotebookResult:
    """Execute one notebook that was found in order."""
    run_dir = runs / path.stem / scale
    (run_dir / "figures").mkdir(parents=True, exist_ok=True)
    (run_dir / "results.jsonl").unlink(missing_ok=True)  # what stands there afterwards is of this run
    progress.start(path.stem)
    began, error = time.perf_counter(), "interrupted"
    try:
        _execute(path, notebook, parameters, runs, scale, limits or Limits(), progress.cell)
        _check_results(run_dir / "results.jsonl")
        error = None
    except NotebookFailure as failure:
        error = str(failure)
    finally:
        progress.end(error)
    return NotebookResult(path.stem, error is None, round(time.perf_counter() - began, 3), error)


def _execute(path, notebook, parameters, runs, scale, limits, on_cell) -> None:
    import papermill
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    from labkit.runner.client import StrictEngine
    from labkit.runner.notebooks import code_cells

    papermill_engines.register("labkit", StrictEngine)
    final, partial = runs / scale / path.name, runs / scale / f".{path.stem}.partial.ipynb"
    try:
        executed = papermill.execute_notebook(
            notebook, str(partial).replace("{", "{{").replace("}", "}}"),  # papermill formats paths
            parameters=dict(parameters), engine_name="labkit", kernel_name="python3", language="python",
            progress_bar=False, cwd=str(path.parent), limits=limits, on_cell=on_cell,
            environment=_environment(path, runs / path.stem / scale),
        )  # fmt: skip
        for number, index in enumerate(code_cells(executed), 1):
            if executed.cells[index].source.strip() and executed.cells[index].execution_count is None:
                raise NotebookFailure(f"cell {number} did not run: the notebook ended itself before it")
    except PapermillExecutionError as error:
        raise NotebookFailure(f"a cell raised {error.ename}: {error.evalue}") from None
    finally:
        if partial.exists():
            os.replace(partial, final)


def _environment(path: Path, run_dir: Path) -> dict[str, str]:
    """What the kernel inherits: this environment, labkit importable, and the marks of a static run."""
    here = str(Path(__file__).parents[2])
    python_path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return {
        **os.environ, "PYTHONPATH": python_path, "LABKIT_NOTEBOOK": str(path), "LABKIT_RUN_DIR": str(run_dir),
        "LABKIT_STATIC": "1", "TQDM_DISABLE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }  # fmt: skip


def _check_results(path: Path) -> None:
    from labkit.measure.record import read_records

    if not path.exists():
        raise NotebookFailure(f"it ran to its end but wrote no result file {path.name}")
    try:
        records = list(read_records(path))
    except ValueError as error:
        raise NotebookFailure(f"its result file {path.name} is not readable: {error}") from None
    if not records:
        raise NotebookFailure(f"its result file {path.name} is empty")
