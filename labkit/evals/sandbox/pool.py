"""Judging samples: one grader process each, several at once.

    check(Sample(code, test, "f"))     ->  Verdict("passed" | "failed" | "could not run", kind, message, seconds)
    check_all(samples)                 ->  verdicts in order, as many at once as there are cores

A grader is started with `subprocess`, never by a fork of this process, which has threads and perhaps a GPU. The verdict
comes back over the grader's own pipe, which no untrusted process holds. Cost: two interpreters a sample, about 0.1 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from labkit.errors import BadRequest
from labkit.evals.sandbox.isolation import Isolation, best_isolation, start

GRADER = Path(__file__).with_name("grader.py")
START_S = 60.0  # for both processes to start on a busy machine, beside the sample's own time
PASSED, FAILED, COULD_NOT_RUN = "passed", "failed", "could not run"


@dataclass(frozen=True)
class Sample:
    """`code` is untrusted and defines `entry_point`. `test` is trusted and defines check(candidate); `setup` is trusted
    code that it needs. The tests run in another process than the code, where `candidate` calls across: arguments and
    results travel as data (numbers, text, lists, dictionaries ...)."""

    code: str
    test: str
    entry_point: str
    setup: str = ""


@dataclass(frozen=True)
class Limits:
    """Of one sample: `timeout_s` of wall clock from when it may run, `memory_mb` a process, `processes` with threads."""

    timeout_s: float = 5.0
    memory_mb: int = 512
    scratch_mb: int = 16
    output_mb: int = 1
    processes: int = 8
    files: int = 64

    def __post_init__(self):
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise BadRequest(f"{name} is {value!r}; give a number above 0.")


@dataclass(frozen=True)
class Verdict:
    """`kind` of a failure: assertion, exception, timeout, memory, output or exit. `seconds` include the start."""

    outcome: str
    kind: str | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool | None:
        """None where it could not run: neither right nor wrong."""
        return None if self.outcome == COULD_NOT_RUN else self.outcome == PASSED


def check(sample: Sample, limits: Limits | None = None, isolation: Isolation | None = None) -> Verdict:
    """Judge one sample. Raises SandboxUnavailable where nothing that may be used can hold it."""
    return check_all([sample], limits, isolation, workers=1)[0]


def check_all(
    samples: Sequence[Sample],
    limits: Limits | None = None,
    isolation: Isolation | None = None,
    workers: int | None = None,
    progress: Callable[[int, Verdict], object] = lambda index, verdict: None,
) -> list[Verdict]:
    """Judge all, `workers` at once (None: one a core); `progress(index, verdict)` as each is known."""
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


def _judge(sample: Sample, limits: Limits, isolation: Isolation, cancelled: threading.Event) -> Verdict:
    if cancelled.is_set():
        return Verdict(COULD_NOT_RUN, None, "the run was given up")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as scratch:
        how = start(isolation, limits.scratch_mb, scratch)
        settings = asdict(limits) | {"uid": how.uid, "scratch": how.scratch, "processes": _processes(limits)}
        job = asdict(sample) | {
            "limits": asdict(limits), "command": [*how.command, json.dumps(settings)], "env": how.env,
            "cwd": scratch if isolation.weak else None, "kill_uid": how.kill_uid,
        }  # fmt: skip
        command = [sys.executable, "-s", "-P", "-S", "-B", str(GRADER)]
        grader = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"PYTHONHASHSEED": "0"},
        )  # fmt: skip
        lines = _talk(grader, job, limits.timeout_s + START_S, cancelled)
    seconds = time.perf_counter() - began
    if lines and lines[-1].startswith("["):
        return Verdict(*json.loads(lines[-1]), seconds)
    if lines[:1] == ["started"]:  # whatever ended the grader came from the sample
        return Verdict(FAILED, "exit", "its grader ended before it had judged", seconds)
    return Verdict(COULD_NOT_RUN, None, f"the grader does not start: {' '.join(lines)[-300:]}", seconds)


def _talk(grader: subprocess.Popen, job: dict, limit_s: float, cancelled: threading.Event) -> list[str]:
    """The grader's lines. Its input stays open until it is done: a grader whose input ends gives up and cleans up."""
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
    """The system counts a user's processes: where the sample is this user, those that run already come on top."""
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
