"""Commands of ours as they are printed, to be pasted into a shell."""

from __future__ import annotations

import shlex


def run_command(file: str, *, store: str | None = None, model: str | None = None) -> str:
    """The `mkb run` of an experiment's file."""
    return shlex.join(["mkb", "run", file, *_given("--store", store), *_given("--model", model)])


def report_command(experiment: str, *, store: str | None = None) -> str:
    """The `mkb report` of an experiment."""
    return shlex.join(["mkb", "report", experiment, *_given("--store", store)])


def _given(flag: str, value: str | None) -> list[str]:
    return [] if value is None else [flag, value]
