"""Programs that try to pass without solving the task, to escape, or to stop the run. Each must fail alone.

test_sandbox.py runs them. `python tests/lab/evals/hostile.py` judges them all as the current user and
prints what went wrong. The task is f(x) = x * x + 1. {host} is a folder of the host that anybody may
write to, and {port} is a port that listens.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time

from labkit.lab.evals.sandbox.ending import descendants
from labkit.lab.evals.sandbox.pool import Limits, Sample, Verdict, check_all

SECRET = "the-tests-say-10-and-17"
TEST = f"# {SECRET}\ndef check(candidate):\n    assert candidate(3) == 10\n    assert candidate(4) == 17\n"
HONEST = "def f(x):\n    return x * x + 1\n"
SLEEP = f"31415{os.getpid()}"  # seconds: a number that no other run of these tests has
# A program that ends by itself has enough time on a slow machine; any other has a second.
PATIENT, SHORT = (Limits(timeout_s=timeout_s, memory_mb=256) for timeout_s in (30.0, 1.0))

# name -> (allowed kinds of failure, program)
PROGRAMS = {
    # ---- leaving early, hoping that silence is success
    "exit at import": ("exit", "import sys\nsys.exit(0)"),
    "os._exit at import": ("exit", "import os\nos._exit(0)"),
    "exit in the call": ("exit", "def f(x):\n    raise SystemExit(0)"),
    "os._exit in the call": ("exit", "import os\ndef f(x):\n    os._exit(0)"),
    "KeyboardInterrupt": ("exit", "def f(x):\n    raise KeyboardInterrupt"),
    "says passed and leaves": (
        "exit",
        "import os\nprint('passed', flush=True)\nprint('[\"passed\", null, \"\"]', flush=True)\nos._exit(0)",
    ),
    "another program in its place": (
        "exit",
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo \\'\"ready\"\\'; exit 0'])",
    ),
    "crash": ("exit", "import ctypes\ndef f(x):\n    return ctypes.string_at(0)"),
    # ---- never coming back
    "loop": ("timeout", "def f(x):\n    while True:\n        pass"),
    "loop that catches everything": (
        "timeout",
        "def f(x):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
    ),
    "loop inside C": (
        "timeout",
        "import re\ndef f(x):\n    return re.match(r'(a+)+$', 'a' * 64 + 'b')",
    ),
    "sleep": ("timeout", "import time\ndef f(x):\n    time.sleep(1000)"),
    "deaf to signals": (
        "timeout",
        "import signal\nfor s in range(1, 64):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ndef f(x):\n    while True: pass",
    ),
    "stops itself": (
        "timeout",
        "import os, signal\ndef f(x):\n    os.kill(os.getpid(), signal.SIGSTOP)",
    ),
    "stops its group": (
        "timeout exit",
        "import os, signal\ndef f(x):\n    os.killpg(0, signal.SIGSTOP)",
    ),
    "waits for input": ("exception", "def f(x):\n    return input()"),
    "endless generator": ("assertion timeout", "def f(x):\n    while True: yield x"),
    "exits that never end": (
        "exit timeout",
        "import atexit, sys\ndef forever():\n    while True: pass\natexit.register(forever)\nsys.exit(0)",
    ),
    # ---- too much of everything
    "fork bomb": (
        "timeout exception exit memory",
        "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    ),
    "thread bomb": (
        "timeout exception exit memory",
        "import threading, time\ndef f(x):\n    while True:\n        threading.Thread(target=time.sleep, args=(1000,)).start()",
    ),
    "memory bomb": (
        "memory exit",
        "def f(x):\n    held = []\n    while True: held.append(bytearray(1 << 20))",
    ),
    "a string of a gigabyte": ("memory exit", "def f(x):\n    return 'x' * (1 << 30)"),
    "a result of 100 MB": ("output memory exit timeout", "def f(x):\n    return 'x' * 100_000_000"),
    "a number of ten million digits": (
        "assertion timeout memory",
        "def f(x):\n    return 1 << 33_000_000",
    ),
    "a very deep result": (
        "exception",
        "def f(x):\n    v = []\n    for _ in range(100_000): v = [v]\n    return v",
    ),
    "recursion": ("exception", "def f(x):\n    return f(x)"),
    "flood of output": ("output", "def f(x):\n    while True: print('passed' * 1000)"),
    "flood on standard error": (
        "output",
        "import os\ndef f(x):\n    while True: os.write(2, b'x' * 65536)",
    ),
    "flood of files": (
        "exception timeout assertion",
        "def f(x):\n    for i in range(50_000):\n        with open(str(i), 'wb') as file: file.write(b'x' * (1 << 12))",
    ),
    "flood of open files": (
        "exception",
        "import os\ndef f(x):\n    while True: os.open('/dev/null', 0)",
    ),
    # ---- lying about the result
    "equal to everything": (
        "assertion",
        "class Yes:\n    __eq__ = lambda self, other: True\n    __hash__ = None\ndef f(x):\n    return Yes()",
    ),
    "a number equal to everything": (
        "assertion",
        "class Yes(int):\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n    __hash__ = int.__hash__\ndef f(x):\n    return Yes(0)",
    ),
    "tampers with its own caller": (
        "assertion exception exit",
        'import __main__\n__main__.encode = lambda value: True\n__main__.json.dumps = lambda value: \'{"value": "passed"}\'\ndef f(x):\n    return 1',
    ),
    "tampers with builtins": (
        "assertion exit exception",
        "import builtins\nbuiltins.AssertionError = ZeroDivisionError\nbuiltins.isinstance = lambda *a: True\nbuiltins.all = lambda x: True\ndef f(x):\n    return True",
    ),
    "verdicts into every file": (
        "exception exit assertion timeout",
        "import os\ndef f(x):\n    for fd in range(64):\n        for line in (b'[\"passed\", null, \"\"]\\n', b'started\\n', b'passed\\n'):\n            try: os.write(fd, line)\n            except OSError: pass\n    return 0",
    ),
    "closes every file": (
        "exit timeout",
        "import os\ndef f(x):\n    os.closerange(0, 64)\n    while True: pass",
    ),
    "a trace that swallows": (
        "assertion",
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef f(x):\n    return None",
    ),
    "walks up the stack": (
        "assertion exception",
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):\n            if 'the-tests' in repr(value): return 10 if x == 3 else 17\n        frame = frame.f_back",
    ),
    "searches memory": (
        "assertion exception",
        "import gc\ndef f(x):\n    return 10 if any(isinstance(o, str) and 'the-tests' in o and 'import gc' not in o for o in gc.get_objects()) else 0",
    ),
    # ---- climbing out
    "reads every command line": (
        "assertion exception",
        "import glob\ndef f(x):\n    text = ''\n    for name in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n        try: text += open(name, errors='ignore').read()\n        except OSError: pass\n    return 10 if 'the-tests-' + 'say' in text else 0",
    ),
    "reads other memories": (
        "assertion exception timeout",
        "import glob\ndef f(x):\n    for name in glob.glob('/proc/[0-9]*'):\n        if name.endswith('/' + str(__import__('os').getpid())): continue\n        try:\n            m = open(name + '/mem', 'rb')\n            for line in open(name + '/maps'):\n                a, b = (int(v, 16) for v in line.split()[0].split('-'))\n                m.seek(a)\n                if b'the-tests-' + b'say' in m.read(b - a): return 10 if x == 3 else 17\n        except (OSError, ValueError): pass",
    ),
    "searches the disk for tests": (
        "assertion exception timeout",
        "import os\ndef f(x):\n    for top, folders, files in os.walk('/'):\n        folders[:] = [n for n in folders if n not in ('proc', 'sys', 'dev', 'share', 'include')]\n        if any(n in ('HumanEval.jsonl.gz', 'hostile.py') for n in files): return 10 if x == 3 else 17",
    ),
    "reads the host": (
        "assertion exception",
        "def f(x):\n    return 10 if open('{host}/secret').read() else 0",
    ),
    "writes to the host": (
        "assertion exception",
        "def f(x):\n    open('{host}/written', 'w').write('x')",
    ),
    "writes everywhere": (
        "assertion",
        "import os\ndef f(x):\n    for top in ('/', '/usr', '/usr/lib', '/etc', '/dev', '/dev/shm', '/proc', '/root', '/home', os.path.dirname(os.__file__)):\n        try:\n            open(top + '/written', 'w').write('x')\n            return 10 if x == 3 else 17\n        except OSError: pass",
    ),
    "calls the host": (
        "assertion exception",
        "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', {port}), timeout=0.5).send(b'x')",
    ),
    "looks up a name": (
        "exception assertion timeout",
        "import socket\ndef f(x):\n    return socket.gethostbyname('localhost.localdomain.example')",
    ),
    "kills its parent": (
        "exit timeout assertion exception",
        "import os\ndef f(x):\n    os.kill(os.getppid(), 9)",
    ),
    "kills everybody": (
        "exit timeout assertion exception",
        "import os\ndef f(x):\n    os.kill(-1, 9)",
    ),
    "leaves a grandchild behind": (
        "assertion exception",
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            os.execv('/bin/sleep', ['sleep', '{sleep}'])\n        os._exit(0)\n    time.sleep(0.3)",
    ),
    "a grandchild holds the pipes": (
        "exit exception",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['sleep', '{sleep}'])\nos._exit(0)",
    ),
    "wants to be root": ("exception", "import os\ndef f(x):\n    os.setuid(0)\n    return 10"),
    "lifts its limits": (
        "exception",
        "import resource\ndef f(x):\n    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n    return 10",
    ),
    "asks for new walls": (
        "assertion exception",
        "import ctypes\ndef f(x):\n    return ctypes.CDLL(None).mount(b'none', b'/usr', b'tmpfs', 0, None)",
    ),
}

# These pass with limits alone: readable files, writable folders, the network, other processes of the user.
NEED_WALLS = (
    "searches the disk for tests",
    "reads the host",
    "writes to the host",
    "writes everywhere",
    "calls the host",
    "kills everybody",
    "kills its parent",
)


def judge_all(isolation=None, skip=()) -> tuple[dict[str, Verdict], list[str]]:
    """Judge every program, with honest ones in between; return the verdicts and a list of faults."""
    wrong = []
    with tempfile.TemporaryDirectory() as host, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(host, 0o777)
        with open(f"{host}/secret", "w") as file:
            file.write(SECRET)
        os.chmod(f"{host}/secret", 0o644)
        began, verdicts, count = time.monotonic(), {}, 0
        for limits in (PATIENT, SHORT):
            samples = {}
            for name, (kinds, program) in PROGRAMS.items():
                if name not in skip and ("timeout" in kinds) == (limits is SHORT):
                    for hole, value in {
                        "{host}": host,
                        "{port}": str(server.getsockname()[1]),
                        "{sleep}": SLEEP,
                    }.items():
                        program = program.replace(hole, value)
                    if len(samples) % 4 == 0:
                        samples[f"honest before {name}"] = Sample(HONEST, TEST, "f")
                    samples[name] = Sample(program, TEST, "f")
            verdicts |= zip(samples, check_all(list(samples.values()), limits, isolation))
            count += len(samples)
        wrong += [f"{len(verdicts)} verdicts for {count} samples"] if len(verdicts) != count else []
        for name, verdict in verdicts.items():
            expected = "passed" if name.startswith("honest") else "failed"
            if verdict.outcome != expected or (
                expected == "failed" and verdict.kind not in PROGRAMS[name][0].split()
            ):
                wrong.append(f"{name}: {verdict}")
        if (
            sorted(os.listdir(host)) != ["secret"]
            or stat.S_IMODE(os.stat(f"{host}/secret").st_mode) != 0o644
        ):
            wrong.append(f"the host's folder holds {os.listdir(host)}")
        server.settimeout(0.1)
        try:
            server.accept()
            wrong.append("somebody called the host")
        except TimeoutError:
            pass
        print(
            f"{len(PROGRAMS)} hostile programs, {count} samples, {time.monotonic() - began:.1f} s"
        )
    return verdicts, wrong + left_behind()


def left_behind(below: set[int] | None = None) -> list[str]:
    """Return the processes of samples that still run, below this process or in `below`."""
    found, mine = [], set(descendants()) if below is None else below
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            continue
        ours = b"The untrusted side" in line or b"sandbox/grader.py" in line
        if SLEEP.encode() in line.split(b"\0") or (ours and int(name) in mine):
            found.append(f"still runs: {name} {line[:60]!r}")
    return found


if __name__ == "__main__":
    from labkit.lab.evals.sandbox.pool import best_isolation

    chosen = best_isolation()
    print(chosen.describe())
    verdicts, wrong = judge_all(chosen)
    for name, verdict in verdicts.items():
        print(
            f"  {name:34} {verdict.outcome:8} {verdict.kind or '':10} {verdict.seconds:5.2f} {verdict.message[:70]}"
        )
    print("\n".join(wrong) or "all well")
    raise SystemExit(bool(wrong))
