"""The command line that starts a bubblewrap sandbox, and who it runs as.

A process inside must never be the host's root, not even behind a user namespace: started as root, this first becomes a
user of its own, one for each slot, and only then starts bubblewrap. An ordinary user starts it as itself.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from metakernelbench.attempts.sandbox.limits import Limits
from metakernelbench.attempts.sandbox.runtime import SITE, VENV, Runtime
from metakernelbench.grading.slots import own_number

HOME = "/home/agent"
DAEMON = "/opt/daemon.py"
WRITABLE = {"app": "/app", "home": HOME, "mailbox": "/mailbox", "logs": "/logs"}
"""Folder of the state tree → where it stands inside, writable."""
READ_ONLY = {"task": "/task", "etc": "/etc"}
"""Folder of the state tree → where it stands inside, read-only."""

STAGED = ("prefix", "site", "docs")
"""Empty folders of the state tree, on which what root can read and the slot's user cannot is shown."""

FILTER = "calls.bpf"
"""File of the state tree that holds the filter of system calls, where there is one."""

_FIRST_UID = 60600
_TMP_MB = 1024
_SHARED_MEMORY_MB = 256


def slot_uid(slot: int) -> int | None:
    """The user id of a sandbox started by root (a range that no distribution gives out), the same whenever this process
    asks and no other process's; None for an ordinary user."""
    return _FIRST_UID + own_number("sandbox", slot) if os.geteuid() == 0 else None


def become(slot: int) -> list[str]:
    """The command that turns root into the slot's user and runs the rest; nothing for an ordinary user."""
    uid = slot_uid(slot)
    return [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


def must_be_staged(*folders: Path) -> bool:
    """Whether root has to show some of these folders elsewhere before it gives up its rights: the slot's user owns
    nothing, and reaches nothing below a private home."""
    return os.geteuid() == 0 and not all(open_to_others(folder) for folder in folders)


def open_to_others(path: Path) -> bool:
    """Whether a user with no rights of its own can reach and read a folder."""
    return all(parent.stat().st_mode & 0o001 for parent in path.parents) and path.stat().st_mode & 0o005 == 0o005


def launch_command(
    state: Path, runtime: Runtime, limits: Limits, *, docs: Path | None, slot: int, memory_mb: int, fd: int
) -> list[str]:
    """The whole command line. `state` holds the folders of `WRITABLE`, `READ_ONLY` and `STAGED`, daemon.py,
    pyvenv.cfg and perhaps `FILTER`; `docs` is shown as /docs."""
    sources = {"prefix": runtime.prefix, "site": runtime.site, **({} if docs is None else {"docs": docs})}
    # The mount namespace in which these show ends with the sandbox.
    staged = {name: folder for name, folder in sources.items() if must_be_staged(folder)}
    places = {name: state / name if name in staged else folder for name, folder in sources.items()}
    # A shell can open files under one digit only; the socket may have any number.
    filter_fd = next(number for number in range(9, 2, -1) if number != fd)
    filtered = (state / FILTER).is_file()
    start = [*limits.prefix, *become(slot), *bubblewrap(state, runtime, places, memory_mb, fd)]
    if filtered:
        start[start.index("bwrap") + 1 : start.index("bwrap") + 1] = ["--seccomp", str(filter_fd)]
    script = [f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))}" for group in limits.groups]
    script += [
        f"mount --bind {shlex.quote(str(folder))} {shlex.quote(str(places[name]))}" for name, folder in staged.items()
    ]
    opened = f" {filter_fd}< {shlex.quote(str(state / FILTER))}" if filtered else ""
    shell = ["sh", "-e", "-c", "\n".join([*script, f'exec "$@"{opened}']), "launch", *start]
    return ["unshare", "--mount", "--propagation", "private", *shell] if staged else shell


def bubblewrap(state: Path, runtime: Runtime, places: Mapping[str, Path], memory_mb: int, fd: int) -> list[str]:
    """The bubblewrap part: `places` says where prefix, site and docs can be read by the user who starts it."""
    # What lies in a memory file system counts as memory and cannot be reclaimed: much less than there is.
    tmp, shared = min(_TMP_MB, memory_mb // 4), min(_SHARED_MEMORY_MB, memory_mb // 16)
    arguments = [
        "bwrap",
        *("--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"),
        *("--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--hostname", "sandbox", "--clearenv"),
        *("--ro-bind", "/usr", "/usr"),
        *system_links(),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(tmp << 20), "--tmpfs", "/tmp", "--size", str(shared << 20), "--tmpfs", "/dev/shm"),
    ]
    for name, inside in READ_ONLY.items():
        arguments += ["--ro-bind", str(state / name), inside]
    for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"):
        arguments += ["--ro-bind-try", path, path]
    for name, inside in WRITABLE.items():
        arguments += ["--bind", str(state / name), inside]
    if "docs" in places:
        arguments += ["--ro-bind", str(places["docs"]), "/docs"]
    arguments += _python(runtime, places["prefix"], places["site"])
    arguments += ["--ro-bind", str(state / "pyvenv.cfg"), str(VENV / "pyvenv.cfg")]
    arguments += ["--ro-bind", str(state / "daemon.py"), DAEMON, "--remount-ro", "/", "--chdir", "/app"]
    return [*arguments, str(runtime.interpreter), "-I", "-S", DAEMON, str(fd)]


def system_links() -> Iterator[str]:
    """/bin, /lib and so on, as the host has them: links into /usr, or folders of their own."""
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def _python(runtime: Runtime, prefix: Path, site: Path) -> list[str]:
    arguments: list[str] = []
    if not runtime.is_system:
        own_packages = runtime.prefix / SITE.relative_to(VENV)
        arguments += ["--ro-bind", str(prefix), str(runtime.prefix), "--tmpfs", str(own_packages)]
    for name in ("python", "python3", runtime.interpreter.name):
        arguments += ["--symlink", str(runtime.interpreter), str(VENV / "bin" / name)]
    for entry in runtime.entries:
        arguments += ["--ro-bind", str(site / entry), str(SITE / entry)]
    return arguments


def environment_inside(cpus: int) -> dict[str, str]:
    """What every command inside starts with."""
    path: Sequence[str] = ("/task/bin", str(VENV / "bin"), "/usr/local/bin", "/usr/bin", "/bin")
    return {
        "PATH": ":".join(path),
        "HOME": HOME,
        "USER": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": str(cpus),
        "PYTHONPATH": "/task",
    }
