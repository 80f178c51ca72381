"""Which walls stand around generated code on this machine, found out by a trial and not by a version number.

    bubblewrap   own PID, network, IPC and mount namespaces: no network; of the disk only the system's libraries and this
                 Python, read-only; a scratch folder in memory; killed as a whole. Started by root it drops to a user.
    limits       where bubblewrap is missing or may not start: another user if we are root, else the same one; limits on
                 memory, time, files, processes. The network and all files that this user may read stay open, and as the
                 same user also the user's other processes. So it needs an explicit yes: LABKIT_UNSAFE_SANDBOX=1.

Neither protects against bugs of the kernel, against side channels, or against heat: a sample may use a core until its time
is up. A container or a virtual machine around the whole lab is a further wall.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import labkit
from labkit.assets import cache_dir
from labkit.errors import BadRequest

ALLOW = "LABKIT_UNSAFE_SANDBOX"
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
USERS = range(61184, 65520)  # ids that no account has: systemd keeps them for such uses
CAPABILITIES = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # to give root up, inside
CHILD = Path(__file__).with_name("child.py")


class SandboxUnavailable(BadRequest):
    """No wall that may be used stands here: an error, never a score of 0."""


@dataclass(frozen=True)
class Isolation:
    """`why`: the reason why it is not a better one; None for the best."""

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


@cache
def _found() -> Isolation:
    from labkit.evals.sandbox.pool import Sample, check

    if shutil.which("bwrap") is None:
        return Isolation("limits", "bubblewrap is not installed" if sys.platform == "linux" else "bubblewrap needs Linux")
    right = Sample("def f():\n    return 1\n", "def check(candidate):\n    assert candidate() == 1\n", "f")
    verdict = check(right, isolation=BUBBLEWRAP)
    return BUBBLEWRAP if verdict.passed else Isolation("limits", f"bubblewrap cannot start here: {verdict.message}")


def best_isolation() -> Isolation:
    """The best that works here. Raises SandboxUnavailable where that is weak and nobody has said yes to it."""
    found = _found()
    if found.weak and os.environ.get(ALLOW, "") not in ("1", "yes", "true"):
        raise SandboxUnavailable(
            f"Generated code is not run here, because {found.why}; install bubblewrap, or set {ALLOW}=1 to run it "
            "with limits only, if you accept that it can reach the network and your files."
        )
    return found


@dataclass(frozen=True)
class Start:
    """How a child is started: what grader.py is told."""

    command: list[str]
    env: dict[str, str]
    uid: int | None  # given up to, inside
    kill_uid: int | None  # whose every process is ended afterwards
    scratch: str  # as the child sees it


def start(isolation: Isolation, scratch_mb: int, scratch: str) -> Start:
    """`scratch`: an empty folder, used where there is no private one in memory."""
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
        env |= {name: os.environ[name] for name in ("SYSTEMROOT", "TEMP", "TMP") if name in os.environ}
    return Start(run, env | {"HOME": scratch, "TMPDIR": scratch}, uid, uid, scratch)


def _root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@cache
def _bubblewrap(python: str, scratch_mb: int) -> list[str]:
    """The command in front of Python's: a new root that holds the system's programs and Python's library, nothing else."""
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    command += CAPABILITIES if _root() else ["--unshare-user"]
    for path in SYSTEM:
        if os.path.islink(path):  # /lib is often /usr/lib
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    shown = ["/usr"]
    if not _inside(python, "/usr"):
        shown += [python, f"{sys.base_prefix}/lib"]
        for folder in sorted({str(parent) for path in shown[1:] for parent in Path(path).parents}, key=len)[1:]:
            command += ["--perms", "0755", "--dir", folder]  # left to itself, bubblewrap shuts them to the user given up to
        for path in shown[1:]:
            command += ["--ro-bind", path, path]
    # Installed packages may bring the tests along, and a checkout may lie anywhere.
    places = [Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"), Path(sys.base_prefix, "lib")]
    hidden = [path for place in places for path in place.glob("python*/*-packages")]
    hidden += [Path(labkit.__file__).parents[1], cache_dir(), Path.home()]
    for path in sorted({str(path.resolve()) for path in hidden}):
        if os.path.isdir(path) and any(_inside(path, place) for place in shown):
            command += ["--tmpfs", path, "--remount-ro", path]
    command += ["--perms", "1777", "--size", str(scratch_mb << 20), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _inside(path: str, folder: str) -> bool:
    return Path(folder) in Path(path).parents
