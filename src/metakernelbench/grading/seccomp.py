"""A filter of system calls that no kernel author needs and that widen what of the host's kernel can be attacked.

It is a program for the kernel's own small machine (classic BPF), as `bwrap --seccomp` takes it. Calls on the list fail
as if the user had no right to them; everything else goes through. Written for x86-64, where both DSLs run.

The agents' sandboxes start under it, and a worker that entered a sandbox from outside takes it upon itself, together
with calls that an agent's tools need and a kernel does not.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

REFUSED = {
    "ptrace": 101,
    "personality": 135,
    "acct": 163,
    "swapon": 167,
    "reboot": 169,
    "init_module": 175,
    "quotactl": 179,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "perf_event_open": 298,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
}
"""Name → number on x86-64."""

REFUSED_TO_WORKERS = {
    "epoll_create": 213,
    "timer_create": 222,
    "timerfd_create": 283,
    "epoll_create1": 291,
}
"""Thousands of waiters behind one timer are work that interrupts whoever runs just then, and is charged to nobody."""
_SOCKET, _AF_UNIX = 41, 1
"""A worker's sockets must be local. The last process that holds a TCP connection can be made to wait while it is
closed, and a connection that is sent to the verifier is last held there."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NO_RIGHT = 0x00050000 | 1  # fail with EPERM
_X86_64 = 0xC000003E
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Where in its input the program finds the call's number, the architecture it was made for, and an argument."""
_X32_CALLS = 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2


def program(*, for_worker: bool = False) -> bytes | None:
    """The filter; None on a machine of another kind, whose numbers are others."""
    if platform.machine() != "x86_64":
        return None
    numbers = sorted((REFUSED | REFUSED_TO_WORKERS if for_worker else REFUSED).values())
    sockets = [(_EQUAL, 0, 2, _SOCKET), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, _AF_UNIX)] if for_worker else []
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, len(numbers) + len(sockets) + 1, 0, _X32_CALLS),
        *((_EQUAL, len(numbers) + len(sockets) - place, 0, number) for place, number in enumerate(numbers)),
        *sockets,
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NO_RIGHT),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


class _Program(ctypes.Structure):
    """A program as the kernel takes it: how many steps, and where they are (`struct sock_fprog`)."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def install() -> None:
    """Put this worker, and all that it starts, under the filter for good. Raises `OSError` where the kernel has
    none."""
    if (steps := program(for_worker=True)) is None:
        return
    held = ctypes.create_string_buffer(steps, len(steps))
    whole = _Program(len(steps) // struct.calcsize("=HBBI"), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(whole), 0, 0
    ):
        raise OSError(ctypes.get_errno(), f"no filter of system calls: {os.strerror(ctypes.get_errno())}")
