"""A file is made ready for this machine: prepared turns may do without a sandbox, a model may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from metakernelbench.errors import UserError
from metakernelbench.experiments import loading
from metakernelbench.experiments.loading import prepared
from tests.experiments.test_spec import GOOD, written

WHY = "this machine has no bwrap"
ON_THE_CPU = '[attempt]\ndevice = "cpu"\nworkload = "smoke"\n'


@pytest.fixture(autouse=True)
def _no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "sandbox_available", lambda: WHY)


def test_without_a_sandbox_prepared_turns_go_on_in_the_host_and_it_is_said_in_one_sentence(tmp_path: Path) -> None:
    spec, notes = prepared(written(tmp_path, GOOD.replace("vendor/model", "scripted/turns") + ON_THE_CPU))
    assert spec.attempt.sandbox == "host"
    assert notes == (
        "This is a rehearsal, not a result: the model's turns are prepared. The kernels are graded for real, on a CPU, "
        "at the smoke workload.",
        f"No sandbox here ({WHY}): the prepared turns run without isolation, in the `host` sandbox.",
    )


def test_without_a_sandbox_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"the bubblewrap sandbox cannot be had: {WHY}"):
        prepared(written(tmp_path, GOOD + ON_THE_CPU))
    mixed = GOOD.replace('"vendor/model"', '"vendor/model", "scripted/turns"')
    with pytest.raises(UserError, match="cannot be had"):
        prepared(written(tmp_path, mixed + ON_THE_CPU))


def test_another_sandbox_is_not_looked_for(tmp_path: Path) -> None:
    spec, notes = prepared(written(tmp_path, GOOD + ON_THE_CPU + 'sandbox = "docker"\n'))
    assert (spec.attempt.sandbox, notes) == ("docker", ())
