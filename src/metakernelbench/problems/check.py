"""Checks that a problem is fit to be posed: honest inputs, a sound reference, an anchor, outputs worth computing.

`check_problem` runs every check of `check_rules.py` on one workload and reports each by name. What a check finds wrong
comes with what to do about it, because its reader is the author of a new problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from metakernelbench.errors import UnknownName
from metakernelbench.grading.compare import reference_numerics
from metakernelbench.problems.catalog import load
from metakernelbench.problems.check_rules import CHECKS
from metakernelbench.problems.check_subject import Subject, Wrong
from metakernelbench.problems.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was checked."""

    name: str
    passed: bool
    detail: str
    """What was found; for a failure also what to do."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """All checks of one problem."""

    problem: str
    workload: str
    device: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)


def check_problem(id: str, device: str = "cpu", workload: str = "smoke") -> CheckReport:
    """Run every check of a problem. Raises `UnknownName` for an unknown id; everything else ends up in the report."""
    start = time.perf_counter()
    try:
        problem = load(id)
    except UnknownName:
        raise
    except Exception as error:  # a problem module may raise anything
        detail = f"{type(error).__name__}: {error}; every part that problems/problem.py lists must be there"
        failed = Check(name="loads", passed=False, detail=detail)
        seconds = round(time.perf_counter() - start, 3)
        return CheckReport(problem=id, workload=workload, device=device, checks=(failed,), seconds=seconds)
    return check(problem, device=device, workload=workload)


def check(problem: Problem, device: str = "cpu", workload: str = "smoke") -> CheckReport:
    """Run every check of a loaded problem."""
    start = time.perf_counter()
    threads = torch.get_num_threads()
    if workload == "smoke":
        torch.set_num_threads(1)  # tensors this small are slower on several, most of all on a busy machine
    try:
        checks = _run_all(Subject(problem, workload, torch.device(device)))
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - start
    return CheckReport(problem=problem.id, workload=workload, device=device, checks=checks, seconds=round(seconds, 3))


def _run_all(subject: Subject) -> tuple[Check, ...]:
    checks: list[Check] = []
    for name, run in CHECKS.items():
        checks.append(_run(name, run, subject))
        if name == "runs" and not checks[-1].passed:
            break  # nothing else can be said of a reference that does not run
    return tuple(checks)


def _run(name: str, run: Callable[[Subject], str], subject: Subject) -> Check:
    try:
        with reference_numerics():
            detail = run(subject)
    except Wrong as wrong:
        return Check(name=name, passed=False, detail=str(wrong))
    except Exception as error:  # a problem module may raise anything
        return Check(name=name, passed=False, detail=f"{type(error).__name__}: {error}")
    return Check(name=name, passed=True, detail=detail)
