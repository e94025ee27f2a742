"""What would keep a run from starting is found without starting or keeping anything."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.experiments.obstacles import obstacles
from metakernelbench.experiments.spec import ExperimentSpec
from tests.experiments.support import spec_of

TURNS = '[[attempt]]\nmatch = "*"\n'


@pytest.fixture
def spec(tmp_path: Path) -> ExperimentSpec:
    """One that can start."""
    (tmp_path / "turns.toml").write_text(TURNS)
    attempt = AttemptSettings(device="cpu", workload="smoke", sandbox="host", script=tmp_path / "turns.toml")
    return spec_of(tmp_path / "made" / "by the run", models=("scripted/nothing",), attempt=attempt)


def found(spec: ExperimentSpec, **changes: object) -> list[str]:
    return asyncio.run(obstacles(spec.model_copy(update=changes)))


def test_nothing_stands_in_the_way_and_nothing_is_left_behind(spec: ExperimentSpec, tmp_path: Path) -> None:
    assert found(spec) == []
    assert [path.name for path in tmp_path.iterdir()] == ["turns.toml"]


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ("/etc/passwd", "Not a directory"),
        ("/etc/passwd/inside", "Not a directory"),
        ("/proc/x", "No such file or directory"),
        ("/dev/full", "Not a directory"),
    ],
)
def test_a_store_that_cannot_be_made_is_named(spec: ExperimentSpec, store: str, why: str) -> None:
    assert found(spec, store=store) == [f"the folder {store} cannot be made or written to: {why}"]


def test_a_database_that_is_a_folder_is_named(spec: ExperimentSpec, tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").mkdir()
    said = f"the store {tmp_path} cannot be used: {tmp_path}/store.sqlite is not a file"
    assert found(spec, store=str(tmp_path)) == [said]


def test_of_a_database_the_folder_of_artifacts_is_looked_at(spec: ExperimentSpec) -> None:
    (said,) = found(spec, store="postgresql://host/name", artifacts="/etc/passwd")
    assert said.startswith("the folder /etc/passwd cannot be made")


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")
def test_a_cluster_that_is_not_there_is_named(spec: ExperimentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (said,) = found(spec, judge="ray", judge_options={"address": "127.0.0.1:1"})
    assert said.startswith("no Ray cluster can be joined at `127.0.0.1:1`")
    assert found(spec, judge="ray", judge_options={"address": "local"}) == []
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    (said,) = found(spec, judge="ray")
    assert said.startswith("no Ray cluster can be joined at `auto`")


@pytest.mark.skipif(find_spec("modal") is None, reason="the extra `modal` is not installed")
def test_that_nobody_pays_for_modal_is_named(spec: ExperimentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(spec, judge="modal") == ["the `modal` judge grades on GPUs"]
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.setenv(name, "")
    on_a_gpu = {"attempt": spec.attempt.model_copy(update={"device": "cuda"})}
    assert found(spec, judge="modal", **on_a_gpu) == ["Modal is given no token_id and no token_secret"]
