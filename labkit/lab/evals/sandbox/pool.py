"""Judge samples in the best isolation that works here, several at once.

    check(Sample(code, test, "f"))     a Verdict: passed, failed, or could not run
    check_all(samples)                 verdicts in order, as many at once as there are cores

Each sample has a grader process. It is started with `subprocess` and not by a fork, because this
process has threads and perhaps a GPU. The verdict comes back over the grader's own pipe, to which no
untrusted process has access.
Cost: two interpreters per sample, about 0.1 s.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from labkit.errors import Number, check_fields
from labkit.lab.evals.sandbox.ending import end_grader
from labkit.lab.evals.sandbox.isolation import (
    ALLOW,
    BUBBLEWRAP,
    Isolation,
    SandboxUnavailable,
    start,
)
from labkit.lab.measure.machine import available_cores

GRADER = Path(__file__).with_name("grader.py")
START_S = 60.0  # for both processes to start on a busy machine, in addition to the sample's time
GRACE_S = 1.0  # for the grader to say that the sample's time is over
PASSED, FAILED, COULD_NOT_RUN = "passed", "failed", "could not run"


@dataclass(frozen=True)
class Sample:
    """Untrusted `code` that defines `entry_point`, and the trusted `test` that judges it.

    `test` defines check(candidate), and `setup` is trusted code that it needs. The tests and
    the code run in two processes. `candidate` sends its arguments and receives its result as
    data (numbers, text, lists, dictionaries ...).
    """

    code: str
    test: str
    entry_point: str
    setup: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of one sample.

    timeout_s: wall-clock time in seconds, counted from the moment when the code may run.
    memory_mb: memory per process, in MiB.
    scratch_mb, output_mb: the size of the scratch folder and of the output, in MiB.
    processes: the maximum number of processes and threads.
    files: the maximum number of open files.
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
    """The result of one sample.

    outcome: passed, failed or could not run.
    kind: of a failure: assertion, exception, timeout, memory, output or exit.
    seconds: the time that the sample took, with the start of its processes.
    """

    outcome: str
    kind: str | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool | None:
        """True, False, or None if the sample could not run."""
        return None if self.outcome == COULD_NOT_RUN else self.outcome == PASSED


def check(
    sample: Sample, limits: Limits | None = None, isolation: Isolation | None = None
) -> Verdict:
    """Judge one sample. Raises SandboxUnavailable if no isolation may be used here."""
    return check_all([sample], limits, isolation, workers=1)[0]


@cache
def _found() -> Isolation:
    """Return the best isolation with which a small sample passes here."""
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

    Raises SandboxUnavailable if this is `limits` and LABKIT_UNSAFE_SANDBOX does not allow it.
    """
    isolation = _found()
    if isolation.weak and os.environ.get(ALLOW, "") not in ("1", "yes", "true"):
        raise SandboxUnavailable(
            f"Generated code is not run here, because {isolation.why}. Install bubblewrap, or set "
            f"{ALLOW}=1 to let the code reach the network and your files."
        )
    return isolation


def check_all(
    samples: Sequence[Sample],
    limits: Limits | None = None,
    isolation: Isolation | None = None,
    workers: int | None = None,
) -> list[Verdict]:
    """Judge all samples, `workers` at once; None means one per core."""
    limits, isolation = limits or Limits(), isolation or best_isolation()
    cancelled = threading.Event()

    with ThreadPoolExecutor(workers or available_cores()) as pool:
        rest = (limits, isolation, cancelled)
        futures = [pool.submit(_judge, sample, *rest) for sample in samples]
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C: end the samples that run, and start no other
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise


def _judge(
    sample: Sample, limits: Limits, isolation: Isolation, cancelled: threading.Event
) -> Verdict:
    if cancelled.is_set():
        return Verdict(COULD_NOT_RUN, None, "the run was cancelled")
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
        lines, late = _talk(grader, job, cancelled)
    seconds = time.perf_counter() - began
    if lines and lines[-1].startswith("["):
        return Verdict(*json.loads(lines[-1]), seconds)
    if lines == ["started"] and late:  # its result keeps the grader busy
        return Verdict(FAILED, "timeout", f"not done after {limits.timeout_s:g} s", seconds)
    if lines[:1] == ["started"]:  # so the sample ended the grader
        return Verdict(FAILED, "exit", "its grader ended without a verdict", seconds)
    reason = f"the grader does not start: {' '.join(lines)[-300:]}"
    return Verdict(COULD_NOT_RUN, None, reason, seconds)


def _talk(
    grader: subprocess.Popen, job: dict, cancelled: threading.Event
) -> tuple[list[str], bool]:
    """Send the job to the grader; return the lines that it prints, and whether it was late.

    Its input stays open until it is done. When its input ends, a grader stops and cleans up.
    """
    errors: list[bytes] = []
    listener = threading.Thread(target=lambda: errors.append(grader.stderr.read()), daemon=True)
    listener.start()
    until = [time.monotonic() + START_S]  # moved by the lines of the grader
    rest = (grader, job["kill_uid"], until, cancelled)
    threading.Thread(target=_watch, args=rest, daemon=True).start()
    with suppress(OSError, ValueError):  # it may have ended; read what it printed
        grader.stdin.write(json.dumps(job).encode() + b"\n")
        grader.stdin.flush()
    lines = []
    for line in grader.stdout:
        lines.append(line.decode(errors="replace").rstrip("\n"))
        extra = job["limits"]["timeout_s"] + GRACE_S if lines[-1] == "started" else START_S
        until[0] = time.monotonic() + extra
    grader.wait()
    late = time.monotonic() > until[0]
    listener.join(1.0)
    for pipe in (grader.stdin, grader.stdout):
        with suppress(OSError):
            pipe.close()
    return lines or b"".join(errors).decode(errors="replace").splitlines()[-1:], late


def _watch(
    grader: subprocess.Popen, uid: int | None, until: list[float], cancelled: threading.Event
) -> None:
    """Stop the grader when the run is cancelled or the time `until[0]` has passed."""
    while grader.poll() is None:
        if cancelled.wait(0.05) or time.monotonic() > until[0]:
            with suppress(OSError):
                grader.stdin.close()  # so it stops and cleans up
            try:
                grader.wait(15 if cancelled.is_set() else 0.5)
            except subprocess.TimeoutExpired:
                end_grader(grader, uid)
            return


def _processes(limits: Limits) -> int | None:
    """Return the limit on processes.

    The kernel counts all processes of a user. So if the sample runs as this user, the limit
    includes the processes that run already. None means that they cannot be counted.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return limits.processes
    if not os.path.isdir("/proc/self/task"):
        return None
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return limits.processes + count
