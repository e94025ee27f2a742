"""Temporary folders of gradings, named after the process that made them, so that those of a killed one can be
removed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BLOCK, _PAGE = 512, 4096
_NAME = re.compile(r"mkb-(\d+)-\w+-\w+")


def new_folder(kind: str) -> Path:
    """A new folder that other users can enter and not change. Its maker removes it."""
    folder = Path(tempfile.mkdtemp(prefix=f"mkb-{os.getpid()}-{kind}-"))
    folder.chmod(0o755)
    return folder


def sweep() -> None:
    """Remove what processes left that no longer run."""
    for folder in Path(tempfile.gettempdir()).glob("mkb-*"):
        match = _NAME.fullmatch(folder.name)
        if match and not Path("/proc", match[1]).exists():
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder and all that a submission may have put there, folders inside each other without end included."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=False)


def size_of(folder: Path) -> int:
    """Bytes that the files in a folder take on disk, a page at least each. What is nested so deep that it has no path
    counts as more than anybody may write."""
    total, waiting = 0, [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    total += max(_PAGE, entry.stat(follow_symlinks=False).st_blocks * _BLOCK)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return sys.maxsize
    return total
