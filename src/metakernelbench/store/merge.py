"""Brings experiments of one store into another: what is missing there is copied, what differs is a conflict.

No record that is there is changed or replaced. An experiment's records come over in one transaction, after its plan and
its texts, which are named by what they hold and so are never in conflict: a merge that was cut short is completed
by the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, insert, select
from sqlalchemy.exc import IntegrityError

from metakernelbench.errors import StoreError, UnknownName, UserError
from metakernelbench.experiments.planned import Plan, merged
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.store import schema
from metakernelbench.store.store import Store, StoredExperiment

_AT_ONCE = 200
_PLACES = frozenset({"name", "store", "artifacts", "concurrency", "judge", "judge_options", "usage"})
"""What says where and how fast an experiment runs, and not what it is."""
_UNITED = ("design", "problems", "dsls", "models")
_COMPARED = ("task", "attached", "ended", "skill", "record")
"""Two rows of an attempt are one record where these are equal."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What bringing one experiment over means."""

    source: str
    """Its name in the store that it comes from."""
    name: str
    """Its name in the store that it goes to."""
    spec: ExperimentSpec
    plan: Plan
    new: tuple[str, ...]
    """Keys of the attempts that are not there yet."""
    present: int
    """Attempts whose record is there already."""
    conflicts: tuple[str, ...]
    """Why it cannot come over, a sentence each."""


def plan_merge(source: Store, target: Store, experiment: str, *, name: str | None = None) -> Merge:
    """What it would mean to bring an experiment over, as `name` where that is given. Raises `UnknownName`."""
    theirs, into = source.experiment(experiment), name or experiment
    spec = theirs.spec.model_copy(update={"name": into, "store": str(target.folder), "artifacts": None})
    keys = _current_keys(source, experiment)
    if into not in target.experiments():
        return Merge(source=experiment, name=into, spec=spec, plan=theirs.plan, new=keys, present=0, conflicts=())
    ours = target.experiment(into)
    spec, plan, conflicts = _united(ours, theirs)
    there = set(_current_keys(target, into))
    new = tuple(key for key in keys if key not in there)
    both = [key for key in keys if key in there]
    conflicts += [
        f"`{key}` has another record in each store" for key in _differing(source, experiment, target, into, both)
    ]
    return Merge(
        source=experiment,
        name=into,
        spec=spec,
        plan=plan,
        new=new,
        present=len(both),
        conflicts=tuple(conflicts),
    )


def merge(source: Store, target: Store, plans: Sequence[Merge]) -> None:
    """Bring the planned experiments over. Raises `StoreError` where one is in conflict; then nothing is written."""
    conflicts = [f"{plan.name}: {conflict}" for plan in plans for conflict in plan.conflicts]
    if conflicts:
        raise StoreError(
            "the stores hold different things under one name:\n" + "\n".join(conflicts),
            hint="bring the experiment over under another name with --as",
        )
    for plan in plans:
        _copy_texts(source, target, plan)
        try:
            target.save_experiment(plan.spec, plan.plan)
            with source._database.reading() as reading, target._database.writing() as writing:
                _copy_rows(reading, writing, plan)
                _copy_answers(reading, writing)
        except IntegrityError as error:
            raise StoreError(
                f"`{plan.name}` was written to in {target.name} at the same moment", hint="run the same command again"
            ) from error


def chosen(source: Store, names: Sequence[str]) -> list[str]:
    """The experiments to bring over: all, unless some are named. Raises `UnknownName`."""
    known = source.experiments()
    for name in names:
        if name not in known:
            raise UnknownName("experiment", name, known)
    if not known:
        raise UserError(f"the store {source.name} holds no experiment")
    return list(names) or known


def _united(ours: StoredExperiment, theirs: StoredExperiment) -> tuple[ExperimentSpec, Plan, list[str]]:
    """Specification and plan of both together, and what keeps them apart."""
    conflicts = list(_different(_settings(ours.spec), _settings(theirs.spec)))
    united: dict[str, Any] = {
        key: tuple(dict.fromkeys((*getattr(ours.spec, key), *getattr(theirs.spec, key)))) for key in _UNITED
    }
    united["replicates"] = max(ours.spec.replicates, theirs.spec.replicates)
    try:
        plan = merged([ours.plan, theirs.plan])
    except UserError as error:
        plan = ours.plan
        conflicts.append(error.message)
    return ours.spec.model_copy(update=united), plan, conflicts


