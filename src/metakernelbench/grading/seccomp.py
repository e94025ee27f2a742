"""A filter of system calls that no kernel author needs and that widen what of the host's kernel can be attacked.

It is a program for the kernel's own small machine (classic BPF), as `bwrap --seccomp` takes it. Calls on the list fail
as if the user had no right to them; everything else goes through. Written for x86-64, where both DSLs run.

The agents' sandboxes start under it, and a worker that entered a sandbox from outside takes it upon itself.
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

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NO_RIGHT = 0x00050000 | 1  # fail with EPERM
_X86_64 = 0xC000003E
_NUMBER, _ARCHITECTURE = 0, 4
"""Where in its input the program finds the call's number and the architecture it was made for."""
_X32_CALLS = 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2


def program() -> bytes | None:
    """The filter; None on a machine of another kind, whose numbers are others."""
    if platform.machine() != "x86_64":
        return None
    numbers = sorted(REFUSED.values())
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, len(numbers) + 1, 0, _X32_CALLS),
        *((_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NO_RIGHT),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


class _Program(ctypes.Structure):
    """A program as the kernel takes it: how many steps, and where they are (`struct sock_fprog`)."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def install() -> None:
    """Put this process, and all that it starts, under the filter for good. Raises `OSError` where the kernel has
    none."""
    if (steps := program()) is None:
        return
    held = ctypes.create_string_buffer(steps, len(steps))
    whole = _Program(len(steps) // struct.calcsize("=HBBI"), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(whole), 0, 0
    ):
        raise OSError(ctypes.get_errno(), f"no filter of system calls: {os.strerror(ctypes.get_errno())}")
