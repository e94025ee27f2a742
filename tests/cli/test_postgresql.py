"""The commands on a store in PostgreSQL, whose artifacts are in a folder that the experiment's file names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.cli.output import ExitCode
from metakernelbench.experiments.loading import open_store
from metakernelbench.experiments.run import run_experiment
from metakernelbench.experiments.spec import load_spec
from tests.experiments.support import Instant, NoJudge, lines
from tests.postgresql import Server

FILE = """
name = "small"
design = "cross-dsl"
problems = ["p03", "p28"]
dsls = ["tirx", "triton"]
models = ["vendor/model"]
store = "{url}"
artifacts = "shared"
[attempt]
device = "cpu"
workload = "smoke"
sandbox = "host"
"""


@pytest.fixture(scope="module")
def spec(postgresql: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an experiment that has run."""
    file = tmp_path_factory.mktemp("experiment") / "small.toml"
    file.write_text(FILE.format(url=postgresql.new_database()))
    loaded = load_spec(file)
    with open_store(loaded, create=True) as store:
        asyncio.run(run_experiment(loaded, store, judge=NoJudge(), progress=lines(), machinery=Instant().machinery()))
    return file


def leave(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


def test_status_reads_it(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("status", str(spec), "--json") == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)["experiments"]
    assert found["name"] == "small"
    assert (spec.parent / "shared" / "artifacts").is_dir()


def test_report_reads_it(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("report", str(spec), "--json") == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert len(found["attempts"]) == 8


def test_a_dry_run_counts_what_is_there(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("run", str(spec), "--dry-run", "--json") == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["planned"] == 8


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_url_without_its_folder_says_what_to_do(spec: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = load_spec(spec).store.replace("mkb@", "mkb:secret@")
    arguments = [command, url] if command == "status" else [command, "small", "--store", url]
    assert leave(*arguments) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "needs a folder for its artifacts" in said and "`artifacts`" in said and "secret" not in said
