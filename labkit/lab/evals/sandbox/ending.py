"""Find and end every process of a sample. Runs inside grader.py.

A process that detaches itself (a new session, a double fork) becomes a child of the nearest
subreaper above it. The grader is a subreaper, so on Linux it finds all these processes below it. If
every sample has its own user, one call ends all processes of that user, even if one of them is
forking. In a PID namespace the kernel does this. macOS has neither: there the process group is
ended, and a process that has left the group stays.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress


def shield(memory_mb):
    """Adopt orphans of the child, and prevent other processes from reading this one's memory."""
    if sys.platform != "linux":
        return
    import ctypes
    import resource

    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no ptrace and no /proc/PID/mem for the same user
    limit = (2 * memory_mb + 1024) << 20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def end_everything(process, uid):
    """Kill the child and all its descendants; return the number of those that are left."""
    if process is None:
        return 0
    if os.name != "posix":
        command = ["taskkill", "/T", "/F", "/PID", str(process.pid)]
        subprocess.run(command, capture_output=True, check=False)
        return 0
    until, left = time.monotonic() + 10, 1
    while left and time.monotonic() < until:
        for signal in (19, 9):  # stop all first, so that none forks while others are killed
            running = [process.pid] if process.returncode is None else []
            for pid in {*running, *descendants()}:
                with suppress(OSError):
                    os.kill(pid, signal)
        with suppress(OSError):
            os.killpg(process.pid, 9)
        if uid is not None:  # only this sample has the user; no fork escapes this call
            command = ["/bin/sh", "-c", "kill -9 -1"]
            subprocess.run(command, user=uid, group=uid, extra_groups=[], check=False)
        process.poll()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return 0
        left = len(descendants())
        time.sleep(0.005)
    return left


def end_grader(process, uid):
    """Kill a grader that no longer answers, and all processes below it. Runs outside it."""
    if os.name != "posix":
        command = ["taskkill", "/T", "/F", "/PID", str(process.pid)]
        subprocess.run(command, capture_output=True, check=False)
    until = time.monotonic() + 10
    while (below := descendants(process.pid)) and time.monotonic() < until:
        for signal in (19, 9):  # the grader lives, so orphans stay below it
            for pid in below:
                with suppress(OSError):
                    os.kill(pid, signal)
        time.sleep(0.005)
    process.kill()
    if uid is not None:
        command = ["/bin/sh", "-c", "kill -9 -1"]
        subprocess.run(command, user=uid, group=uid, extra_groups=[], check=False)


def descendants(root=None):
    """Return the ids of the running processes below `root`; None is this process.

    The list is empty if there is no /proc.
    """
    children, found, todo = {}, [], [root or os.getpid()]
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if root is not None and state == b"Z":  # it has ended and waits for its parent
                continue
            parent = int(parent)
            children.setdefault(parent, []).append(int(name))
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found
