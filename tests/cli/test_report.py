"""`mkb report`: from a store to a file or to JSON, and clear words for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.cli.output import ExitCode
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.store.store import Store
from tests.disk import files_of_at_most
from tests.report.support import TIMES, study


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one finished experiment in it."""
    folder = tmp_path / "store"
    made = study()
    spec = ExperimentSpec(
        name="trial", design="cross-dsl", problems=tuple(TIMES), dsls=("cute", "tirx"), models=("m",), store=str(folder)
    )
    with Store.open(folder, create=True) as opened:
        opened.save_experiment(spec, made.plan)
        for attempt in made.plan.attempts:
            opened.save_attempt("trial", attempt, made.records[attempt.key])
    return folder


def leave(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_it_writes_one_file_and_prints_where(store, tmp_path, capsys):
    out = tmp_path / "out.html"
    assert leave(["report", "trial", "--store", str(store), "--out", str(out)]) == ExitCode.OK
    assert capsys.readouterr().out.strip() == str(out)
    html = out.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "Over 12 comparisons" in html


@pytest.mark.usefixtures("store")
def test_an_experiment_file_says_where_its_store_is(tmp_path, capsys):
    spec = tmp_path / "trial.toml"
    names = json.dumps(list(TIMES))
    head = 'name = "trial"\ndesign = "cross-dsl"\ndsls = ["cute", "tirx"]\nmodels = ["m"]\nstore = "store"\n'
    spec.write_text(f"{head}problems = {names}\n")
    assert leave(["report", str(spec), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["experiment"] == "trial"


def test_json_is_the_only_thing_on_stdout(store, capsys):
    assert leave(["report", "trial", "--store", str(store), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"experiment", "rehearsal", "tables", "comparisons", "attempts"}
    assert len(found["comparisons"]) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trail"], "unknown experiment `trail`; nearest: `trial`"),
        (["trial", "--out", "/nowhere/at/all.html"], "cannot write /nowhere/at/all.html"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(store, capsys, arguments, said):
    assert leave(["report", *arguments, "--store", str(store)]) == ExitCode.USAGE
    assert said in " ".join(capsys.readouterr().err.split())


def test_only_a_report_is_replaced(store, tmp_path, capsys):
    out, precious = tmp_path / "out.html", tmp_path / "spec.toml"
    precious.write_text("name = 'trial'")
    assert leave(["report", "trial", "--store", str(store), "--out", str(out)]) == ExitCode.OK
    assert leave(["report", "trial", "--store", str(store), "--out", str(out)]) == ExitCode.OK
    for path in (precious, store / "store.sqlite"):
        before = path.read_bytes()
        assert leave(["report", "trial", "--store", str(store), "--out", str(path)]) == ExitCode.USAGE
        assert "is no report of ours and is left as it is" in " ".join(capsys.readouterr().err.split())
        assert path.read_bytes() == before


def test_a_report_that_cannot_be_written_leaves_the_old_one(store, tmp_path, capsys):
    out = tmp_path / "out.html"
    assert leave(["report", "trial", "--store", str(store), "--out", str(out)]) == ExitCode.OK
    before = out.read_bytes()
    with files_of_at_most(50_000):
        assert leave(["report", "trial", "--store", str(store), "--out", str(out)]) == ExitCode.USAGE
    assert f"cannot write {out}: File too large" in " ".join(capsys.readouterr().err.split())
    assert (out.read_bytes(), list(tmp_path.glob(".mkb*"))) == (before, [])


def test_a_name_needs_a_store(capsys):
    assert leave(["report", "trial"]) == ExitCode.USAGE
    assert "give it with --store" in " ".join(capsys.readouterr().err.split())


def test_a_store_that_is_not_there_is_named(tmp_path, capsys):
    assert leave(["report", "trial", "--store", str(tmp_path / "none")]) == ExitCode.USAGE
    assert "there is no store" in " ".join(capsys.readouterr().err.split())
