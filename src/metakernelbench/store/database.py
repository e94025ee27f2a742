"""Opens the database of a store, refuses what it must not touch, and outlasts a server that goes away for a while."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, select
from sqlalchemy import text as sql
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    TimeoutError,
)

from metakernelbench import __version__
from metakernelbench.errors import StoreError
from metakernelbench.store.schema import SCHEMA_VERSION, metadata, schema_version

_BUSY_S = 60
"""How long a writer waits for another one."""
_GONE_S = 600.0
"""How long a server that was there and has gone away is waited for."""
_LOOK_S = (0.2, 5.0)
"""Seconds between two looks at a server that has gone away: at first, and at most."""
_POOL = {"pool_size": 2, "max_overflow": 6, "pool_timeout": _BUSY_S}
"""Connections of one process; a server takes a hundred by default, and several runners share it."""
_LAYOUT_LOCK = 0x6D6B62
"""Key of the lock under which a server's tables are made: two runners may start at the same moment."""
_TRIES = 3


class NoStore(StoreError):
    """There is none yet at this place."""


class StoreLost(StoreError):
    """The server broke off in the middle of an operation, of which nothing was kept: it may be tried again."""


class Database:
    """One database, at one place. `told` hears, a sentence each, when a server that has gone away is waited for."""

    def __init__(self, url: URL | str, *, create: bool) -> None:
        try:
            self.url = _with_driver(make_url(url))
            self.engine = _engine(self.url)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise StoreError(
                f"`{without_password(url)}` is not a database that can be opened: {error}",
                hint="give a folder, or a URL such as postgresql://user@host/name, for which "
                "`pip install 'metakernelbench[postgresql]'` installs the driver",
            ) from error
        self.name = self.url.database if _is_sqlite(self.url) else self.url.render_as_string(hide_password=True)
        self.told: Callable[[str], None] = lambda _: None
        self.gone_s = _GONE_S
        self._answered = False
        self._closed = threading.Event()
        self._check(create=create)
        self._answered = True

    def _check(self, *, create: bool) -> None:
        """Raise unless the database is a store of this version; make it one where there is none and `create` is set."""
        with self.reading() as connection:
            tables = set(inspect(connection).get_table_names())
        if not tables and create:
            self._create()
        elif not tables:
            raise NoStore(f"there is no store at {self.name}", hint="`mkb run` makes one")
        elif schema_version.name not in tables:
            raise StoreError(f"{self.name} belongs to another program", hint="choose another place for the store")
        with self.reading() as connection:
            rows = connection.execute(select(schema_version)).all()
        version, made_by = _the_one_row(rows, self.name)
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"the store {self.name} was made by a newer metakernelbench ({made_by}, layout {version}; "
                f"this is {__version__}, layout {SCHEMA_VERSION})",
                hint="update metakernelbench, or choose another place for the store; nothing was changed",
            )
        if version < SCHEMA_VERSION:
            self._bring_up_to_date()

    def _create(self) -> None:
        if _is_sqlite(self.url):
            with _told_in_a_sentence(self.name, StoreError), closing(self.engine.raw_connection()) as raw:
                raw.cursor().execute("PRAGMA journal_mode=WAL")  # outside of any transaction, as SQLite wants it
        with self._laying_out() as connection:
            if schema_version.name not in inspect(connection).get_table_names():
                metadata.create_all(connection)
                connection.execute(
                    schema_version.insert().values(version=SCHEMA_VERSION, made_by=f"metakernelbench {__version__}")
                )

    def _bring_up_to_date(self) -> None:
        """Add what newer layouts have; what is there stays as it is."""
        with self._laying_out() as connection:
            metadata.create_all(connection)
            connection.execute(schema_version.update().values(version=SCHEMA_VERSION))

    @contextmanager
    def _laying_out(self) -> Iterator[Connection]:
        """A transaction that changes the tables, one at a time."""
        with self.writing() as connection:
            if self.url.get_backend_name() == "postgresql":
                connection.execute(sql("SELECT pg_advisory_xact_lock(:key)"), {"key": _LAYOUT_LOCK})
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that only reads."""
        with _told_in_a_sentence(self.name, self._broken), self._connected() as connection:
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[Connection]:
        """One transaction: all of it or nothing. One that is not `durable` may be undone by a loss of power, until a
        durable one follows; it saves the wait for the disk."""
        with (
            _told_in_a_sentence(self.name, self._broken),
            self._connected().execution_options(writes=True, durable=durable) as connection,
            connection.begin(),
        ):
            yield connection

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        self.engine.dispose()

    @property
    def is_server(self) -> bool:
        """Whether the database is a program of its own, which may end while those that use it go on."""
        return not _is_sqlite(self.url)

    @property
    def _broken(self) -> type[StoreError]:
        """What an operation raises that the database broke off."""
        return StoreLost if self.is_server and self._answered else StoreError

    def _connected(self) -> Connection:
        """A connection. A server that has answered before is waited for."""
        waits = self._answered and self.is_server
        until = time.monotonic() + self.gone_s
        pause, longest = _LOOK_S
        while True:
            try:
                return self.engine.connect()
            except OperationalError as error:
                if not waits or time.monotonic() > until:
                    raise StoreError(f"the store {self.name} cannot be reached: {_said(error)}", hint=_HINT) from error
                if pause == _LOOK_S[0]:
                    self.told(f"the store {self.name} has gone away; waiting for it up to {self.gone_s:g} s")
            if self._closed.wait(pause * random.uniform(0.5, 1.0)):
                raise StoreError(f"the store {self.name} has gone away", hint=_HINT)
            pause = min(2 * pause, longest)


def outlasts_a_lost_connection[**P, R](operation: Callable[P, R]) -> Callable[P, R]:
    """What is one transaction is tried again where the server broke off in the middle of it."""

    @wraps(operation)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(_TRIES - 1):
            with suppress(StoreLost):
                return operation(*args, **kwargs)
        return operation(*args, **kwargs)

    return repeated


def _the_one_row(rows: Sequence[Sequence[Any]], name: str | None) -> tuple[int, str]:
    """Layout and maker, as the table of versions has to hold them. Raises `StoreError`."""
    match rows:
        case [(int(version), str(made_by))]:
            return version, made_by
    raise StoreError(
        f"the store {name} is damaged: its table `{schema_version.name}` does not hold one version", hint=DAMAGED
    )


def database_of(folder: Path) -> URL:
    """The URL of the SQLite file in a store's folder."""
    return URL.create("sqlite", database=str(folder / "store.sqlite"))


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _with_driver(url: URL) -> URL:
    """`postgresql://` and `postgres://` mean the driver that our extra installs."""
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def without_password(url: URL | str | Path) -> str:
    """A place as it may be shown."""
    try:
        return make_url(str(url)).render_as_string(hide_password=True)
    except ArgumentError:
        return str(url)


