"""Import this, after `tree` and before torch, in a script that is a verifier itself: it begins anew in the environment
of one, since the numbers of threads are read when torch is imported."""

from __future__ import annotations

import os
import sys

from metakernelbench.grading.processes import shared_environment

_WANTED = shared_environment()

if any(os.environ.get(name) != value for name, value in _WANTED.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_WANTED})
