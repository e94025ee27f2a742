"""The GPUs of this machine that a judge may use, and how judges of several processes share them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from metakernelbench.errors import InfrastructureFault


def visible_gpus() -> list[str]:
    """GPUs as `CUDA_VISIBLE_DEVICES` names them: those that it lists where it is set, else all of the machine.

    Where nothing can be found out it is the first one: whether it exists, a verifier says better.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in map(str.strip, listed.split(",")) if name] or ["0"]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ["0"]
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return [str(number) for number in range(count)] or ["0"]


@contextlib.contextmanager
def reservation(gpu: str) -> Iterator[bool]:
    """Whether the GPU has been reserved for the caller, until the end of the block. A process that dies lets go.

    The verifier locks the device besides. A reservation is for choosing: who gets none looks for another GPU.
    """
    name = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in gpu)
    path = Path(tempfile.gettempdir()) / f"metakernelbench-judge-cuda-{name}.lock"
    try:
        descriptor = _opened(path)
    except OSError as error:
        raise InfrastructureFault(f"the lock file {path} cannot be opened: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    """For reading, which is enough to lock it: the file may be another user's."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    return os.open(path, flags | os.O_CREAT, 0o644)
