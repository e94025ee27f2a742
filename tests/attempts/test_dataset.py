"""Variants as a Harbor dataset: what Harbor's own loader makes of it, and that a task brings all that grading takes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from metakernelbench.attempts.dataset import Task, write_dataset
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.errors import UserError
from tests.attempts.test_images import linted

CPU = AttemptSettings(device="cpu", workload="smoke")


@pytest.fixture(scope="module")
def gpu_tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    return write_dataset(tmp_path_factory.mktemp("gpu") / "set", ["p28", "p03"], ["cute", "tirx"], AttemptSettings())


def test_harbor_loads_every_task(gpu_tasks: list[Task]) -> None:
    from harbor.models.task.task import Task as HarborTask

    for task in gpu_tasks:
        loaded = HarborTask(task.folder)
        assert loaded.name == f"metakernelbench/{task.problem}-{task.dsl}"
        environment = loaded.config.environment
        assert (environment.cpus, environment.memory_mb, environment.gpus) == (2, 8192, 1)
        assert loaded.config.verifier.timeout_sec == 3600
        assert loaded.paths.test_path.exists() and os.access(loaded.paths.test_path, os.X_OK)
        assert task.has_solution == loaded.paths.solve_path.exists()
    assert [task.folder.name for task in gpu_tasks] == ["p28-cute", "p03-cute", "p28-tirx", "p03-tirx"]


def test_an_agent_is_told_that_nothing_is_graded_before_the_end(gpu_tasks: list[Task], tmp_path: Path) -> None:
    text = (gpu_tasks[0].folder / "instruction.md").read_text()
    assert "There is no judge beside this sandbox" in text and "this sandbox has the one that grading uses" in text
    (task,) = write_dataset(tmp_path / "cpu", ["p28"], ["tirx"], CPU)
    text = (task.folder / "instruction.md").read_text()
    assert "There is no judge beside this sandbox" in text and "measure on the GPU" not in text


def test_the_image_for_a_gpu_is_clean_and_has_a_compiler(gpu_tasks: list[Task]) -> None:
    text = (gpu_tasks[0].folder / "environment/Dockerfile").read_text()
    assert linted(text) == ""
    assert text.startswith("FROM nvidia/cuda:13") and "'torch==2.13.0'" in text and "bubblewrap" in text


def test_all_tasks_of_a_dsl_share_their_documentation_on_the_disk(gpu_tasks: list[Task]) -> None:
    one, other = (task.folder / "environment/docs/index.md" for task in gpu_tasks[2:])
    assert one.read_bytes() == other.read_bytes() and one.stat().st_ino == other.stat().st_ino


def test_the_verifier_that_comes_along_grades_by_itself(tmp_path: Path) -> None:
    """With nothing of this installation but the third-party packages: here a kernel that is refused at once."""
    (task,) = write_dataset(tmp_path / "set", ["p28"], ["tirx"], CPU)
    data = (task.folder / "tests/verifier.zip").read_bytes()
    assert all(info.date_time[0] == 1980 for info in zipfile.ZipFile(io.BytesIO(data)).infolist())
    names = set(zipfile.ZipFile(io.BytesIO(data)).namelist())
    assert any(name.endswith("p28_fused_add_rmsnorm.py") for name in names)
    assert not any(folder in name for name in names for folder in ("attempts/", "experiments/", "store/", "p03_"))
    root = tmp_path / "root"
    (root / "app").mkdir(parents=True)
    (root / "app/kernel.py").write_text("solve = 1\n")
    done = subprocess.run(
        [str(task.folder / "tests/test.sh")],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "MKB_ROOT": str(root), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((root / "logs/verifier/reward.json").read_text()) == {"reward": 0.0, "speedup": 0.0}
    assert json.loads((root / "logs/verifier/verdict.json").read_text())["findings"][0]["code"] == "no-solve"


def test_a_dataset_is_never_written_over_something(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("my notes")
    with pytest.raises(UserError, match="is not empty"):
        write_dataset(tmp_path, ["p28"], ["tirx"], CPU)


def test_a_dsl_that_does_not_run_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`cute` does not run on the device `cpu`"):
        write_dataset(tmp_path / "set", ["p28"], ["cute"], CPU)
