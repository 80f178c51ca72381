"""The untrusted side: runs a program and calls its function on request. Started by grader.py.

Only the standard library is used. The tests are not in this process: calls come in as data and
results go out as data. The code can only give a false result, as any wrong program does. Before it
reads the program, this process switches to another user (if it is root) and sets its limits on
memory, processor time, files and processes.

    in   {"code"}, then {"args", "kwargs"} per call       one JSON value per line, both ways
    out  "ready", then {"value"} or {"raised", "text"}    values in the form of `encode`
"""

import json
import os
import sys
from decimal import Decimal
from fractions import Fraction

PLAIN = (type(None), bool, float, str)
NUMBERS = {"complex": complex, "Decimal": Decimal, "Fraction": Fraction}
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}
ELEMENTS = 100_000  # the maximum number of elements of an iterator, because it may be endless


class Foreign:
    """A result of a type that cannot be sent.

    It equals no other value. Its truth and its elements can be read.
    """

    def __init__(self, name, truth, items):
        self.name, self.truth, self.items = name, truth, items

    def __bool__(self):
        return self.truth

    def __iter__(self):
        if self.items is None:
            raise TypeError(f"{self.name!r} object is not iterable")
        return iter(self.items)

    def __len__(self):
        return len(list(iter(self)))

    def __repr__(self):
        return f"<{self.name}>"


def encode(value):
    """Return a value as JSON data: plain values unchanged, all others as [type, content]."""
    if isinstance(value, int) and not isinstance(value, bool):
        return ["int", hex(value)]
    if isinstance(value, PLAIN):
        return value
    for name, kind in SEQUENCES.items():
        if name != "iterator" and isinstance(value, kind):
            return [name, [encode(x) for x in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(k), encode(v)] for k, v in value.items()]]
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, value.decode("latin-1")]
    if isinstance(value, range):
        return ["range", [hex(value.start), hex(value.stop), hex(value.step)]]
    if isinstance(value, tuple(NUMBERS.values())):
        return [next(name for name, kind in NUMBERS.items() if isinstance(value, kind)), str(value)]
    name, items = type(value).__name__, None
    if hasattr(value, "__iter__") and not isinstance(value, type):
        items = [encode(x) for x, _ in zip(value, range(ELEMENTS))]
    if hasattr(value, "__next__"):
        return ["iterator", items]
    return ["foreign", [name, bool(value), items]]


def decode(data):
    """Return the value that `encode` encoded.

    Other data raises an error. Nothing is executed.
    """
    if isinstance(data, PLAIN):
        return data
    kind, content = data
    if kind == "int":
        return int(content, 16)
    if kind in SEQUENCES:
        return SEQUENCES[kind]([decode(x) for x in content])
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind](content.encode("latin-1"))
    if kind == "range":
        return range(*(int(x, 16) for x in content))
    if kind in NUMBERS:
        return NUMBERS[kind](content)
    name, truth, items = {"foreign": content}[kind]
    return Foreign(str(name), truth is True, None if items is None else [decode(x) for x in items])


def main():
    """Serve calls, with the limits of `argv` (JSON).

    No code of the program runs before "ready" is sent.
    """
    settings = json.loads(sys.argv[1])
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # the grader counts the program's output and does not read it
    try:
        give_away(settings)
    except Exception as error:  # one line that gives the reason
        sys.exit(f"{type(error).__name__}: {error}")
    del sys.argv[1:]

    def say(answer):
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    say("ready")
    space = {"__name__": "candidate"}
    function = None
    for line in calls:
        message = json.loads(line)
        try:
            if "code" in message:
                exec(compile(message["code"], "<candidate>", "exec"), space)
                function = space[message["entry_point"]]
                answer = {"value": None}
            else:
                args, kwargs = decode(message["args"]), decode(message["kwargs"])
                answer = {"value": encode(function(*args, **kwargs))}
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            name = message.get("entry_point")
            missing = isinstance(error, KeyError) and error.args == (name,)
            text = f"the program defines no {name}" if missing else _text(error)
            answer = {"raised": _names(error), "text": text}
        say(answer)


def give_away(settings):
    """Set the limits, then switch to another user: only root may set some of the limits."""
    try:
        import resource
    except ImportError:  # on Windows only the wall clock limits a program
        return
    megabyte = 1 << 20
    limits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": int(settings["timeout_s"]) + 2,
        "RLIMIT_AS": settings["memory_mb"] * megabyte,
        "RLIMIT_FSIZE": settings["scratch_mb"] * megabyte,
        "RLIMIT_NOFILE": settings["files"],
        "RLIMIT_NPROC": settings["processes"],  # None: processes cannot be counted here
    }
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None and value is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(kind, (value, value))
            except (OSError, ValueError):
                if sys.platform == "linux":  # macOS does not accept RLIMIT_AS; Linux accepts all
                    raise
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    os.chdir(settings["scratch"])
    try:  # without a readable library, the result is "could not run" and not "wrong"
        for name in ("math", "random", "typing"):
            __import__(name)
    except ImportError:
        uid = settings["uid"]
        user = f"another user (as root, code runs as {uid})" if uid else "this user"
        raise OSError(f"the library of {sys.executable} cannot be read by {user}") from None


def _names(error):
    """Return the names of the exception's type and of its bases.

    The grader raises an exception of the first type in this list that it has.
    """
    return [kind.__name__ for kind in type(error).__mro__]


def _text(error):
    try:
        return str(error)[:300]
    except BaseException:
        return ""


if __name__ == "__main__":
    main()
