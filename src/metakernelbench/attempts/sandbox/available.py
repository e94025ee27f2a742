"""Whether a bubblewrap sandbox can be had on this machine. Imports nothing heavy."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from metakernelbench.attempts.sandbox.command import become, must_be_staged, system_links

_NEEDED = ("bwrap", "tmux", "bash", "prlimit", "setpriv", "unshare", "taskset", "tar")


@cache
def sandbox_available() -> str | None:
    """None where a bubblewrap sandbox can be had, else one sentence that says why not."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"this machine has no {', '.join(missing)} (Debian: apt-get install bubblewrap tmux util-linux)"
    folders = (Path(sys.base_prefix), Path(sysconfig.get_path("purelib")))
    staging = ["unshare", "--mount", "--propagation", "private"] if must_be_staged(*folders) else []
    probe = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--cap-drop", "ALL"]
    view = ["--ro-bind", "/usr", "/usr", *system_links(), "--proc", "/proc", "--dev", "/dev"]
    command = [*staging, *become(0), *probe, *view, "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work here: {error}"
    if done.returncode != 0:
        return f"bubblewrap does not work here: {done.stderr.strip()[:200] or f'exit status {done.returncode}'}"
    return None
