"""Runs a command and ends every descendant of it when standard input closes. Run as a file, with the standard library
only.

Orphans of the command become children of this process (a child subreaper), so none escapes by leaving its session.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 10.0


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    inherited = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]  # noqa: PTH208
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True)
    for descriptor in inherited:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(descriptor)
    wait_for_end(command)
    end_descendants()


def wait_for_end(command: subprocess.Popen[bytes]) -> None:
    """Return when standard input closes or the command ended."""
    while command.poll() is None:
        readable, _, _ = select.select([0], [], [], 0.2)
        if readable and not os.read(0, 1):
            return


def end_descendants() -> None:
    """Kill until none is left; a fork bomb needs several rounds."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := descendants()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def descendants() -> list[int]:
    """All processes below this one that still run."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z" or int(parent) == os.getpid():
                children.setdefault(int(parent), []).append(int(folder.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    main()
