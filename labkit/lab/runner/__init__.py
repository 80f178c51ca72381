"""Execute notebooks strictly: a run that reports success did succeed.

    report = run_notebooks(["01"], scale="quick")
    report.ok, report.seconds, [(n.name, n.ok, n.seconds, n.error) for n in report.notebooks]

1. `labkit.lab.runner.notebooks` checks names and parameters.
2. papermill inserts the parameters.
3. `labkit.lab.runner.client` executes the notebook and watches output and limits.
4. Every cell must have run, and the notebook must have written its result file.

The executed notebook is saved even after a failure, with the outputs so far. A run
locks its folder. The operating system releases the lock when the process ends, so a
killed run needs no cleaning up.

    runs/SCALE/NN_name.ipynb            the executed notebook
    runs/NN_name/SCALE/results.jsonl    its result file
    runs/NN_name/SCALE/figures/         its figures
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from labkit.errors import BadRequest
from labkit.lab.runner.limits import Limits, NotebookFailure


@dataclass(frozen=True)
class NotebookResult:
    """The result of one notebook; `error` says why it failed, or is None."""

    name: str
    ok: bool
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class RunReport:
    """The result of a run."""

    seconds: float
    notebooks: list[NotebookResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every notebook ran to its end and wrote its results."""
        return all(notebook.ok for notebook in self.notebooks)

    def as_dict(self) -> dict:
        """Return the keys of `labkit run --json`."""
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
    """Execute the notebooks whose names begin with `names` (default: all) in order.

    Every chosen notebook gets all `parameters` and must have a default for each. A
    notebook that fails does not stop the others. Raises BadRequest before anything runs
    if a name, a parameter or a notebook is not valid.
    """
    from filelock import FileLock, Timeout

    from labkit.lab.runner.notebooks import SCALES, check_notebook, find_notebooks, runs_folder
    from labkit.lab.runner.progress import Progress

    if scale not in SCALES:
        raise BadRequest(f"Scale {scale!r} is unknown; choose one of {', '.join(SCALES)}.")
    parameters = {"scale": scale, **(parameters or {})}
    paths = find_notebooks(names, folder)
    notebooks = {path: check_notebook(path, parameters) for path in paths}
    runs = Path(runs).resolve() if runs is not None else runs_folder()
    (runs / scale).mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    run = _Run(runs, scale, parameters, limits or Limits(), progress or Progress())
    try:
        with FileLock(runs / scale / ".lock", timeout=0):
            results = [run.one(path, notebook) for path, notebook in notebooks.items()]
    except Timeout:
        fix = "wait for it, or set LABKIT_RUNS to another folder"
        raise BadRequest(f"Another run writes to {runs / scale}; {fix}.") from None
    return RunReport(round(time.perf_counter() - began, 3), results)


@dataclass(frozen=True)
class _Run:
    runs: Path
    scale: str
    parameters: Mapping[str, object]
    limits: Limits
    progress: object

    def one(self, path: Path, notebook) -> NotebookResult:
        """Execute a checked notebook and check its results."""
        from papermill.parameterize import parameterize_notebook

        run_dir = self.runs / path.stem / self.scale
        (run_dir / "figures").mkdir(parents=True, exist_ok=True)
        results = run_dir / "results.jsonl"
        results.unlink(missing_ok=True)  # a file that exists later is of this run
        self.progress.start(path.stem)
        began, error = time.perf_counter(), "interrupted"
        try:
            language = {"kernel_name": "python3", "language": "python"}
            notebook = parameterize_notebook(notebook, dict(self.parameters), **language)
            self.execute(path, notebook, run_dir)
            _check_results(results)
            error = None
        except NotebookFailure as failure:
            error = str(failure)
        finally:
            self.progress.end(error)
        seconds = round(time.perf_counter() - began, 3)
        return NotebookResult(path.stem, error is None, seconds, error)

    def execute(self, path: Path, notebook, run_dir: Path) -> None:
        import nbformat

        from labkit.lab.runner.client import StrictClient
        from labkit.lab.runner.notebooks import code_cells

        client = StrictClient(notebook, str(path.parent), self.limits, self.progress.cell)
        final = self.runs / self.scale / path.name
        partial = final.with_name(f".{path.stem}.partial.ipynb")
        try:
            client.execute(env=_environment(path, run_dir))
        finally:
            nbformat.write(notebook, partial)
            os.replace(partial, final)
        for number, index in enumerate(code_cells(notebook), 1):
            cell = notebook.cells[index]
            if cell.source.strip() and cell.execution_count is None:
                raise NotebookFailure(f"cell {number} did not run; the notebook ended before it")


def _environment(path: Path, run_dir: Path) -> dict[str, str]:
    """Return the kernel's environment, in which labkit and its course can be imported."""
    here = str(Path(__file__).parents[3])
    folders = [here, os.path.join(here, "notebooks"), os.environ.get("PYTHONPATH")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "LABKIT_NOTEBOOK": str(path),
        "LABKIT_RUN_DIR": str(run_dir),
        "LABKIT_STATIC": "1",
        "TQDM_DISABLE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def _check_results(path: Path) -> None:
    from labkit.lab.measure.record import read_records

    if not path.exists():
        raise NotebookFailure(f"it wrote no result file {path.name}")
    try:
        if not list(read_records(path)):
            raise NotebookFailure(f"its result file {path.name} is empty")
    except ValueError as error:
        raise NotebookFailure(f"its result file {path.name} is not readable: {error}") from None
