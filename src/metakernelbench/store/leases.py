"""Leases: which runner is at which attempt, so that two runners on one store never do the same one.

A runner holds a lease on every attempt it is at and gives a sign of life well before it expires. A runner that is gone
loses its leases at once where that can be known: each locks a file of its own in the store's folder, and the operating
system unlocks it however the runner ended. Where the file or its lock cannot be seen (another host), its leases end by
themselves: for that the clocks of all hosts must agree to well within `LEASE_S`. Leases do not wait for the disk: a
host that loses its power loses its runners, too.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from metakernelbench.errors import StoreError
from metakernelbench.store.database import Database, outlasts_a_lost_connection
from metakernelbench.store.schema import leases

LEASE_S = 120.0
"""A lease without a sign of life ends after so many seconds."""
SIGN_OF_LIFE_S = 20.0
"""How often a runner renews its leases."""


class Owner:
    """A runner's identity, alive for as long as this process holds its file locked."""

    def __init__(self, folder: Path) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._path = _lock_path(folder, self.name)
        self._abandons = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self._path.open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(
                f"cannot write to {folder}: {error.strerror}", hint="make room or check permissions; run again"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._abandons:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def abandon(self) -> None:
        """Leases could not be given back: the file stays behind unlocked, which says that its runner is gone."""
        self._abandons = True


def _lock_path(folder: Path, owner: str) -> Path:
    return folder / f"{owner.replace(':', '-')}.lock"


def _is_gone(folder: Path, owner: str) -> bool:
    """Whether a runner has certainly ended: its file is here and nobody holds it."""
    try:
        with _lock_path(folder, owner).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_attempt(experiment: str, key: str) -> ColumnElement[bool]:
    return and_(leases.c.experiment == experiment, leases.c.key == key)


def release_in(connection: Connection, experiment: str, key: str, owner: Owner) -> bool:
    """Give a lease back as part of a transaction; False where the owner has lost it."""
    held = and_(_is_attempt(experiment, key), leases.c.owner == owner.name)
    return connection.execute(delete(leases).where(held)).rowcount == 1


class Leases:
    """The leases of one store."""

    def __init__(self, database: Database, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._folder = folder
        self._clock = clock

    def owner(self) -> Owner:
        """A new runner's identity."""
        return Owner(self._folder)

    @outlasts_a_lost_connection
    def claim(self, experiment: str, key: str, owner: Owner) -> bool:
        """Take an attempt; False where another runner is at it."""
        row = {"experiment": experiment, "key": key, "owner": owner.name, "expires_at": self._clock() + LEASE_S}
        try:
            # A server may crash while its runners live on: without the lease they could not save what they finish.
            with self._database.writing(durable=self._database.is_server) as connection:
                holder = self._holder(connection, experiment, key)
                if holder is not None and not _is_gone(self._folder, holder):
                    return holder == owner.name
                # Only what was seen to be free: a runner that has taken it since then stands in the way of the new row.
                free = or_(leases.c.expires_at <= self._clock(), leases.c.owner == (holder or owner.name))
                connection.execute(delete(leases).where(_is_attempt(experiment, key), free))
                connection.execute(insert(leases).values(row))
        except IntegrityError:
            return False
        if holder is not None:
            self._forget(holder)
        return True

    def _forget(self, gone: str) -> None:
        """All that a runner held which has certainly ended."""
        with self._database.writing(durable=False) as connection:
            connection.execute(delete(leases).where(leases.c.owner == gone))
        _lock_path(self._folder, gone).unlink(missing_ok=True)

    def _holder(self, connection: Connection, experiment: str, key: str) -> str | None:
        query = select(leases.c.owner).where(_is_attempt(experiment, key), leases.c.expires_at > self._clock())
        return connection.execute(query).scalar()

    @outlasts_a_lost_connection
    def renew(self, owner: Owner) -> None:
        """A sign of life: all leases of this owner last longer."""
        with self._database.writing(durable=False) as connection:
            later = self._clock() + LEASE_S
            connection.execute(update(leases).where(leases.c.owner == owner.name).values(expires_at=later))

    @outlasts_a_lost_connection
    def release(self, owner: Owner, experiment: str | None = None, key: str | None = None) -> None:
        """Give back one attempt, or everything that this owner holds."""
        statement = delete(leases).where(leases.c.owner == owner.name)
        if experiment is not None and key is not None:
            statement = statement.where(_is_attempt(experiment, key))
        with self._database.writing(durable=False) as connection:
            connection.execute(statement)

    @outlasts_a_lost_connection
    def held(self, experiment: str) -> dict[str, str]:
        """Key → owner of the attempts that are being worked at now."""
        query = select(leases.c.key, leases.c.owner).where(
            leases.c.experiment == experiment, leases.c.expires_at > self._clock()
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        gone = {owner for owner in {row.owner for row in rows} if _is_gone(self._folder, owner)}
        return {row.key: row.owner for row in rows if row.owner not in gone}
