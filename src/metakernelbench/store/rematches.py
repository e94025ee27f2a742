"""Measured ratios: what came of timing a comparison's two kernels head to head, kept beside their two verdicts.

A rematch belongs to two kernels, not to two attempts: once an attempt has run again, a ratio of its old kernel says
nothing of it. `Rematch.fits` tells.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sqlalchemy import ColumnElement, and_, insert, select, update

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.errors import InfrastructureFault, StoreError
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.database import DAMAGED, Database, outlasts_a_lost_connection
from metakernelbench.store.leases import Owner, release_in
from metakernelbench.store.schema import rematches
from metakernelbench.text import harmless


@dataclass(frozen=True, kw_only=True)
class Rematch:
    """Baseline and treatment of one comparison, timed in one session on one device."""

    baseline: str
    """Key of the baseline attempt."""
    treatment: str
    """Key of the treatment attempt."""
    ratio: float | None
    """Baseline time over treatment time; None where one of the kernels did not come to be timed."""
    low: float | None = None
    """Lower end of the 95 % interval of the ratio."""
    high: float | None = None
    reason: str | None = None
    """Why there is no ratio; None exactly where there is one."""
    baseline_sha256: str
    """Digest of the baseline's kernel.py as it was timed."""
    treatment_sha256: str
    workload: str
    device: str
    """`cpu`, or the GPU's name."""
    judge: str
    """The judge that measured it, by name."""
    contract_version: int
    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Versions of this program, Python, torch, the DSL's packages and the driver."""
    measurement: dict[str, Any] = field(default_factory=dict[str, Any])
    """All that the measurement left, down to the single times."""
    measured_at: str
    """UTC, ISO 8601."""

    def __post_init__(self) -> None:
        if (self.ratio is None) != (self.reason is not None):
            raise ValueError(f"ratio {self.ratio} with the reason {self.reason}")

    def fits(self, baseline: AttemptRecord, treatment: AttemptRecord) -> bool:
        """Whether these are the kernels that the two attempts have now."""
        kernels = [record.kernel for record in (baseline, treatment)]
        digests = [None if kernel is None else digest_of(kernel) for kernel in kernels]
        return digests == [self.baseline_sha256, self.treatment_sha256]


_COLUMNS = [rematches.c[field.name] for field in fields(Rematch)]
_AS_JSON = ("versions", "measurement")


class Rematches:
    """The rematches of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @outlasts_a_lost_connection
    def save(self, experiment: str, rematch: Rematch, *, owner: Owner | None = None) -> None:
        """Keep a rematch; an earlier one of the same comparison stays in the database as superseded.

        With `owner`, gives the lease of the comparison back, and raises `InfrastructureFault` where that has meanwhile
        gone to another runner: what that one measures counts.
        """
        row = asdict(rematch)
        row |= {name: json.dumps(row[name]) for name in _AS_JSON}
        row["reason"] = None if rematch.reason is None else harmless(rematch.reason)
        this = and_(rematches.c.baseline == rematch.baseline, rematches.c.treatment == rematch.treatment)
        with self._database.writing() as connection:
            if owner is not None and not release_in(
                connection, experiment, lease_key(rematch.baseline, rematch.treatment), owner
            ):
                raise InfrastructureFault(
                    f"another runner has taken over the rematch of {rematch.treatment}: this one is dropped"
                )
            connection.execute(
                update(rematches).where(_current(experiment), this).values(superseded_at=rematch.measured_at)
            )
            connection.execute(insert(rematches).values(experiment=experiment, **row))

    def of(self, experiment: str) -> dict[tuple[str, str], Rematch]:
        """(baseline, treatment) → its rematch, for every comparison that has one."""
        found = self._found(_current(experiment))
        return {(rematch.baseline, rematch.treatment): rematch for rematch in found}

    def one(self, experiment: str, baseline: str, treatment: str) -> Rematch | None:
        """The rematch of one comparison; None where it has none."""
        pair = and_(rematches.c.baseline == baseline, rematches.c.treatment == treatment)
        return next(iter(self._found(and_(_current(experiment), pair))), None)

    @outlasts_a_lost_connection
    def _found(self, which: ColumnElement[bool]) -> list[Rematch]:
        query = select(*_COLUMNS).where(which).order_by(rematches.c.id)
        with self._database.reading() as connection:
            rows = [dict(row._mapping) for row in connection.execute(query)]
        return [self._read(row) for row in rows]

    def _read(self, row: dict[str, Any]) -> Rematch:
        try:
            return Rematch(**row | {name: json.loads(row[name]) for name in _AS_JSON})
        except (ValueError, TypeError) as error:
            raise StoreError(
                f"the rematch of {row['treatment']} in {self._database.name} cannot be read: {error}", hint=DAMAGED
            ) from error


def lease_key(baseline: str, treatment: str) -> str:
    """Under what a comparison is lent to one runner at a time; no attempt has such a key."""
    return f"rematch:{baseline}:{treatment}"


def _current(experiment: str) -> ColumnElement[bool]:
    return and_(rematches.c.experiment == experiment, rematches.c.superseded_at.is_(None))
