"""Calm cores are found by trying, and given back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from metakernelbench.grading import cores
from metakernelbench.grading.cores import CalmCores, pace, siblings


class Machine:
    """Sixteen cores of two halves each, 0 and 16, 1 and 17, ..., some of which are slow."""

    def __init__(self, slow: set[int]) -> None:
        self.slow = slow
        self.where: dict[int, frozenset[int]] = {}

    def siblings(self, core: int) -> frozenset[int]:
        return frozenset({core % 16, core % 16 + 16})

    def move(self, pid: int, wanted: set[int]) -> None:
        if pid == 666:
            raise ProcessLookupError
        self.where[pid] = frozenset(wanted)

    def pace(self, _: int) -> float:
        return 60.0 if min(self.where[0]) in self.slow else 100.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(slow=set(range(12)))
    monkeypatch.setattr(cores, "siblings", made.siblings)
    monkeypatch.setattr(cores, "pace", made.pace)
    monkeypatch.setattr(os, "sched_setaffinity", made.move)
    yield made


def test_each_process_has_a_calm_core_with_both_halves_for_itself(machine: Machine) -> None:
    calm = CalmCores(range(32))
    calm.settle([0, 7, 8])
    given = list(machine.where.values())
    assert len(set(given)) == 3
    assert all(min(halves) >= 12 and len(halves) == 2 for halves in given)
    calm.release()
    assert set(machine.where.values()) == {frozenset(range(32))}


def test_whoever_has_a_calm_core_keeps_it(machine: Machine) -> None:
    calm = CalmCores(range(32))
    calm.settle([0, 7, 8])
    before = dict(machine.where)
    for pid in (0, 7, 8):
        calm.look_after(pid)
    assert machine.where == before


@pytest.mark.parametrize("pid", [0, 7])
def test_a_core_that_turned_slow_is_left_and_nobody_elses_is_taken(machine: Machine, pid: int) -> None:
    machine.slow -= {4, 5}
    calm = CalmCores(range(32))
    calm.settle([0, 7, 8])
    before = dict(machine.where)
    machine.slow.add(min(before[pid]))
    calm.look_after(pid)
    assert machine.where.pop(pid) not in before.values()
    assert all(before[other] == halves for other, halves in machine.where.items())


def test_where_no_core_is_calm_the_calmest_is_taken(machine: Machine) -> None:
    calm = CalmCores(range(32))
    calm.settle([0, 7, 8])
    machine.slow |= set(range(16))
    calm.look_after(7)
    assert len({min(machine.where[pid]) for pid in (0, 7, 8)}) == 3


def test_who_was_given_no_core_is_not_looked_after(machine: Machine) -> None:
    calm = CalmCores(range(32))
    calm.look_after(0)
    calm.settle([0, 7])
    calm.release()
    before = dict(machine.where)
    for pid in (0, 7, 9, None):
        calm.look_after(pid)
    assert machine.where == before


def test_who_gets_which_is_left_to_chance(machine: Machine) -> None:
    seen = set()
    for _ in range(40):
        CalmCores(range(32)).settle([0, 7])
        seen.add(machine.where[7])
    assert len(seen) > 1


def test_a_process_that_is_gone_is_left_out(machine: Machine) -> None:
    calm = CalmCores(range(32))
    calm.settle([0, 666])
    calm.release()
    assert machine.where == {0: frozenset(range(32))}


def test_nothing_is_done_where_there_are_few_cores(machine: Machine) -> None:
    calm = CalmCores([0, 1, 16, 17])
    calm.settle([0, 7, 8])
    assert machine.where == {} and calm.paces == {}


def test_a_core_that_is_shared_turns_slower() -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    busy = f"import os; os.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    try:
        os.sched_setaffinity(0, {core})
        alone = max(pace(2_000_000) for _ in range(20))
        with subprocess.Popen([sys.executable, "-S", "-c", busy], stdout=subprocess.PIPE) as rival:
            assert rival.stdout is not None
            rival.stdout.readline()
            shared = pace(200_000_000)
            rival.kill()
    finally:
        os.sched_setaffinity(0, allowed)
    assert shared < 0.8 * alone


def test_the_halves_of_a_core_are_known_by_the_system() -> None:
    assert 0 in siblings(0)
    assert siblings(10**6) == {10**6}
