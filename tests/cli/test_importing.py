"""`mkb import`: from one store into another, in a sentence an experiment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.cli.output import ExitCode
from metakernelbench.store.store import Store
from tests.experiments.support import record_of
from tests.store.test_merge import filled


def leave(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


def test_a_store_comes_into_one_that_is_made_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "theirs")[1].close()
    there, here = tmp_path / "theirs", tmp_path / "ours"
    assert leave("import", there, "--into", here, "--dry-run") == ExitCode.OK
    assert not here.exists() and "8 attempts would come over" in capsys.readouterr().out
    assert leave("import", there, "--into", here, "--json") == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)["experiments"]
    assert (len(found["new"]), found["present"], found["conflicts"]) == (8, 0, [])
    assert leave("import", there, "--into", here) == ExitCode.OK
    assert "0 attempts have come over, 8 are there already" in capsys.readouterr().out


def test_conflicts_are_listed_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "theirs")[1].close()
    spec, ours = filled(tmp_path / "ours")
    with ours:
        changed = ours.experiment("small").plan.attempts[0]
        ours.save_attempt("small", changed, record_of(changed, spec.attempt, None, kernel="another"))
    place = ("import", tmp_path / "theirs", "--into", tmp_path / "ours")
    assert leave(*place, "--dry-run") == ExitCode.FAILED
    assert f"conflict: `{changed.key}` has another record in each store" in capsys.readouterr().out
    assert leave(*place) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert changed.key in said and "--as" in said
    assert leave(*place, "--as", "theirs") == ExitCode.OK
    with Store.open(tmp_path / "ours") as store:
        assert store.experiments() == ["small", "theirs"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{0}/nowhere", "--into", "{0}/ours"], "there is no store in"),
        (["{0}/theirs", "--into", "{0}/theirs"], "cannot be brought into itself"),
        (["{0}/theirs", "--into", "{0}/ours", "--experiment", "smal"], "unknown experiment `smal`; nearest: `small`"),
        (["{0}/theirs", "--into", "{0}/ours", "--as", "a b"], "--as is `a b`"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "theirs")[1].close()
    assert leave("import", *(argument.format(tmp_path) for argument in arguments)) == ExitCode.USAGE
    assert said in capsys.readouterr().err
