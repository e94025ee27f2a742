"""A study that is read anew from its store while attempts run: only what has changed since the last look."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.report.page import Report
from metakernelbench.report.study import Running, Study, annotations_of, study_of
from metakernelbench.store.store import Standing, Store

_TRAJECTORY = Path("trial", "agent", "trajectory.json")
"""Where Harbor keeps the trajectory of a running attempt, inside its work folder."""
_FEW = 50
"""Up to so many records are read one by one, more of them all at once."""


class LiveStudy:
    """An experiment's report that follows its store. Safe to use from several threads."""

    def __init__(self, store: Store, name: str) -> None:
        """Raises `UnknownName` for an experiment that the store does not have."""
        self._store = store
        self._name = name
        self._records: dict[str, AttemptRecord] = {}
        self._standings: dict[str, Standing] = {}
        self._running: dict[str, tuple[int, Running]] = {}
        self._seen: object = None
        self._changed = threading.Condition()
        self._looking = threading.Lock()
        self._rendering = threading.Lock()
        self._report: Report | None = None
        self.version = 0
        """Goes up whenever something has changed."""
        self.look()

    def look(self, *, closely: bool = False) -> bool:
        """See what is new in the store; whether anything is. Looking closely, annotations are read as well."""
        with self._looking:
            study, seen = self._as_it_is()
            same = seen == self._seen
            if same and not closely:
                return False
            study = replace(study, annotations=annotations_of(study, self._store))
            if same and _answers(study) == _answers(self.study):
                return False
            with self._changed:
                self._report, self._seen, self.version = Report(study), seen, self.version + 1
                self._changed.notify_all()
            return True

    def _as_it_is(self) -> tuple[Study, object]:
        """The study without its annotations, and everything that tells whether it has changed."""
        name, store = self._name, self._store
        experiment, standings = store.experiment(name), store.standings(name)
        planned = {attempt.key for attempt in experiment.plan.attempts}
        held = planned & set(store.leases.held(name)) - set(standings)
        self._running = dict(self._now_running(held))
        rematches, faults = store.rematches.of(name), len(store.faults(name))
        self._read(standings)
        study = study_of(
            experiment,
            {a.key: self._records[a.key] for a in experiment.plan.attempts if a.key in self._records},
            rematches=rematches.values(),
            faults=faults,
            running={key: running for key, (_, running) in self._running.items()},
        )
        marks = {key: mark for key, (mark, _) in self._running.items()}
        measured = {pair: rematch.measured_at for pair, rematch in rematches.items()}
        return study, (experiment.updated_at, standings, marks, measured, faults)

    def _read(self, standings: dict[str, Standing]) -> None:
        """Bring the records in line with how the attempts stand now."""
        new = [key for key, standing in standings.items() if self._standings.get(key) != standing]
        if len(new) > _FEW:
            self._records = dict(self._store.attempts(self._name))
        else:
            found = {key: self._store.attempt(self._name, key) for key in new}
            self._records |= {key: record for key, record in found.items() if record is not None}
        self._standings = standings

    def _now_running(self, keys: Iterable[str]) -> Iterable[tuple[str, tuple[int, Running]]]:
        """Key → (a mark that changes with it, what is known of it) of attempts that a runner is at."""
        for key in keys:
            path = self._store.work_folder(self._name, key) / _TRAJECTORY
            mark = _mark(path)
            known = self._running.get(key)
            yield key, known if known is not None and known[0] == mark else (mark, Running(trajectory=_json(path)))

    def wait(self, version: int, seconds: float) -> int:
        """Wait until the version differs from `version`, but no longer than so many seconds; returns it."""
        with self._changed:
            if self.version == version:
                self._changed.wait(timeout=seconds)
            return self.version

    def wake(self) -> None:
        """End every wait: there will be no more news."""
        with self._changed:
            self._changed.notify_all()

    def shell(self) -> str:
        """The page around the pages, with the overview in it."""
        with self._rendering:
            return self.report.shell(self.report.overview(), parts=None)

    def part(self, name: str) -> str:
        """A part, as it is now. Raises `KeyError` for an unknown one."""
        with self._rendering:
            return self.report.part(name)

    @property
    def report(self) -> Report:
        assert self._report is not None
        return self._report

    @property
    def study(self) -> Study:
        return self.report.study


def _answers(study: Study) -> int:
    """How many answers of annotators the study rests on."""
    return 0 if study.annotations is None else len(study.annotations.answers)


def _mark(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _json(path: Path) -> dict[str, Any] | None:
    """The trajectory so far; None where there is none, or where it is being written just now."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
