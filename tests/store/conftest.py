"""Where the stores of these tests lie: every test that asks for a `place` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.store.store import Store
from tests.postgresql import Server


@dataclass
class Place:
    """A database, empty at first, and the folder of the artifacts."""

    folder: Path
    url: str | None = None
    """None for SQLite."""
    _opened: list[Store] = field(default_factory=list)

    def open(self, *, create: bool = False) -> Store:
        """The store at this place, as a user's program opens it."""
        store = Store.open(self.url or self.folder, folder=self.folder if self.url else None, create=create)
        self._opened.append(store)
        return store

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a statement, past the store; `?` stands for a value."""
        if self.url is None:
            self.folder.mkdir(exist_ok=True)
            with closing(sqlite3.connect(self.folder / "store.sqlite")) as connection, connection:
                return connection.execute(statement, values).fetchall()
        import psycopg

        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(statement.replace("?", "%s"), values)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty place for a store."""
    url = None
    if request.param == "postgresql":
        server: Server = request.getfixturevalue("postgresql")
        url = server.new_database()
    made = Place(tmp_path, url)
    yield made
    made.close()


@pytest.fixture
def store(place: Place) -> Store:
    """A new store."""
    return place.open(create=True)
