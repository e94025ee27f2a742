"""The commands that start a host: in a sandbox of bubblewrap's, or as a plain process under a supervisor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metakernelbench.dsls.dsl import Dsl
from metakernelbench.grading import processes, runtime, slots
from metakernelbench.grading.bytecode import bytecode_folder
from metakernelbench.grading.folders import new_folder

SCRATCH = "/scratch"
"""Where a worker in a sandbox may write."""


@cache
def bubblewrap_problem() -> str | None:
    """Why bubblewrap cannot be used here, in a sentence; None where it can."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (Debian, Ubuntu: `apt install bubblewrap`)"
    command = [*_as_worker_user(), *_namespaces(), "--ro-bind", "/", "/", "--", "/bin/true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"bubblewrap does not start: {error}"
    return f"bubblewrap does not start: {done.stderr.strip()[:200]}" if done.returncode else None


@dataclass
class Launch:
    """A command line with what it needs and what is to be removed after it."""

    command: list[str]
    environment: dict[str, str]
    scratch: str
    notes: list[str]
    folders: list[Path]
    own_user: bool
    """Whether no other process of the machine has the workers' user id."""


def plain(dsl: Dsl, device: str, runtime_folder: Path, scratch: str) -> Launch:
    """A host outside of any sandbox, which runs no submission itself: its workers enter sandboxes."""
    bytecode = bytecode_folder(dsl, device)
    environment = _environment(dsl, device, scratch, bytecode)
    return Launch(_python(runtime_folder), environment, scratch, [], [], own_user=True)


def supervised(dsl: Dsl, device: str, runtime_folder: Path) -> Launch:
    """A host in its own session under a supervisor, as another user where that is possible."""
    scratch = new_folder("scratch")
    notes = [_why_no_sandbox(device), "problem modules on this machine's disk can be read", "the network is shared"]
    bytecode = bytecode_folder(dsl, device)
    drop = _drop_user(scratch, [runtime_folder, bytecode]) if os.geteuid() == 0 else []
    if not drop:
        notes.append("the worker has the verifier's user id and can read its memory")
    supervisor = Path(processes.__file__).with_name("supervisor.py")
    command = [sys.executable, "-I", "-S", str(supervisor), *drop, *_python(runtime_folder)]
    environment = _environment(dsl, device, str(scratch), bytecode)
    return Launch(command, environment, str(scratch), notes, [scratch], own_user=bool(drop))


def sandboxed(dsl: Dsl, device: str, runtime_folder: Path, size: int, command: Sequence[str] | None = None) -> Launch:
    """A host, or another command, in a sandbox of bubblewrap's, entered as a user id without rights. `size` bounds each
    of the sandbox's file systems in memory."""
    bytecode = bytecode_folder(dsl, device)
    packages = runtime.package_paths()
    sources = dict.fromkeys([Path(sys.base_prefix), Path(sys.prefix), *packages, runtime_folder, bytecode])
    outside_usr = [path for path in sources if not _within_usr(path)]
    staged, folders = _stage(outside_usr) if os.geteuid() == 0 else ({}, [])
    binds: list[str] = []
    for path in outside_usr:
        binds += ["--ro-bind", str(staged.get(path, path)), str(path)]
    for path in packages:
        if (path / "metakernelbench").is_dir():
            binds += ["--tmpfs", str(path / "metakernelbench")]
    inside = [
        *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
        *(word for name in ("bin", "sbin", "lib", "lib32", "lib64") for word in _system_folder(name)),
        *(word for name in ("ld.so.cache", "alternatives", "localtime") for word in _system_file(name)),
        *("--ro-bind-try", "/sys/devices/system/cpu", "/sys/devices/system/cpu"),
        *("--size", str(size), "--tmpfs", "/tmp", "--size", str(size), "--tmpfs", "/dev/shm"),
        *binds,
        *("--perms", "0700", "--size", str(size), "--tmpfs", SCRATCH, "--remount-ro", "/", "--chdir", SCRATCH),
    ]
    bwrap = [*_as_worker_user(), *_namespaces(), *inside, "--", *(command or _python(runtime_folder))]
    environment = _environment(dsl, device, SCRATCH, bytecode)
    return Launch([*_mounting(staged), *bwrap], environment, SCRATCH, [], folders, own_user=True)


def _python(runtime_folder: Path) -> list[str]:
    return [sys.executable, "-s", str(runtime_folder / "boot.py")]


def _environment(dsl: Dsl, device: str, scratch: str, bytecode: Path) -> dict[str, str]:
    """The worker's whole environment: nothing of the verifier's goes along but what finds the GPU and its tools."""
    kept = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        **processes.shared_environment(),
        "HOME": scratch,
        "TMPDIR": scratch,
        "XDG_CACHE_HOME": f"{scratch}/.cache",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(map(str, runtime.package_paths())),
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "PYTHONDONTWRITEBYTECODE": "1",
        **dsl.environment(device),
    }


def _namespaces() -> list[str]:
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"),
        *("--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "worker"),
    ]


def _as_worker_user() -> list[str]:
    """As root, bubblewrap is started as a user without rights: a sandbox of root's could reach the host."""
    if os.geteuid() != 0:
        return []
    uid = str(slots.worker_uid())
    return ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"]


def _drop_user(scratch: Path, needed: list[Path]) -> list[str]:
    """The command prefix that gives up root, where the worker's user can read all that it needs; else nothing."""
    readable = [Path(sys.executable).resolve(), Path(sys.prefix), *runtime.package_paths(), *needed]
    if shutil.which("setpriv") is None or not all(map(_others_can_reach, readable)):
        return []
    os.chown(scratch, slots.worker_uid(), slots.worker_uid())
    return _as_worker_user()


def _others_can_reach(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.parents) and bool(path.stat().st_mode & 0o004)


def _within_usr(path: Path) -> bool:
    return path.resolve().is_relative_to("/usr") and path.is_relative_to("/usr")


def _stage(sources: Sequence[Path]) -> tuple[dict[Path, Path], list[Path]]:
    """Sources below a folder that is closed to other users are mounted in an open one first: source → staging place,
    and the folder to remove in the end."""
    closed = [p for p in sources if not _others_can_reach(p)]
    if not closed:
        return {}, []
    folder = new_folder("stage")
    staged = {path: folder / str(number) for number, path in enumerate(closed)}
    for place in staged.values():
        place.mkdir()
    return staged, [folder]


def _mounting(staged: Mapping[Path, Path]) -> list[str]:
    """The command prefix that mounts the staged folders, in a mount namespace of its own, and then goes on."""
    if not staged:
        return []
    words = [str(word) for pair in staged.items() for word in pair]
    script = "".join(f'mount --bind "${{{2 * i + 1}}}" "${{{2 * i + 2}}}" && ' for i in range(len(staged)))
    script += f'shift {len(words)} && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *words]


def _system_folder(name: str) -> list[str]:
    path = Path("/") / name
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def _system_file(name: str) -> list[str]:
    return ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]


def _why_no_sandbox(device: str) -> str:
    reason = (
        "bubblewrap is not used with CUDA" if device == "cuda" else bubblewrap_problem() or "no sandbox was asked for"
    )
    return f"{reason}: processes and files are those of the machine"