def _settings(spec: ExperimentSpec) -> dict[str, Any]:
    """What must be equal in two parts of one experiment; the path of prepared turns is a place, too."""
    left_out = _PLACES | set(_UNITED) | {"replicates"}
    settings = spec.model_dump(mode="json", exclude=set(left_out))
    settings["attempt"].pop("script", None)
    return settings


def _different(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(key), theirs.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _different(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"`{prefix}{key}` is {one!r} here and {other!r} there"


def _current_keys(store: Store, experiment: str) -> tuple[str, ...]:
    table = schema.attempts
    query = select(table.c.key).where(table.c.experiment == experiment, table.c.superseded_at.is_(None))
    with store._database.reading() as connection:
        return tuple(connection.execute(query.order_by(table.c.id)).scalars())


def _differing(source: Store, experiment: str, target: Store, into: str, keys: Iterable[str]) -> Iterator[str]:
    for some in batched(keys, _AT_ONCE):
        theirs, ours = _rows(source, experiment, some), _rows(target, into, some)
        yield from (key for key in some if theirs[key] != ours[key])


def _rows(store: Store, experiment: str, keys: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    table = schema.attempts
    columns = [table.c[name] for name in _COMPARED]
    current = and_(table.c.experiment == experiment, table.c.superseded_at.is_(None), table.c.key.in_(keys))
    with store._database.reading() as connection:
        return {key: tuple(values) for key, *values in connection.execute(select(table.c.key, *columns).where(current))}


def _copy_texts(source: Store, target: Store, plan: Merge) -> None:
    """All texts that the rows to come refer to."""
    table = schema.attempts
    for some in batched(plan.new, _AT_ONCE):
        query = select(table.c.key, table.c.skill, table.c.record)
        with source._database.reading() as connection:
            rows = connection.execute(query.where(table.c.experiment == plan.source, table.c.key.in_(some))).all()
        digests = {skill for _, skill, _ in rows} - {None}
        for key, _, record in rows:
            digests |= source._read(key, _digests_in, record)
        batch = target._artifacts.batch()
        for digest in digests:
            if not target._artifacts.path(digest).exists():
                batch.put(source._artifacts.get(digest))
        batch.keep()


def _digests_in(record: str) -> set[str]:
    return set(_digests(json.loads(record)))


def _digests(value: Any) -> Iterator[str]:
    match value:
        case {"$artifact": str(digest)} | {"$artifact_json": str(digest)}:
            yield digest
        case dict():
            for item in value.values():
                yield from _digests(item)
        case list():
            for item in value:
                yield from _digests(item)


def _copy_rows(reading: Connection, writing: Connection, plan: Merge) -> None:
    """Everything of one experiment, inside of one transaction."""
    for some in batched(plan.new, _AT_ONCE):
        for table in (schema.attempts, schema.faults):
            _insert(writing, table, _of(reading, table, plan, table.c.key.in_(some)), plan.name)
    pairs = _pairs(writing, plan.name)
    rematches = _of(reading, schema.rematches, plan, schema.rematches.c.superseded_at.is_(None))
    _insert(
        writing, schema.rematches, [r for r in rematches if (r["baseline"], r["treatment"]) not in pairs], plan.name
    )


def _of(reading: Connection, table: Table, plan: Merge, which: ColumnElement[bool]) -> list[dict[str, Any]]:
    query = select(table).where(table.c.experiment == plan.source, which).order_by(table.c.id)
    return [dict(row._mapping) for row in reading.execute(query)]


def _insert(writing: Connection, table: Table, rows: Iterable[dict[str, Any]], experiment: str) -> None:
    """Under the experiment's name there, and numbered anew."""
    fresh = [{**row, "experiment": experiment} for row in rows]
    for row in fresh:
        row.pop("id")
    if fresh:
        writing.execute(insert(table), fresh)


def _pairs(connection: Connection, experiment: str) -> set[tuple[str, str]]:
    """Comparisons that have a rematch: of two measurements of the same kernels the one that is there stays."""
    table = schema.rematches
    query = select(table.c.baseline, table.c.treatment).where(table.c.experiment == experiment)
    return {(row.baseline, row.treatment) for row in connection.execute(query)}


def _copy_answers(reading: Connection, writing: Connection) -> None:
    """Answers of annotators belong to texts, not to experiments, and are known by what was asked."""
    table = schema.answers
    known = set(writing.execute(select(table.c.request)).scalars())
    new = [dict(row._mapping) for row in reading.execute(select(table)) if row.request not in known]
    for row in new:
        row.pop("id")
    if new:
        writing.execute(insert(table), new)
