"""Moves the calling process into a sandbox that bubblewrap made, and takes away every right it had.

Lets a host that imported torch long ago fork a worker into a fresh sandbox within milliseconds. Needs root; elsewhere
the host itself starts inside its sandbox.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_NAMESPACES = ("cgroup", "ipc", "uts", "net", "pid", "mnt", "user")
"""In the order in which they are entered: the user namespace last, since rights over the others end there."""
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63
_USER_INSIDE = 1000


def enter(holder: int) -> None:
    """Enter the namespaces of process `holder` and go on as the first process of this one's descent in there: returns
    in a forked child, whose end this process reports as its own."""
    opened = {name: os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _NAMESPACES}
    os.setgroups([])
    for name, descriptor in opened.items():
        try:
            os.setns(descriptor, 0)
        except OSError as error:
            raise OSError(error.errno, f"the {name} namespace of process {holder} cannot be entered") from None
        os.close(descriptor)
    child = os.fork()  # only a child is in the new pid namespace
    if child:
        _end_as(os.waitpid(child, 0)[1])
    os.setresgid(_USER_INSIDE, _USER_INSIDE, _USER_INSIDE)
    os.setresuid(_USER_INSIDE, _USER_INSIDE, _USER_INSIDE)
    _drop_capabilities()
    os.setsid()


def _end_as(status: int) -> None:
    """End this process in the way that `status` tells of another."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # numbers beyond the kernel's last are refused, which is fine
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "capabilities could not be dropped")
    if "CapEff:\t0000000000000000" not in Path("/proc/self/status").read_text():
        raise OSError("capabilities remain")
