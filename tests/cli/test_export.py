"""`mkb export`: a dataset that Harbor runs for real, and Parquet files that others read."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import polars as pl
import pytest

from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.cli.app import main
from metakernelbench.cli.output import ExitCode
from tests.disk import files_of_at_most
from tests.store.test_merge import filled
from tests.store.test_rematches import rematch

STANDALONE = "metakernelbench.attempts.sandbox.standalone:StandaloneEnvironment"


def leave(*arguments: str | Path) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def harbor(folder: Path, agent: str, jobs: Path) -> dict[str, object]:
    """The result of the one trial of `harbor run`."""
    command = [str(Path(sysconfig.get_path("scripts")) / "harbor"), "run", "-p", str(folder), "-a", agent]
    environment = {**os.environ, "HARBOR_TELEMETRY": "off"}
    done = subprocess.run(
        [*command, "-e", STANDALONE, "-o", str(jobs), "-y", "-q"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (result,) = jobs.glob("*/*/result.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(result.read_text())
    return found


@pytest.mark.sandbox
@pytest.mark.timeout(600)  # gradings of other processes on this machine come first
@pytest.mark.skipif(sandbox_available() is not None, reason=str(sandbox_available()))
def test_harbor_runs_the_dataset_and_its_verifier_grades_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    assert leave("export", "harbor", folder, "--problem", "p28", "--dsl", "tirx", "--device", "cpu", "--json") == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert task == {"name": "p28-tirx", "problem": "p28", "dsl": "tirx", "has_solution": True}

    solved = harbor(folder, "oracle", tmp_path / "oracle")
    rewards = solved["verifier_result"]["rewards"]  # type: ignore[index]
    assert solved["exception_info"] is None and rewards["reward"] == 1 and rewards["speedup"] > 0
    idle = harbor(folder, "nop", tmp_path / "nop")
    assert idle["verifier_result"]["rewards"] == {"reward": 0.0, "speedup": 0.0}  # type: ignore[index]


def test_an_experiment_becomes_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, store = filled(tmp_path / "store")
    with store:
        compared = store.experiment("small").plan.comparisons[0]
        kernels = store.digests("small", "kernel", (compared.baseline, compared.treatment))
        store.rematches.save(
            "small",
            rematch(
                baseline=compared.baseline,
                treatment=compared.treatment,
                baseline_sha256=kernels[compared.baseline],
                treatment_sha256=kernels[compared.treatment],
            ),
        )
        records = dict(store.attempts("small"))
    out = tmp_path / "out"
    assert leave("export", "parquet", out, "small", "--store", tmp_path / "store", "--json") == 0
    files = [Path(name).name for name in json.loads(capsys.readouterr().out)["files"]]
    assert files == ["attempts.parquet", "comparisons.parquet", "submissions.parquet", "study.json", "texts.parquet"]
    comparisons = pl.read_parquet(out / "comparisons.parquet")
    assert comparisons.filter(pl.col("treatment") == compared.treatment)["measured_ratio"].to_list() == [1.25]
    texts = {row["key"]: row for row in pl.read_parquet(out / "texts.parquet").iter_rows(named=True)}
    assert set(texts) == set(records)
    for key, record in records.items():
        assert (texts[key]["kernel"], texts[key]["skill"]) == (record.kernel, record.skill)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["harbor", "{0}/set", "--problem", "p82"], "unknown problem `p82`"),
        (["harbor", "{0}/set", "--dsl", "cut"], "unknown DSL `cut`; nearest: `cute`"),
        (["harbor", "{0}/set", "--device", "tpu"], "unknown device `tpu`"),
        (["harbor", "{0}/set", "--workload", "big"], "unknown workload `big`"),
        (["harbor", "/proc/set", "--problem", "p28"], "cannot write /proc/set"),
        (["parquet", "{0}/out", "small", "--store", "{0}/nowhere"], "there is no store in"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave("export", *(argument.format(tmp_path) for argument in arguments)) == ExitCode.USAGE
    assert said in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_an_export_that_finds_no_room_leaves_the_older_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "store", name="demo")
    order = ("export", "parquet", tmp_path / "out", "demo", "--store", tmp_path / "store")
    assert leave(*order) == ExitCode.OK
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with files_of_at_most(1000):
        assert leave(*order) == ExitCode.USAGE
    assert f"cannot write {tmp_path}/out/attempts.parquet: File too large" in " ".join(capsys.readouterr().err.split())
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