def _engine(url: URL) -> Engine:
    if not _is_sqlite(url):
        engine = create_engine(url, pool_pre_ping=True, **_POOL)
        event.listen(engine, "begin", _begun_on_a_server)
        return engine
    engine = create_engine(url, connect_args={"timeout": _BUSY_S})

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver would begin transactions late and never the writing kind

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("writes", False):
            connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options['durable'] else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writes", False) else "BEGIN")

    return engine


def _begun_on_a_server(connection: Connection) -> None:
    if not connection.get_execution_options().get("durable", True) and connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL synchronous_commit = off")


_HELD = "another program holds it: let that end, then run the same command again"
_HINT = "what was finished is kept: put this right and run the same command again"
DAMAGED = "bring the store back from a copy, or choose another place for the store"
_NO_ROOM = "make room there, or see whether the disk works: what was finished is kept; then run the same command again"
_READ_ONLY = "a store has to be writable even to be read: copy it to a folder of yours, or get the permission"
_HINTS = {
    "database is locked": _HELD,
    "is not a database": DAMAGED,
    "is malformed": DAMAGED,
    "readonly database": _READ_ONLY,
    "disk is full": _NO_ROOM,
    "disk I/O error": _NO_ROOM,
}
"""What a driver says → what to do, where it is not `_HINT`."""


@contextmanager
def _told_in_a_sentence(name: str | None, broken: type[StoreError]) -> Iterator[None]:
    """Turn what a database driver raises about its own state into a `StoreError`, of kind `broken` where trying again
    may help."""
    try:
        yield
    except IntegrityError:
        raise  # a rule of the tables, not a state of the database: for the caller
    except (DBAPIError, TimeoutError, sqlite3.Error) as error:
        kind = broken if isinstance(error, OperationalError) else StoreError
        hint = next((hint for words, hint in _HINTS.items() if words in _said(error)), _HINT)
        raise kind(f"the store {name} cannot be used: {_said(error)}", hint=hint) from error


def _said(error: DBAPIError | TimeoutError | sqlite3.Error) -> str:
    """What the driver said, on one line."""
    said = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(said).split())
