"""Isolate generated code from this machine.

    bubblewrap   Own PID, network, IPC and mount namespaces. The code has no network. It sees only
                 the system's libraries and this Python, read-only, and a scratch folder in memory.
                 All its processes are killed together. If root starts it, it switches to another
                 user.
    limits       Used if bubblewrap is missing or cannot start. The code runs as another user if
                 root starts it, else as the same user, with limits on memory, time, files and
                 processes. It can still reach the network, every file that its user may read, and
                 that user's other processes. Therefore LABKIT_UNSAFE_SANDBOX=1 must allow it.

Neither protects against kernel bugs, side channels or load: a sample may use a core until its time
is up. A container or a virtual machine around the whole lab protects further.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import labkit
from labkit.errors import BadRequest
from labkit.files import cache_dir

ALLOW = "LABKIT_UNSAFE_SANDBOX"
SYSTEM = "/usr /bin /lib /lib32 /lib64 /nix/store /etc/ld.so.cache /etc/alternatives".split()
USERS = range(61184, 65520)  # ids without an account: systemd reserves them for such uses
# A process that starts as root needs these to switch to another user.
CAPABILITIES = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID".split()
CHILD = Path(__file__).with_name("child.py")


class SandboxUnavailable(BadRequest):
    """No permitted isolation works here. This is an error and never a score of 0."""


@dataclass(frozen=True)
class Isolation:
    """A kind of isolation. `why` is the reason against a better one; None for the best."""

    name: str  # "bubblewrap" or "limits"
    why: str | None = None

    @property
    def weak(self) -> bool:
        return self.name != "bubblewrap"

    def describe(self) -> str:
        if not self.weak:
            return "bubblewrap: no network, no files but Python's own, killed as a whole"
        user = "another user" if _root() else "this user"
        return f"limits only, as {user}: network and readable files stay open ({self.why})"


BUBBLEWRAP = Isolation("bubblewrap")


@dataclass(frozen=True)
class Start:
    """How grader.py starts a child."""

    command: list[str]
    env: dict[str, str]
    uid: int | None  # the user that the child switches to
    kill_uid: int | None  # all processes of this user are ended afterwards
    scratch: str  # the folder, as the child sees it


def start(isolation: Isolation, scratch_mb: int, scratch: str) -> Start:
    """Return how to start a child. `scratch` is an empty folder that only `limits` uses."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # -I would ignore PYTHONHASHSEED, which makes the order of sets the same in every run.
    run = [python, "-s", "-P", "-S", "-B", "-c", CHILD.read_text(encoding="utf-8")]
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "HOME": "/tmp"}
    uid = random.SystemRandom().choice(USERS) if _root() else None
    if not isolation.weak:
        return Start(_bubblewrap(python, scratch_mb) + run, env, uid, None, "/tmp")
    if uid is not None:
        os.chown(scratch, uid, uid)
    if os.name == "nt":
        names = ("SYSTEMROOT", "TEMP", "TMP")
        env |= {name: os.environ[name] for name in names if name in os.environ}
    return Start(run, env | {"HOME": scratch, "TMPDIR": scratch}, uid, uid, scratch)


def _root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@cache
def _bubblewrap(python: str, scratch_mb: int) -> list[str]:
    """Return the bubblewrap command: a new root with system programs and Python's library."""
    command = "bwrap --unshare-pid --unshare-net --unshare-ipc --unshare-uts".split()
    command += "--unshare-cgroup-try --die-with-parent --hostname sandbox".split()
    command += "--proc /proc --dev /dev".split()
    command += CAPABILITIES if _root() else ["--unshare-user"]
    for path in SYSTEM:
        if os.path.islink(path):  # /lib is often /usr/lib
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    shown = ["/usr"]
    if not _inside(python, "/usr"):
        shown += [python, f"{sys.base_prefix}/lib"]
        parents = {str(parent) for path in shown[1:] for parent in Path(path).parents}
        for folder in sorted(parents, key=len)[1:]:
            # By default the user that the code runs as cannot read these folders.
            command += ["--perms", "0755", "--dir", folder]
        for path in shown[1:]:
            command += ["--ro-bind", path, path]
    # Installed packages may contain the tests, and a checkout may lie anywhere.
    places = [Path(name) for name in ("/usr/lib", "/usr/lib64", "/usr/local/lib")]
    places.append(Path(sys.base_prefix, "lib"))
    hidden = [path for place in places for path in place.glob("python*/*-packages")]
    hidden += [Path(labkit.__file__).parents[1], cache_dir(), Path.home()]
    for path in sorted({str(path.resolve()) for path in hidden}):
        if os.path.isdir(path) and any(_inside(path, place) for place in shown):
            command += ["--tmpfs", path, "--remount-ro", path]
    command += ["--perms", "1777", "--size", str(scratch_mb << 20), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _inside(path: str, folder: str) -> bool:
    return Path(folder) in Path(path).parents
