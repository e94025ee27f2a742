"""`mkb rematch` on kernels that are timed for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.cli.output import ExitCode
from metakernelbench.experiments.plan import plan_of
from metakernelbench.store.store import Store
from tests.experiments.support import record_of, spec_of, verdict_of
from tests.grading.support import HONEST, plugin_installed


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store with an experiment of two attempts at p28 in Toy, which have passed."""
    spec = spec_of(tmp_path, design=("retry",), dsls=("toy",), problems=("p28",))
    with Store.open(tmp_path, create=True) as opened, plugin_installed():
        opened.save_experiment(spec, plan_of(spec))
        for attempt in plan_of(spec).attempts:
            final = verdict_of(attempt, passed=True)
            record = record_of(attempt, spec.attempt, None, kernel=f"# {attempt.key}\n{HONEST}", final=final)
            opened.save_attempt("small", attempt, record)
        yield tmp_path


def mkb(*arguments: str) -> tuple[int, dict[str, object]]:
    """In a process of its own, which finds the Toy DSL."""
    command = [sys.executable, "-m", "metakernelbench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ.copy())
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(600)  # gradings of other processes on this machine come first
def test_the_ratio_is_measured_and_kept(store: Path) -> None:
    place = ("small", "--store", str(store))
    assert mkb("rematch", *place, "--dry-run")[1]["to_measure"] == 1
    code, found = mkb("rematch", *place)
    assert code == ExitCode.OK, found
    (measured,) = found["measured"]  # type: ignore[misc]
    assert measured["low"] <= measured["ratio"] <= measured["high"] and measured["ratio"] > 0  # type: ignore[index]
    assert mkb("rematch", *place)[1]["measured"] == []
    with Store.open(store) as opened:
        (kept,) = opened.rematches.of("small").values()
    assert (kept.ratio, kept.device, kept.judge) == (measured["ratio"], "cpu", "local")  # type: ignore[index]
    assert kept.versions["toydsl"] == "1.0" and len(kept.measurement["verdicts"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["small"], "its store is not known"),
        (["smal", "--store", "{store}"], "unknown experiment `smal`; nearest: `small`"),
        (["small", "--store", "{store}/nowhere"], "there is no store in"),
        (["none.toml"], "cannot read none.toml"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    store: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["rematch", *(argument.format(store=store) for argument in arguments)])
    assert left.value.code == ExitCode.USAGE
    assert said in capsys.readouterr().err
