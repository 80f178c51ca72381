"""The trusted side: one process per sample that has the tests, calls the child, and judges.

It reads one job (a line of JSON) from its standard input. It writes "started" when untrusted code
is about to run, and "judged" when it no longer does. It writes the verdict when the child and every process of the child are dead. The
child can find the tests on no disk, in no argument list and in no process of its own. An error
before "started" gives the verdict "could not run". Only the standard library is used.

One queue receives all events: an answer, too much output, the child's end, the parent's end. The
wall clock is checked while waiting for the next event. There are no signals and no alarms, so the
grader works the same on every system. A result that takes long to read or to compare keeps this
process busy past its time; then pool.py ends it.
"""

import builtins
import json
import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from child import decode, encode
from ending import end_everything, shield

sys.path.pop(0)

START_S = 30.0  # for a process to start on a busy machine
ANSWER_BYTES = 64 << 20
# The errors that a malformed answer raises.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)


class Ended(BaseException):
    """The sample is over, with (outcome, kind, message).

    It is a BaseException, so that a test's `except Exception` cannot catch it.
    """


class GivenUp(BaseException):
    """The process that wants the verdict has ended."""


class Child:
    """The process, its pipes, and the time left."""

    def __init__(self, job):
        self.events, self.outbox, self.job = queue.Queue(), queue.Queue(), job
        self.raised, self.calls = None, 0
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        where = {"env": job["env"], "cwd": job["cwd"], "start_new_session": True}
        self.process = subprocess.Popen(job["command"], **pipes, **where)
        self.noise = b""
        self.reader = self._thread(self._read_answers)
        self.listener = self._thread(self._count_output)
        for work in (self._write, self._wait, self._watch_parent):
            self._thread(work)
        self.deadline = time.monotonic() + START_S

    def _thread(self, work):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def _read_answers(self):
        while line := self.process.stdout.readline(ANSWER_BYTES):
            self.events.put(("answer", line) if line.endswith(b"\n") else ("output", None))
        self.events.put(("end", None))

    def _count_output(self):
        seen = 0
        while data := os.read(self.process.stderr.fileno(), 65536):
            seen += len(data)
            self.noise = (self.noise + data)[:2000]
            if seen > self.job["limits"]["output_mb"] << 20:
                self.events.put(("output", None))
                return  # the pipe stays full: the program waits until it is killed

    def _write(self):
        with suppress(OSError):  # the child has ended, and the reader reports that
            while True:
                self.process.stdin.write(self.outbox.get())
                self.process.stdin.flush()

    def _wait(self):
        self.process.wait()
        self.reader.join(0.2)  # earlier answers come first, but a grandchild may keep the pipe open
        self.events.put(("end", None))

    def _watch_parent(self):
        sys.stdin.buffer.read()
        self.events.put(("parent", None))

    def ask(self, message):
        """Send `message`, wait for the answer and return it. With None, only wait."""
        if message is not None:
            self.outbox.put(json.dumps(message).encode() + b"\n")
        limits = self.job["limits"]
        try:
            event, line = self.events.get(timeout=max(0.0, self.deadline - time.monotonic()))
        except queue.Empty:
            raise Ended("failed", "timeout", f"not done after {limits['timeout_s']:g} s") from None
        if event == "answer":
            return json.loads(line)
        if event == "parent":
            raise GivenUp
        if event == "output":
            raise Ended("failed", "output", f"more than {limits['output_mb']} MiB of output")
        try:
            code = self.process.wait(0.2)
        except subprocess.TimeoutExpired:  # it closed its answers and keeps running
            code = None
        if code in (-24, 128 + 24):  # SIGXCPU
            raise Ended("failed", "timeout", "its processor time is used up")
        raise Ended("failed", "exit", f"it ended before the tests did (status {code})")

    def start(self):
        """Return None once the child is ready, or the reason why it is not."""
        try:
            ready = self.ask(None) == "ready"
        except Ended:
            ready = False
        if ready:
            return None
        self.listener.join(0.2)
        output = " ".join(self.noise.decode(errors="replace").split())
        return output[-300:] or "the child printed nothing"

    def perform(self, message):
        """Send a request to the child and return its value; raise the exception it raised."""
        try:
            answer = self.ask(message)
            if "raised" not in answer:
                return decode(answer["value"])
            names, text = [str(name) for name in answer["raised"]], str(answer["text"])
        except UNREADABLE as error:
            text = f"its answer cannot be read ({type(error).__name__})"
            raise Ended("failed", "exception", text) from None
        self.raised = f"{names[0]}: {text}"
        if "SystemExit" in names or "KeyboardInterrupt" in names:
            raise Ended("failed", "exit", self.raised)
        if "MemoryError" in names:
            raise Ended("failed", "memory", self.raised)
        for name in names:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(text)
                except TypeError:  # UnicodeDecodeError and others need more arguments
                    continue
                raise error
        raise Ended("failed", "exception", self.raised)

    def function(self, *args, **kwargs):
        """Call the program's function in the child; the tests call this."""
        self.calls += 1
        self.raised = None
        return self.perform({"args": encode(args), "kwargs": encode(kwargs)})


def judge(child, job):
    """Run the tests; return (outcome, kind, message)."""
    space = {"__name__": "tests"}
    try:
        for part in ("setup", "test"):  # optimize=0 keeps the asserts even with -O
            exec(compile(job[part], f"<{part}>", "exec", optimize=0), space)
        check = space["check"]
    except Exception as error:
        return "could not run", None, f"the tests themselves fail: {type(error).__name__}: {error}"
    space[job["entry_point"]] = child.function  # some tests call it by its name
    print("started", flush=True)
    child.deadline = time.monotonic() + job["limits"]["timeout_s"]
    try:
        child.perform({"code": job["code"], "entry_point": job["entry_point"]})
        check(child.function)
    except Ended as end:
        return end.args
    except MemoryError:
        return "failed", "memory", "its answer is too large to be compared"
    except Exception as error:
        if child.raised is None and isinstance(error, AssertionError):
            return "failed", "assertion", str(error)[:300]
        return "failed", "exception", child.raised or f"{type(error).__name__}: {error}"[:300]
    if not child.calls:
        return "could not run", None, f"the tests never call {job['entry_point']}"
    return "passed", None, ""


def main():
    """Read one job and print one verdict; never raise."""
    job = json.loads(sys.stdin.buffer.readline())
    shield(job["limits"]["memory_mb"])
    child, verdict = None, ("could not run", None, "the run was cancelled")
    try:
        child = Child(job)
        reason = child.start()
        verdict = ("could not run", None, f"it does not start: {reason}")
        if reason is None:
            verdict = judge(child, job)
            print("judged", flush=True)
    except OSError as error:
        verdict = "could not run", None, f"it does not start: {error}"
    except GivenUp:
        pass
    left = end_everything(child.process if child else None, job["kill_uid"])
    if left:
        verdict = "could not run", None, f"{left} of its processes could not be ended"
    try:
        print(json.dumps(verdict), flush=True)
    finally:
        os._exit(0)  # threads may wait in a pipe


if __name__ == "__main__":
    main()
