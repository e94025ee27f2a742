"""`mkb view`: a page while it runs, clear words for what cannot be served."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from metakernelbench.cli.output import ExitCode
from tests.cli.test_report import leave, store  # noqa: F401 (a fixture)


def test_it_serves_the_page_until_it_is_interrupted(store: Path) -> None:  # noqa: F811
    command = [sys.executable, "-m", "metakernelbench", "view", "trial", "--store", str(store), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert b"Over 12 comparisons" in answer.read()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == ExitCode.INTERRUPTED
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_a_port_that_is_taken_is_named(store: Path, capsys) -> None:  # noqa: F811
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert leave(["view", "trial", "--store", str(store), "--port", port]) == ExitCode.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert f"cannot listen on port {port}" in said and "--port 0" in said


def test_an_experiment_that_is_not_there_is_named(store: Path, capsys) -> None:  # noqa: F811
    assert leave(["view", "trail", "--store", str(store)]) == ExitCode.USAGE
    assert "unknown experiment `trail`" in " ".join(capsys.readouterr().err.split())
