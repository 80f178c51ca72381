"""The sandbox gives the right verdicts, contains hostile programs and leaves no process behind.

Without bubblewrap and without a permission for limits alone, the tests that execute code are skipped
with the reason.
"""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import psutil
import pytest

from labkit.errors import BadRequest
from labkit.lab.evals.sandbox import isolation as walls
from labkit.lab.evals.sandbox import pool
from labkit.lab.evals.sandbox.child import Foreign, decode, encode
from labkit.lab.evals.sandbox.isolation import ALLOW, Isolation, SandboxUnavailable
from labkit.lab.evals.sandbox.pool import Limits, Sample, best_isolation, check, check_all

sys.path.insert(0, str(Path(__file__).parent))
import hostile

ROOT = Path(__file__).parents[3]
TEST, HONEST = hostile.TEST, hostile.HONEST


def no_isolation() -> str | None:
    try:
        best_isolation()
    except SandboxUnavailable as reason:
        return str(reason)
    return None


executes = pytest.mark.skipif(no_isolation() is not None, reason=no_isolation() or "")


def weak() -> Isolation:
    """Return limits alone, or skip: as root, another user must be able to read this Python."""
    found = Isolation("limits", "asked for by a test")
    verdict = check(Sample(HONEST, TEST, "f"), isolation=found)
    if verdict.passed is None:
        pytest.skip(f"limits alone cannot run here: {verdict.message}")
    return found


# ---- right, wrong, and neither ---------------------------------------------------------------------------------

WRONG = {
    "returns nothing": ("def f(x):\n    return None", "assertion"),
    "does nothing": ("def f(x):\n    pass", "assertion"),
    "a constant": ("def f(x):\n    return 10", "assertion"),
    "raises": ("def f(x):\n    return x / 0", "exception"),
    "raises AssertionError": ("def f(x):\n    assert False", "exception"),
    "is no program": ("def f(x:\n", "exception"),
    "is empty": ("", "exception"),
    "has another name": ("def g(x):\n    return x * x + 1", "exception"),
}


@executes
def test_right_programs_pass_and_wrong_ones_fail_in_order():
    programs = [HONEST, *(code for code, _ in WRONG.values()), HONEST]
    verdicts = check_all([Sample(p, TEST, "f") for p in programs])
    assert [v.passed for v in verdicts] == [True, *(False for _ in WRONG), True]
    assert [v.kind for v in verdicts[1:-1]] == [kind for _, kind in WRONG.values()]
    assert "defines no f" in verdicts[-2].message


@executes
@pytest.mark.parametrize(
    "name, value",
    [("PYTHONOPTIMIZE", "2"), ("PYTHONSTARTUP", "/nowhere"), ("PYTHONHOME", "/nowhere")],
)
def test_environment_variables_of_python_do_not_reach_the_grader(monkeypatch, name, value):
    monkeypatch.setenv(name, value)  # without asserts every program would pass
    verdicts = check_all(
        [Sample(code, TEST, "f") for code in (HONEST, "def f(x):\n    return None")]
    )
    assert [v.passed for v in verdicts] == [True, False]


@executes
@pytest.mark.parametrize(
    "test, message",
    [
        ("def check(candidate):\n    pass\n", "never call f"),
        ("x = 1\n", "KeyError: 'check'"),
        ("def check(candidate:\n", "SyntaxError"),
    ],
)
def test_a_test_without_a_call_or_without_check_is_an_error(test, message):
    verdict = check(Sample(HONEST, test, "f"))
    assert (
        verdict.outcome == "could not run" and verdict.passed is None and message in verdict.message
    )


@executes
def test_the_test_may_use_helpers_of_the_prompt_and_the_name_of_the_function():
    test = "def check(candidate):\n    assert candidate(2) == helper(4) == f(2)\n    assert candidate(x=3) == 10\n"
    assert check(Sample(HONEST, test, "f", setup="def helper(x):\n    return x + 1\n")).passed
    # A helper in the program does not replace the helper of the test.
    cheat = "def helper(x):\n    return None\ndef f(x):\n    return None\n"
    assert (
        check(Sample(cheat, test, "f", setup="def helper(x):\n    return x + 1\n")).passed is False
    )


