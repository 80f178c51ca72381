"""Judge samples: one grader process each, several at once, in the best isolation that works here.

    check(Sample(code, test, "f"))     a Verdict: passed, failed, or could not run
    check_all(samples)                 verdicts in order, as many at once as there are cores

A grader is started with `subprocess`, never by a fork of this process, which has threads and
perhaps a GPU. The verdict comes back over the grader's own pipe, to which no untrusted process has
access. Cost: two interpreters per sample, about 0.1 s.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from labkit.errors import Number, check_fields
from labkit.lab.evals.sandbox.isolation import (
    ALLOW,
    BUBBLEWRAP,
    Isolation,
    SandboxUnavailable,
    start,
)

GRADER = Path(__file__).with_name("grader.py")
START_S = 60.0  # for both processes to start on a busy machine, beside the sample's own time
PASSED, FAILED, COULD_NOT_RUN = "passed", "failed", "could not run"


@dataclass(frozen=True)
class Sample:
    """Untrusted `code` that defines `entry_point`, and the trusted `test` that judges it.

    `test` defines check(candidate); `setup` is trusted code that it needs. The tests run in
    another process than the code; `candidate` calls across, and arguments and results travel as
    data (numbers, text, lists, dictionaries ...).
    """

    code: str
    test: str
    entry_point: str
    setup: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of one sample.

    `timeout_s` is wall-clock time from when it may run, `memory_mb` is per process, and
    `processes` counts threads too.
    """

    timeout_s: float = 5.0
    memory_mb: int = 512
    scratch_mb: int = 16
    output_mb: int = 1
    processes: int = 8
    files: int = 64

    def __post_init__(self):
        check_fields(self, **dict.fromkeys(asdict(self), Number(above=0)))


@dataclass(frozen=True)
class Verdict:
    """`kind` of a failure: assertion, exception, timeout, memory, output or exit.

    `seconds` include the start.
    """

    outcome: str
    kind: str | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool | None:
        """None if it could not run: neither right nor wrong."""
        return None if self.outcome == COULD_NOT_RUN else self.outcome == PASSED


def check(
    sample: Sample, limits: Limits | None = None, isolation: Isolation | None = None
) -> Verdict:
    """Judge one sample. Raises SandboxUnavailable if no isolation may be used here."""
    return check_all([sample], limits, isolation, workers=1)[0]


@cache
def _found() -> Isolation:
    """Return the best isolation that works here, as a trial shows and not a version number."""
    if shutil.which("bwrap") is None:
        linux = sys.platform == "linux"
        reason = "bubblewrap is not installed" if linux else "bubblewrap needs Linux"
        return Isolation("limits", reason)
    test = "def check(candidate):\n    assert candidate() == 1\n"
    verdict = check(Sample("def f():\n    return 1\n", test, "f"), isolation=BUBBLEWRAP)
    if verdict.passed:
        return BUBBLEWRAP
    return Isolation("limits", f"bubblewrap cannot start here: {verdict.message}")


def best_isolation() -> Isolation:
    """Return the best isolation that works here.

    Raises SandboxUnavailable if it is weak and LABKIT_UNSAFE_SANDBOX does not allow that.
    """
    isolation = _found()
    if isolation.weak and os.environ.get(ALLOW, "") not in ("1", "yes", "true"):
        raise SandboxUnavailable(
            f"Generated code is not run here, because {isolation.why}; install bubblewrap, or set "
            f"{ALLOW}=1 to run it with limits only, if you accept that it can reach the network "
            "and your files."
        )
    return isolation


def check_all(
    samples: Sequence[Sample],
    limits: Limits | None = None,
    isolation: Isolation | None = None,
    workers: int | None = None,
    progress: Callable[[int, Verdict], object] = lambda index, verdict: None,
) -> list[Verdict]:
    """Judge all samples, `workers` at once (None: one per core).

    `progress(index, verdict)` is called for each as soon as it is known.
    """
    limits, isolation = limits or Limits(), isolation or best_isolation()
    cancelled = threading.Event()

    def one(index: int) -> Verdict:
        verdict = _judge(samples[index], limits, isolation, cancelled)
        progress(index, verdict)
        return verdict

    with ThreadPoolExecutor(workers or cores()) as pool:
        futures = [pool.submit(one, index) for index in range(len(samples))]
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C: those that run are ended, the others never start
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _judge(
    sample: Sample, limits: Limits, isolation: Isolation, cancelled: threading.Event
) -> Verdict:
    if cancelled.is_set():
        return Verdict(COULD_NOT_RUN, None, "the run was given up")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as scratch:
        how = start(isolation, limits.scratch_mb, scratch)
        settings = {"uid": how.uid, "scratch": how.scratch, "processes": _processes(limits)}
        job = asdict(sample) | {"limits": asdict(limits), "env": how.env, "kill_uid": how.kill_uid}
        job["command"] = [*how.command, json.dumps(asdict(limits) | settings)]
        job["cwd"] = scratch if isolation.weak else None
        env = {key: value for key, value in os.environ.items() if key[:6] != "PYTHON"}
        grader = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", "-B", str(GRADER)],
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            start_new_session=True,
            env=env | {"PYTHONHASHSEED": "0"},
        )
        lines = _talk(grader, job, limits.timeout_s + START_S, cancelled)
    seconds = time.perf_counter() - began
    if lines and lines[-1].startswith("["):
        return Verdict(*json.loads(lines[-1]), seconds)
    if lines[:1] == ["started"]:  # whatever ended the grader came from the sample
        return Verdict(FAILED, "exit", "its grader ended before it had judged", seconds)
    return Verdict(
        COULD_NOT_RUN, None, f"the grader does not start: {' '.join(lines)[-300:]}", seconds
    )


def _talk(
    grader: subprocess.Popen, job: dict, limit_s: float, cancelled: threading.Event
) -> list[str]:
    """Return the grader's lines.

    Its input stays open until it is done: a grader whose input ends gives up and cleans up.
    """
    errors: list[bytes] = []
    listener = threading.Thread(target=lambda: errors.append(grader.stderr.read()), daemon=True)
    listener.start()
    watch = threading.Thread(target=_watch, args=(grader, limit_s, cancelled), daemon=True)
    watch.start()
    try:
        grader.stdin.write(json.dumps(job).encode() + b"\n")
        grader.stdin.flush()
    except (OSError, ValueError):
        pass  # it has ended, or is given up; what it said follows
    lines = grader.stdout.read().decode(errors="replace").splitlines()
    grader.wait()
    listener.join(1.0)
    for pipe in (grader.stdin, grader.stdout):
        try:
            pipe.close()
        except OSError:
            pass
    return lines or b"".join(errors).decode(errors="replace").splitlines()[-1:]


def _watch(grader: subprocess.Popen, limit_s: float, cancelled: threading.Event) -> None:
    until = time.monotonic() + limit_s
    while grader.poll() is None:
        if cancelled.wait(0.05) or time.monotonic() > until:
            try:
                grader.stdin.close()  # it gives up, and cleans up
            except OSError:
                pass
            try:
                grader.wait(15)
            except subprocess.TimeoutExpired:
                grader.kill()
            return


def _processes(limits: Limits) -> int | None:
    """Return the limit on processes. If the sample runs as this user, running ones count too."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return limits.processes
    if not os.path.isdir("/proc/self/task"):
        return None
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return limits.processes + count
