"""A store: what experiments have planned and what their attempts have left, safe against a kill at any moment.

    <folder>/store.sqlite     the database (elsewhere, where a URL is given)
    <folder>/artifacts/       large texts
    <folder>/runners/         a locked file for each runner that is alive
    <folder>/work/            where attempts that are running, or were given up, keep their files

A record is in the store entirely or not at all: its artifacts are on the disk before the row that refers to them is
committed, in the transaction that also gives the attempt's lease back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from sqlalchemy import ColumnElement, and_, insert, select, update
from sqlalchemy.exc import IntegrityError

from metakernelbench.attempts.record import AttemptRecord, Usage
from metakernelbench.errors import InfrastructureFault, StoreError, UnknownName
from metakernelbench.experiments.planned import Plan, PlannedAttempt, PlannedComparison
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.store import schema
from metakernelbench.store.annotations import Annotations
from metakernelbench.store.artifacts import Artifacts
from metakernelbench.store.database import (
    Database,
    NoStore,
    database_of,
    outlasts_a_lost_connection,
    without_password,
)
from metakernelbench.store.leases import Leases, Owner, release_in
from metakernelbench.store.packing import digest_of_part, outline, pack, part, unpack
from metakernelbench.store.rematches import Rematches
from metakernelbench.text import harmless

_DAMAGED = "it is damaged or of another version: bring the store back from a copy, or run the experiment in a new one"

_DATABASES = ("postgresql", "postgres", "sqlite")
"""What the URL of a store may begin with, apart from the name of a driver."""
_AT_ONCE = 500
"""Rows asked for in one query, where they are heavy."""


@dataclass(frozen=True, kw_only=True)
class StoredExperiment:
    """An experiment as last run."""

    name: str
    spec: ExperimentSpec
    plan: Plan
    created_at: str
    updated_at: str


@dataclass(frozen=True, slots=True)
class Standing:
    """The current record of one attempt, without what is heavy."""

    ended: str
    passed: bool | None
    """None where nothing was judged: a skipped treatment."""
    speedup: float | None
    skill: str | None
    """Digest of the skill that it kept."""
    attached: str | None
    """Digest of the source skill that it was given."""
    task: str
    """Fingerprint of its task, with a stand-in for what was attached to it."""
    contract_version: int


_STANDING = [schema.attempts.c[field.name] for field in fields(Standing)]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One try of an attempt that failed for a reason of ours."""

    key: str
    try_number: int
    gave_up: bool
    """Whether this was the last try of its run."""
    message: str
    at: str