def test_a_sandbox_that_cannot_start_does_not_count_as_a_wrong_answer(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no permission' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(walls, "_bubblewrap", lambda *a: [str(tmp_path / "bwrap")])
    verdict = check(Sample(HONEST, TEST, "f"), isolation=walls.BUBBLEWRAP)
    assert (
        verdict.outcome == "could not run"
        and verdict.passed is None
        and "no permission" in verdict.message
    )
    monkeypatch.setattr(walls, "_bubblewrap", lambda *a: [str(tmp_path / "absent")])
    assert check(Sample(HONEST, TEST, "f"), isolation=walls.BUBBLEWRAP).passed is None


def test_limits_alone_need_an_explicit_permission(monkeypatch):
    monkeypatch.setattr(pool, "_found", lambda: Isolation("limits", "bubblewrap is not installed"))
    monkeypatch.delenv(ALLOW, raising=False)
    with pytest.raises(SandboxUnavailable, match=f"bubblewrap is not installed.*{ALLOW}=1"):
        check(Sample(HONEST, TEST, "f"))
    monkeypatch.setenv(ALLOW, "0")
    with pytest.raises(SandboxUnavailable):
        best_isolation()
    monkeypatch.setenv(ALLOW, "1")
    assert (
        best_isolation().weak
        and "stay open (bubblewrap is not installed)" in best_isolation().describe()
    )


def test_limits_must_be_positive_numbers():
    for wrong in ({"timeout_s": 0}, {"memory_mb": -1}, {"processes": True}):
        with pytest.raises(BadRequest, match="above 0"):
            Limits(**wrong)


# ---- values between the processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        -(10**5000),
        1.5,
        -0.0,
        math.inf,
        "é\ud800\n",
        b"\xff",
        [1, [2.0, (3,)]],
        (),
        {"a": {1: (2,)}},
        {1, "b"},
        frozenset({3}),
        range(1, 9, 2),
        1 + 2j,
        Decimal("1.50"),
        Fraction(1, 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_encoding_and_decoding_keep_a_value(value):
    import json

    arrived = decode(json.loads(json.dumps(encode(value))))
    assert arrived == value and type(arrived) is type(value)
    assert not isinstance(value, float) or math.copysign(1, arrived) == math.copysign(1, value)


def test_other_collections_keep_their_comparisons():
    assert decode(encode(OrderedDict(b=1, a=2))) == {"a": 2, "b": 1} and decode(
        encode(Counter("aab"))
    ) == {"a": 2, "b": 1}
    assert math.isnan(decode(encode(math.nan)))
    generator = decode(encode(x * x for x in range(3)))
    assert generator != [0, 1, 4] and list(generator) == [0, 1, 4]
    odd = decode(encode(deque([1, 2])))
    assert (
        isinstance(odd, Foreign)
        and odd != deque([1, 2])
        and sorted(odd) == [1, 2]
        and len(odd) == 2
        and odd
    )
    assert not decode(encode(deque()))


def test_malformed_data_raises():
    for data in (["list"], ["exec", "x"], {"a": 1}, ["int", 5], ["foreign", 3], [[], []]):
        with pytest.raises((ValueError, TypeError, KeyError)):
            decode(data)


# ---- time, processes, and how it is started --------------------------------------------------------------------

BUSY = {
    "in C": "import re\ndef f(x):\n    return re.match(r'(a+)+$', 'a' * 64 + 'b')\n",
    "a grandchild": "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\n    time.sleep(60)\n",
}


DEAR = {  # a result that keeps the trusted side busy, and a process that would outlive it
    "to read": ("Fraction", "'1e400000000'"),
    "to compare": ("Decimal", "'1e99999999'"),
}


@executes
@pytest.mark.parametrize("walls", [True, False], ids=["best", "limits alone"])
@pytest.mark.parametrize("how", DEAR)
def test_a_result_that_is_dear_to_read_or_compare_ends_at_the_time_limit(how, walls):
    isolation = None if walls else weak()
    kind, text = DEAR[how]
    code = (
        f"import os\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        f"class F({kind}):\n    def __str__(self):\n        return {text}\n"
        f"def f(x):\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        os.execlp('sleep', 'sleep', '{hostile.SLEEP}')\n    return F(1)\n"
    )
    test = "def check(candidate):\n    assert int(candidate(1)) == 2\n"
    verdict = check(Sample(code, test, "f"), Limits(timeout_s=0.3, processes=256), isolation)
    assert (verdict.outcome, verdict.kind) == ("failed", "timeout") and verdict.seconds < 10
    assert not hostile.left_behind()


@executes
@pytest.mark.parametrize("how", BUSY)
def test_the_time_limit_is_kept(how):
    start = check(Sample(HONEST, TEST, "f")).seconds  # of the processes, on this machine
    for _ in range(2):  # a busy machine may be late once
        verdict = check(Sample(BUSY[how], TEST, "f"), Limits(timeout_s=0.5))
        if verdict.seconds < (allowed := 0.9 + 2 * start):
            break
    assert verdict.kind == "timeout" and 0.5 <= verdict.seconds < allowed
    assert not hostile.left_behind()


@executes
def test_it_works_next_to_threads_with_locks_and_without_alarms(monkeypatch):
    monkeypatch.delattr(signal, "SIGALRM", raising=False)
    monkeypatch.delattr(signal, "setitimer", raising=False)
    lock, done = threading.Lock(), threading.Event()
    holder = threading.Thread(target=lambda: lock.acquire() and done.wait())
    holder.start()
    try:
        loop = Sample("def f(x):\n    while True: pass\n", TEST, "f")
        verdicts = check_all([Sample(HONEST, TEST, "f"), loop], Limits(timeout_s=0.5))
        assert [v.passed for v in verdicts] == [True, False]
    finally:
        done.set()
        holder.join()


def _in_another_process(queue):
    queue.put(check(Sample(HONEST, TEST, "f")).passed)


@executes
def test_it_runs_under_spawn():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(queue,))
    process.start()
    assert queue.get(timeout=60) is True
    process.join()


@executes
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_no_process_stays_when_the_lab_is_killed():
    code = (
        "from labkit.lab.evals.sandbox.pool import *\nprint('ready', flush=True)\n"
        "check(Sample('import os\\nos.fork() or os.setsid()\\ndef f(x):\\n    while True: pass\\nf(1)', 'def check(c): c(1)', 'f'), Limits(timeout_s=60))"
    )
    lab = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    lab.stdout.readline()
    until, below = time.monotonic() + 30, set()
    while len(hostile.left_behind(below)) < 3 and time.monotonic() < until:
        time.sleep(0.05)  # until the grader and two children run
        below = {process.pid for process in psutil.Process(lab.pid).children(recursive=True)}
    started = len(hostile.left_behind(below))
    lab.kill()
    lab.wait()
    lab.stdout.close()
    assert started >= 3
    while hostile.left_behind(below) and time.monotonic() < until:
        time.sleep(0.05)
    assert not hostile.left_behind(below)


@executes
def test_an_interrupt_ends_all_running_samples():
    began = time.monotonic()
    loop = Sample("def f(x):\n    while True: pass\n", TEST, "f")
    main = threading.main_thread().ident
    threading.Timer(1.0, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        check_all([loop, loop, loop], Limits(timeout_s=60), workers=2)
    assert time.monotonic() - began < 20 and not hostile.left_behind()


@executes
def test_a_program_may_print_a_little_and_sees_the_same_order_each_time():
    code = "def f(x):\n    print('hello')\n    return list({'a', 'b', 'c', 'd', 'e', 'g'})\n"
    first = check(Sample(code, "def check(c):\n    raise ValueError(c(1))\n", "f")).message
    assert (
        first.startswith("ValueError: [")
        and first == check(Sample(code, "def check(c):\n    raise ValueError(c(1))\n", "f")).message
    )


# ---- hostile programs ------------------------------------------------------------------------------------------


@executes
def test_a_few_hostile_programs(monkeypatch):
    few = (
        "os._exit in the call",
        "says passed and leaves",
        "equal to everything",
        "reads every command line",
        "a string of a gigabyte",
        "flood of output",
    )
    monkeypatch.setattr(hostile, "PROGRAMS", {name: hostile.PROGRAMS[name] for name in few})
    _, wrong = hostile.judge_all()
    assert not wrong


@executes
@pytest.mark.slow
def test_every_hostile_program_fails_and_nothing_else_does():
    isolation = best_isolation()
    verdicts, wrong = hostile.judge_all(isolation, hostile.NEED_WALLS if isolation.weak else ())
    assert not wrong and sum(v.passed is False for v in verdicts.values()) >= 30


@pytest.mark.slow
def test_hostile_programs_fail_with_limits_alone():
    _, wrong = hostile.judge_all(weak(), hostile.NEED_WALLS)
    assert not wrong


@executes
@pytest.mark.slow
def test_hostile_programs_fail_for_an_ordinary_user():
    """If root runs the tests, run them once more as nobody, with a Python that nobody can read."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("this is a user already")
    as_nobody = {
        "user": 65534,
        "group": 65534,
        "extra_groups": [],
        "cwd": "/",
        "capture_output": True,
        "text": True,
    }
    env = {
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LABKIT_CACHE": "/nonexistent/cache",
    }
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            tried = subprocess.run(
                [python, "-c", "import labkit.lab.evals.sandbox.pool"],
                env=env,
                check=False,
                **as_nobody,
            )
        except OSError:
            continue
        if tried.returncode == 0:
            break
    else:
        pytest.skip("no Python here that another user can read with this checkout")
    done = subprocess.run(
        [python, str(Path(hostile.__file__))], env=env, check=False, timeout=200, **as_nobody
    )
    if "Generated code is not run here" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
