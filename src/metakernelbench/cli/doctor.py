"""`mkb doctor`: what this machine can do, and what is missing for the rest."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich.markup import escape

from metakernelbench.cli.output import ExitCode, print_json, stdout
from metakernelbench.text import harmless

app = typer.Typer(add_completion=False)

_GB_FREE = 5
_COLOURS = {"ok": "green", "weak": "yellow", "missing": "red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["ok", "weak", "missing"]
    detail: str
    """What was found; where it is not `ok`, what that means and what to do."""
    needed: bool = False
    """Whether nothing works without it."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with the key `findings`.")] = False,
) -> None:
    """Say what this machine can do, and what is missing for the rest. Exit code 1 where something needed is missing."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            state = f"[{_COLOURS[finding.state]}]{finding.state:<8}[/]"
            stdout.print(f"{state} [bold]{finding.what}[/]: {escape(harmless(finding.detail))}", soft_wrap=True)
    if as_json:
        print_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
    if any(finding.needed and finding.state == "missing" for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def examine() -> Iterator[Finding]:
    """Look at everything, cheapest first."""
    yield _python()
    yield _machine()
    yield from _torch()
    yield from _dsls()
    yield _grading_isolation()
    yield _attempt_sandbox()
    yield _browser()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    known = sys.version_info >= (3, 12)
    return Finding(
        what="Python",
        state="ok" if known else "missing",
        detail=version if known else f"{version}; needs 3.12",
        needed=True,
    )


def _machine() -> Finding:
    cores, free = len(os.sched_getaffinity(0)), shutil.disk_usage(".").free / 1e9
    detail = f"{cores} cores, {free:.0f} GB free here"
    if free < _GB_FREE:
        return Finding(what="machine", state="weak", detail=f"{detail}; a run may fill the disk")
    if cores < 2:
        return Finding(
            what="machine", state="weak", detail=f"{detail}; verifier and worker share a core: times are noisy"
        )
    return Finding(what="machine", state="ok", detail=detail)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding(what="PyTorch", state="missing", detail=f"{error}; run `make setup`", needed=True)
        return
    yield Finding(what="PyTorch", state="ok", detail=torch.__version__, needed=True)
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        yield Finding(what="GPU", state="ok", detail=f"{torch.cuda.get_device_name()}, {memory:.0f} GB")
    else:
        yield Finding(
            what="GPU", state="missing", detail="no CUDA device: smoke workloads can be graded, full ones cannot"
        )


def _dsls() -> Iterator[Finding]:
    from metakernelbench.dsls.dsl import dsl_names, load

    for name in dsl_names():
        dsl = load(name)
        versions = dsl.versions()
        if versions:
            shown = ", ".join(f"{package} {version}" for package, version in versions.items())
            devices = " and ".join(sorted(dsl.devices))
            yield Finding(what=dsl.title, state="ok", detail=f"{shown}; runs on {devices}")
        else:
            yield Finding(what=dsl.title, state="missing", detail=f"not installed: {' '.join(dsl.requirements)}")


def _grading_isolation() -> Finding:
    from metakernelbench.grading.launching import bubblewrap_problem

    if problem := bubblewrap_problem():
        detail = f"{problem}; a submission's process is separated by less, and every verdict says so"
        return Finding(what="isolation of gradings", state="weak", detail=detail)
    return Finding(what="isolation of gradings", state="ok", detail="bubblewrap, without network or host files")


def _attempt_sandbox() -> Finding:
    from metakernelbench.attempts.sandbox.available import sandbox_available

    if problem := sandbox_available():
        detail = f"{problem}; only the scripted model may run, in a sandbox without isolation"
        return Finding(what="sandbox of attempts", state="weak", detail=detail)
    return Finding(what="sandbox of attempts", state="ok", detail="bubblewrap")


def _browser() -> Finding:
    if path := shutil.which("chromium"):
        return Finding(what="browser", state="ok", detail=f"{path} for the tests of the report")
    return Finding(what="browser", state="weak", detail="no Chromium: the tests of the report are skipped")