class Store:
    """A database and its folder. Safe to use from several threads and by several processes."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.folder = folder
        self.name = database.name
        self.leases = Leases(database, folder / "runners")
        self.annotations = Annotations(database)
        self.rematches = Rematches(database)
        self._database = database
        self._artifacts = Artifacts(folder / "artifacts")

    @classmethod
    def open(cls, location: str | Path, *, folder: Path | None = None, create: bool = False) -> Self:
        """Open the store in a folder, or at a database URL with the `folder` of its artifacts. Raises `StoreError`."""
        if not str(location):
            raise StoreError("the store's name is empty", hint="give a folder")
        scheme, is_url, _ = str(location).partition("://")
        if is_url and scheme.partition("+")[0] not in _DATABASES:
            raise StoreError(
                f"the store {without_password(location)} is no folder and no PostgreSQL database",
                hint="give a folder, or a URL such as postgresql://user@host/name",
            )
        if is_url:
            if folder is None:
                raise StoreError(
                    f"the store {without_password(location)} needs a folder for its artifacts",
                    hint="set `artifacts` in the experiment's file, and name that file instead of the store",
                )
            return cls(Database(str(location), create=create), folder)
        folder = Path(location)
        database = database_of(folder)
        if create:
            _make_folder(folder)
        elif not Path(database.database or "").is_file():
            raise NoStore(f"there is no store in {folder}", hint="`mkb run` makes one")
        return cls(Database(database, create=create), folder)

    def tell(self, told: Callable[[str], None]) -> None:
        """From now on `told` hears, a sentence each, what the user should know while the store is used."""
        self._database.told = told

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def work_folder(self, experiment: str, key: str) -> Path:
        """Where a running attempt keeps its files; gone once its record is in the store."""
        return self.folder / "work" / experiment / key.replace("/", "__")

    # Experiments

    @outlasts_a_lost_connection
    def save_experiment(self, spec: ExperimentSpec, plan: Plan) -> None:
        """Record an experiment as it is about to be run; replaces what was recorded under its name."""
        now = _now()
        row = {"spec": spec.model_dump_json(), "plan": self._artifacts.put(_plan_to_json(plan)), "updated_at": now}
        table = schema.experiments
        replace = update(table).where(table.c.name == spec.name).values(row)
        try:
            with self._database.writing() as connection:
                if connection.execute(replace).rowcount == 0:
                    connection.execute(insert(table).values(name=spec.name, created_at=now, **row))
        except IntegrityError:  # another runner has inserted it in the meantime
            with self._database.writing() as connection:
                connection.execute(replace)

    @outlasts_a_lost_connection
    def experiments(self) -> list[str]:
        """The names of all experiments, oldest first."""
        query = select(schema.experiments.c.name).order_by(schema.experiments.c.created_at, schema.experiments.c.name)
        with self._database.reading() as connection:
            return list(connection.execute(query).scalars())

    @outlasts_a_lost_connection
    def experiment(self, name: str) -> StoredExperiment:
        """An experiment as last run. Raises `UnknownName`."""
        with self._database.reading() as connection:
            row = connection.execute(select(schema.experiments).where(schema.experiments.c.name == name)).first()
        if row is None:
            raise UnknownName("experiment", name, self.experiments(), hint=f"the store {self.name} has no other")
        try:
            spec = ExperimentSpec.model_validate_json(row.spec)
        except ValidationError as error:
            said = f"the specification of `{name}` in {self.name} cannot be read: {_why(error)}"
            raise StoreError(said, hint=_DAMAGED) from error
        text = self._artifacts.get(row.plan)
        try:
            plan = _plan_from_json(text)
        except (ValueError, TypeError, KeyError) as error:
            said = f"the plan of `{name}` in {self.name} cannot be read: {_why(error)}"
            raise StoreError(said, hint=_DAMAGED) from error
        return StoredExperiment(name=name, spec=spec, plan=plan, created_at=row.created_at, updated_at=row.updated_at)

    # Records

    @outlasts_a_lost_connection
    def save_attempt(
        self,
        experiment: str,
        planned: PlannedAttempt,
        record: AttemptRecord,
        *,
        attached: str | None = None,
        task: str | None = None,
        owner: Owner | None = None,
    ) -> None:
        """Keep the record of an attempt, and give its lease back.

        `attached` is the digest of what it was given of its source. `task` is the fingerprint of its task with a
        stand-in for that; for a solo attempt it is the record's own.
        A record that is there already stays in the database as superseded. With `owner`, raises `InfrastructureFault`
        where the lease has meanwhile gone to another runner: that runner's record counts.
        """
        judged, texts = record.final, self._artifacts.batch()
        row = {
            "experiment": experiment,
            "key": planned.key,
            "task": record.fingerprint if task is None else task,
            "attached": attached,
            "contract_version": judged.contract_version if judged else CONTRACT_VERSION,
            "ended": record.ended,
            "passed": None if record.ended == "skipped" else bool(judged and judged.passed),
            "speedup": judged.speedup if judged else None,
            "skill": None if record.skill is None else texts.put(record.skill),
            "record": pack(record, texts.put),
            "started_at": record.started_at,
            "finished_at": record.finished_at,
        }
        texts.keep()
        table = schema.attempts
        with self._database.writing() as connection:
            if owner is not None and not release_in(connection, experiment, planned.key, owner):
                raise InfrastructureFault(f"another runner has taken over {planned.key}: this record is dropped")
            connection.execute(
                update(table).where(_current(experiment), table.c.key == planned.key).values(superseded_at=_now())
            )
            connection.execute(insert(table).values(row))

    def attempt(self, experiment: str, key: str) -> AttemptRecord | None:
        """The record of one attempt; None where there is none."""
        return dict(self._records(experiment, [key])).get(key)

    def attempts(self, experiment: str) -> Iterator[tuple[str, AttemptRecord]]:
        """Key and record of every finished attempt that the experiment's plan asks for, in the plan's order."""
        keys = [attempt.key for attempt in self.experiment(experiment).plan.attempts]
        for some in batched(keys, _AT_ONCE):
            found = dict(self._records(experiment, some))
            yield from ((key, found[key]) for key in some if key in found)

    def outlines(self, experiment: str) -> Iterator[tuple[str, AttemptRecord]]:
        """As `attempts`, in any order, with digests in the place of large texts and without trajectories: no artifact
        is read, which a full study has thousands of."""
        wanted = {attempt.key for attempt in self.experiment(experiment).plan.attempts}
        return ((key, self._read(key, outline, record)) for key, record in self._packed(experiment, wanted))

    def _records(self, experiment: str, keys: Iterable[str]) -> Iterator[tuple[str, AttemptRecord]]:
        whole = partial(unpack, artifacts=self._artifacts)
        return ((key, self._read(key, whole, record)) for key, record in self._packed(experiment, keys))

    def _read[T](self, key: str, reading: Callable[[str], T], packed: str) -> T:
        try:
            return reading(packed)
        except (ValueError, TypeError, KeyError) as error:  # no JSON, or another shape than a record has
            raise StoreError(
                f"the record of {key} in {self.name} cannot be read: {_why(error)}", hint=_DAMAGED
            ) from error

    def _packed(self, experiment: str, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Key and record as they lie in the database."""
        table = schema.attempts
        for some in batched(keys, _AT_ONCE):
            query = select(table.c.key, table.c.record).where(_current(experiment), table.c.key.in_(some))
            with self._database.reading() as connection:
                rows = connection.execute(query).all()
            yield from ((row.key, row.record) for row in rows)

    @outlasts_a_lost_connection
    def standings(self, experiment: str, keys: Iterable[str] | None = None) -> dict[str, Standing]:
        """Key → how the attempt stands, for every current record, or for those of `keys`."""
        query = select(schema.attempts.c.key, *_STANDING).where(_current(experiment))
        queries = [query] if keys is None else [query.where(_among(some)) for some in batched(keys, _AT_ONCE)]
        with self._database.reading() as connection:
            rows = [row for query in queries for row in connection.execute(query).all()]
        return {key: Standing(*values) for key, *values in rows}

    @outlasts_a_lost_connection
    def standing(self, experiment: str, key: str) -> Standing | None:
        """How one attempt stands; None where it has no record."""
        query = select(*_STANDING).where(_current(experiment), schema.attempts.c.key == key)
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        return None if row is None else Standing(*row)

    def skill(self, experiment: str, key: str) -> str | None:
        """The skill that an attempt kept; None where it kept none or has no record."""
        standing = self.standing(experiment, key)
        return None if standing is None or standing.skill is None else self._artifacts.get(standing.skill)

    def digests(self, experiment: str, name: str, keys: Iterable[str]) -> dict[str, str | None]:
        """Key → digest of one of its record's texts (`kernel`, `trajectory`), None where it left none."""
        rows = self._packed(experiment, keys)
        return {key: self._read(key, partial(digest_of_part, name=name), record) for key, record in rows}

    def part(self, experiment: str, key: str, name: str) -> str | None:
        """One of a record's texts, a trajectory as JSON; None where the attempt left none or has no record."""
        for _, record in self._packed(experiment, [key]):
            return self._read(key, partial(part, name=name, artifacts=self._artifacts), record)
        return None

    def usages(self, experiment: str, keys: Iterable[str]) -> Iterator[tuple[str, Usage]]:
        """Key and usage of finished attempts."""
        for key, record in self._packed(experiment, keys):
            yield key, self._read(key, _usage, record)

    def text(self, digest: str) -> str:
        """A text that the store keeps, such as a skill, by its digest. Raises `StoreError`."""
        return self._artifacts.get(digest)

    # Faults

    @outlasts_a_lost_connection
    def record_fault(self, experiment: str, key: str, *, try_number: int, gave_up: bool, message: str) -> None:
        """Remember that a try of an attempt failed for a reason of ours."""
        row = {"try_number": try_number, "gave_up": gave_up, "message": harmless(message), "at": _now()}
        with self._database.writing() as connection:
            connection.execute(insert(schema.faults).values(experiment=experiment, key=key, **row))

    @outlasts_a_lost_connection
    def faults(self, experiment: str) -> list[Fault]:
        """All faults of an experiment, oldest first."""
        table = schema.faults
        columns = [table.c[field.name] for field in fields(Fault)]
        query = select(*columns).where(table.c.experiment == experiment).order_by(table.c.id)
        with self._database.reading() as connection:
            return [Fault(**row._mapping) for row in connection.execute(query)]


