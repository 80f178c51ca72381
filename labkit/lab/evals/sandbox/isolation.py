"""How generated code is isolated from this machine.

    bubblewrap   own PID, network, IPC and mount namespaces: no network; of the disk only the
                 system's libraries and this Python, read-only; a scratch folder in memory; killed
                 as a whole. If root starts it, it switches to another user.
    limits       if bubblewrap is missing or cannot start: another user if we are root, else the
                 same one, with limits on memory, time, files and processes. The network and every
                 file that this user may read stay open, and so do the user's other processes. It
                 therefore needs an explicit yes: LABKIT_UNSAFE_SANDBOX=1.

Neither protects against kernel bugs, side channels or load: a sample may use a core until its
time is up. A container or a virtual machine around the whole lab protects further.
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
USERS = range(61184, 65520)  # ids that no account has: systemd keeps them for such uses
# Needed inside to give root up.
CAPABILITIES = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID".split()
CHILD = Path(__file__).with_name("child.py")


class SandboxUnavailable(BadRequest):
    """No isolation that may be used works here: an error, never a score of 0."""


@dataclass(frozen=True)
class Isolation:
    """`why` is the reason why it is not a better one; None for the best."""

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
    uid: int | None  # given up to, inside
    kill_uid: int | None  # whose every process is ended afterwards
    scratch: str  # as the child sees it


def start(isolation: Isolation, scratch_mb: int, scratch: str) -> Start:
    """Return how to start a child. `scratch` is an empty folder, used with `limits` only."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # Not -I, which ignores the seed: hashes, and so the order of sets, are the same in every run.
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
    """Return the command before Python's: a new root with system programs and Python's library."""
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
            # By default bubblewrap closes these to the user that code runs as.
            command += ["--perms", "0755", "--dir", folder]
        for path in shown[1:]:
            command += ["--ro-bind", path, path]
    # Installed packages may bring the tests along, and a checkout may lie anywhere.
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
