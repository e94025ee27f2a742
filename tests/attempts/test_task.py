import ast
import dataclasses
import importlib
import json
import tomllib
from pathlib import Path

import pytest

from metakernelbench.attempts.agents.models import quiet_libraries
from metakernelbench.attempts.attempt import fingerprint
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import digest, task_files, write_task
from metakernelbench.dsls import dsl as dsls
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.problems import catalog, roofline

SETTINGS = AttemptSettings()
SHOWN = "environment/task/"


def imported_modules(source: bytes) -> set[str]:
    """Modules of this package that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
    return {name for name in found if name.startswith("metakernelbench")}


@pytest.mark.parametrize("problem", catalog.problem_ids())
def test_whatever_the_shown_modules_import_is_shown_too(problem: str) -> None:
    files = {name: text for name, text in task_files(problem, "tirx", SETTINGS, None).items() if name.endswith(".py")}
    for name, text in files.items():
        for module in imported_modules(text):
            path = f"{SHOWN}{module.replace('.', '/')}"
            assert f"{path}.py" in files or f"{path}/__init__.py" in files, f"{name} imports {module}"


def test_of_the_grading_only_what_is_public_is_shown() -> None:
    """The contract, the comparison and the static rules; nothing of schedules, seeds, observation or measurement."""
    shown = {Path(name).stem for name in task_files("p28", "tirx", SETTINGS, None) if "/grading/" in name}
    rules = {"codes", "names", "policy", "rules", "scopes", "source"}
    assert shown == {"__init__", "contract", "verdict", "compare"} | rules


@pytest.mark.parametrize("problem", catalog.problem_ids())
def test_the_sandboxes_of_a_problem_differ_only_in_what_belongs_to_the_dsl(problem: str) -> None:
    tasks = {name: task_files(problem, name, SETTINGS, None) for name in ("cute", "tirx")}
    plugins = {f"{SHOWN}metakernelbench/dsls/{name}.py" for name in tasks}
    a, b = ({name: text for name, text in files.items() if name not in plugins} for files in tasks.values())
    assert set(a) == set(b)
    assert {name for name in a if a[name] != b[name]} == {
        "task.toml",
        "instruction.md",
        "environment/docs.txt",
        f"{SHOWN}rules.md",
        "environment/requirements.txt",
        f"{SHOWN}facts.json",
    }
    settings_a, settings_b = (tomllib.loads(files["task.toml"].decode()) for files in (a, b))
    for settings in (settings_a, settings_b):
        settings["environment"].pop("env")
        settings["task"].pop("name")
    assert settings_a == settings_b


def test_a_dsl_of_a_third_party_brings_its_own_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "mkb_toy"
    package.mkdir()
    (package / "__init__.py").write_text('"""Toy."""\n')
    (package / "plugin.py").write_text((Path(__file__).parents[1] / "grading/plugin/toydsl.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = importlib.import_module("mkb_toy.plugin")
    monkeypatch.setattr(dsls, "load", lambda _name: plugin.ToyDsl())
    files = task_files("p28", "toy", SETTINGS, None)
    assert files[f"{SHOWN}mkb_toy/plugin.py"] == (package / "plugin.py").read_bytes()
    assert f"{SHOWN}mkb_toy/__init__.py" in files
    assert f"{SHOWN}metakernelbench/dsls/tirx.py" not in files
    assert json.loads(files[f"{SHOWN}facts.json"])["module"] == "mkb_toy.plugin"
    assert "in Toy" in files["instruction.md"].decode()


def test_a_gpu_is_added_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    known = roofline.GPUS["B200"]
    monkeypatch.setattr(roofline, "GPUS", {"Z1": dataclasses.replace(known, name="Z1", arch="sm_120a", processors=7)})
    files = task_files("p28", "cute", AttemptSettings(gpu="NVIDIA Z1"), None)
    assert "one NVIDIA Z1 (architecture `sm_120a`)" in files["instruction.md"].decode()
    assert 'CUTE_DSL_ARCH = "sm_120a"' in files["task.toml"].decode()
    facts = json.loads(files[f"{SHOWN}facts.json"])
    assert (facts["arch"], facts["capability"], facts["processors"]) == ("sm_120a", [12, 0], 7)


def test_a_gpu_that_is_not_listed_is_named_and_nothing_is_claimed_of_it() -> None:
    files = task_files("p28", "cute", AttemptSettings(gpu="NVIDIA Z1"), None)
    assert "one NVIDIA Z1. Inputs" in files["instruction.md"].decode()
    assert json.loads(files[f"{SHOWN}facts.json"])["arch"] is None
    assert "sm_90a" in task_files("p28", "cute", SETTINGS, None)["task.toml"].decode()


def test_harbor_reads_the_task(tmp_path: Path) -> None:
    quiet_libraries()
    from harbor.models.task.task import Task

    settings = AttemptSettings(cpus=3, memory_mb=4096, budget_s=90.5)
    files = task_files("p28", "triton", settings, "Notes.")
    write_task(files, tmp_path / "task", tmp_path)
    task = Task(tmp_path / "task")
    assert task.name == "metakernelbench/p28-triton"
    assert task.config.agent.timeout_sec == 90.5
    assert (task.config.environment.cpus, task.config.environment.memory_mb) == (3, 4096)
    assert task.config.environment.network_mode == "no-network"
    assert task.instruction.strip() == files["instruction.md"].decode().strip()


def test_writing_a_task_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "stale").touch()
    write_task(task_files("p28", "tirx", SETTINGS, None), tmp_path / "task", tmp_path)
    assert not (tmp_path / "task" / "stale").exists()


def test_the_digest_follows_contents_and_names() -> None:
    files = {"a": b"1", "b": b"2"}
    assert digest(files) == digest(dict(reversed(files.items())))
    assert (
        len({digest(files), digest({"a": b"12"}), digest({"a": b"1", "c": b"2"}), digest({"a": b"2", "b": b"1"})}) == 4
    )


def test_a_fingerprint_changes_with_what_an_outcome_depends_on_and_with_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "turns.toml"
    script.write_text('[[attempt]]\nmatch = "*"\n')
    settings = AttemptSettings(script=script)
    planned = PlannedAttempt(problem="p28", dsl="tirx", model="scripted/demo")
    base = fingerprint(planned, settings, None)

    assert fingerprint(planned, settings, None) == base
    moved = tmp_path / "moved.toml"
    moved.write_bytes(script.read_bytes() + b"# a remark\n")
    assert fingerprint(planned, settings.model_copy(update={"script": moved}), None) == base

    changed = {
        fingerprint(planned, settings, "Notes."),
        fingerprint(planned, settings.model_copy(update={"budget_s": 60.0}), None),
        fingerprint(planned, settings.model_copy(update={"model_options": {"temperature": 1}}), None),
        fingerprint(PlannedAttempt(problem="p03", dsl="tirx", model="scripted/demo"), settings, None),
        fingerprint(PlannedAttempt(problem="p28", dsl="cute", model="scripted/demo"), settings, None),
    }
    script.write_text('[[attempt]]\nmatch = "*"\nskill = "other turns"\n')
    changed.add(fingerprint(planned, settings, None))
    assert len(changed | {base}) == 7