def _usage(packed: str) -> Usage:
    return Usage.model_validate(json.loads(packed)["usage"])


def _current(experiment: str) -> ColumnElement[bool]:
    table = schema.attempts
    return and_(table.c.experiment == experiment, table.c.superseded_at.is_(None))


def _among(keys: Iterable[str]) -> ColumnElement[bool]:
    return schema.attempts.c.key.in_(keys)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {folder}: {error.strerror}", hint="choose another folder for the store"
        ) from error


def _why(error: Exception) -> str:
    """What is wrong with what was read, on one line; of several things the first."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"`{'.'.join(str(part) for part in first['loc'])}`: {first['msg']}"
    return str(error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _plan_to_json(plan: Plan) -> str:
    return json.dumps(
        {
            "attempts": [_fields_of(attempt) for attempt in plan.attempts],
            "comparisons": [_fields_of(comparison) for comparison in plan.comparisons],
        }
    )


def _fields_of(planned: PlannedAttempt | PlannedComparison) -> dict[str, Any]:
    """Without what has its default: a plan may be a hundred thousand of these."""
    values = ((field, getattr(planned, field.name)) for field in fields(planned))
    return {field.name: value for field, value in values if value != field.default}


def _plan_from_json(text: str) -> Plan:
    data: dict[str, list[dict[str, Any]]] = json.loads(text)
    return Plan(
        attempts=tuple(PlannedAttempt(**attempt) for attempt in data["attempts"]),
        comparisons=tuple(PlannedComparison(**comparison) for comparison in data["comparisons"]),
    )
