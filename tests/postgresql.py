"""A real PostgreSQL server for the tests: one a session, as an ordinary user, on a socket in a folder of its own.

Nothing of it is made safe against a power cut, which makes it quick.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

_QUICK = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "16MB"}
_START_S = 60


def missing() -> str | None:
    """Why there can be no server; None where there can."""
    if _binaries() is None:
        return "PostgreSQL is not installed (`make system`)"
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"no driver: {error}"
    return None


def _binaries() -> Path | None:
    """Debian keeps the server's programs out of the way, one folder a version."""
    beside = [Path(found).resolve().parent] if (found := shutil.which("initdb")) else []
    folders = [*beside, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))]
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@dataclass
class Server:
    """A server that can be stopped and started again."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="mkb-pg-", dir="/tmp")))
    _process: subprocess.Popen[bytes] | None = None
    _number: count[int] = field(default_factory=count)

    def make(self) -> None:
        """Make its files and start it. PostgreSQL refuses to run as root."""
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres", "postgres")
        self._run("initdb", "-D", str(self.folder / "data"), "-A", "trust", "-U", "mkb", "--no-sync", "-E", "UTF8")
        self.start()

    def start(self) -> None:
        options = [option for name, value in _QUICK.items() for option in ("-c", f"{name}={value}")]
        command = ["-D", str(self.folder / "data"), "-k", str(self.folder), "-c", "listen_addresses=", *options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", *command), cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + _START_S
        while subprocess.run(
            self._command("pg_isready", "-q", "-h", str(self.folder)), cwd="/", check=False
        ).returncode:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.folder / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as a crash would: whoever is connected loses the connection."""
        if self._process is not None:
            self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")
            self._process.wait(_START_S)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test{next(self._number)}"
        self._run("createdb", "-h", str(self.folder), "-U", "mkb", name)
        return f"postgresql://mkb@/{name}?host={self.folder}"

    def query(self, url: str, statement: str) -> list[tuple[object, ...]]:
        """The rows of a statement."""
        import psycopg

        with psycopg.connect(url) as connection:
            return connection.execute(statement).fetchall()  # type: ignore[call-overload,no-any-return]

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(program, *arguments), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.decode(errors='replace')}")

    def _command(self, program: str, *arguments: str) -> list[str]:
        binaries = _binaries()
        assert binaries is not None
        command = [str(binaries / program), *arguments]
        if os.geteuid() != 0:
            return command
        return [
            "setpriv",
            "--reuid",
            "postgres",
            "--regid",
            "postgres",
            "--clear-groups",
            "--pdeathsig",
            "INT",
            *command,
        ]


def skip_if_missing() -> None:
    """Skip the test that asks for a server where there can be none."""
    if why := missing():
        pytest.skip(why)
