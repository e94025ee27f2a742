import ast
import dataclasses
import re

import pytest

from metakernelbench.attempts import instruction as instructions
from metakernelbench.attempts.instruction import NamedDsl, instruction, named, rules_text
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import subject_of, task_files
from metakernelbench.dsls import dsl as dsls
from metakernelbench.grading import policy, rules
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.problems import catalog

SETTINGS = AttemptSettings()
TOLD_TO_AGENTS = (
    "correctness_draws",
    "warmup_calls",
    "timed_calls",
    "rechecked_calls",
    "tolerance_factor",
    "time_limit_s",
    "max_source_bytes",
)
"""The rest of the contract's numbers are the verifier's checks of itself: nothing that an agent could act on."""


def prompt(problem: str, dsl: NamedDsl, skill: str | None = None, settings: AttemptSettings = SETTINGS) -> str:
    return instruction(subject_of(catalog.source_path(problem)), dsl, settings, skill)


@pytest.mark.parametrize("problem", catalog.problem_ids())
def test_the_prompts_of_a_problem_differ_only_in_the_dsl_they_name(problem: str) -> None:
    anonymous = set()
    for name in dsls.dsl_names():
        dsl = named(dsls.load(name))
        text = prompt(problem, dsl)
        assert dsl.title in text
        anonymous.add(text.replace(dsl.packages, "PACKAGES").replace(dsl.title, "DSL"))
    assert len(anonymous) == 1


def test_the_arms_differ_only_in_the_notes_attached_verbatim() -> None:
    dsl = named(dsls.load("tirx"))
    skill = "# Findings\n\n{{ not a template }} {braces} <tag> & 'quotes'\n\n    indented\n"
    solo, conditioned = prompt("p28", dsl), prompt("p28", dsl, skill)
    assert conditioned.startswith(solo.rstrip("\n"))
    header, _, attached = conditioned[len(solo.rstrip("\n")) :].partition("as they are.\n\n")
    assert attached.rstrip("\n") == skill.rstrip("\n")
    assert "DSL" not in header
    assert dsl.title not in header


def test_the_numbers_of_the_contract_come_from_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {name: 7001 + place for place, name in enumerate(TOLD_TO_AGENTS)}
    monkeypatch.setattr(instructions, "CONTRACT", dataclasses.replace(CONTRACT, **other))
    text = prompt("p28", named(dsls.load("tirx")))
    assert [number for number in other.values() if str(number) not in text and f"{number:,}" not in text] == []


@pytest.mark.parametrize("name", dsls.dsl_names())
def test_what_the_instruction_calls_allowed_or_refused_is_so_by_the_rules(name: str) -> None:
    dsl = dsls.load(name)
    text = prompt("p28", named(dsl))
    boundary = text.split("## Implementation boundary")[1].split("## Grading")[0]
    allowed = boundary.split("these modules of the standard library: ")[1].split(". Any other")[0]
    for module in allowed.replace("`", "").split(", "):
        assert rules.check(ast.parse(f"import {module}"), dsl) == [], module
    for module in (*instructions.REFUSED, "problem", "metakernelbench"):
        assert f"`{module}`" in boundary
        assert rules.check(ast.parse(f"import {module}"), dsl) != [], module
    for function in boundary.split("the built-in functions ")[1].split("; ")[0].replace("`", "").split(", "):
        assert rules.check(ast.parse(f"x = {function}('a')"), dsl) != [], function


@pytest.mark.parametrize("name", dsls.dsl_names())
def test_the_rules_as_told_are_those_that_are_applied(name: str) -> None:
    dsl = dsls.load(name)
    text = rules_text(dsl)
    for forbidden in (*dsl.forbidden, *policy.FORBIDDEN_NAMES):
        assert f"`{forbidden}`" in text
        assert rules.check(ast.parse(f"import {forbidden.split('.')[0]}\nx = {forbidden}"), dsl) != [], forbidden
    for operation in ("torch._scaled_mm", "torch._int_mm"):
        assert rules.check(ast.parse(f"import torch\nx = {operation}"), dsl) == []
    allowed = text.split("Allowed are ")[1].split(". Every other")[0]
    assert "`torch`" in allowed
    assert "`numpy`" not in allowed


def test_all_that_the_instruction_names_is_there() -> None:
    """Files and commands of the sandbox that an agent is told of."""
    files = task_files("p28", "tirx", SETTINGS, None)
    text = files["instruction.md"].decode()
    for path in set(re.findall(r"`/task/([\w./]+)`", text)):
        assert any(name.startswith(f"environment/task/{path}") for name in files), path
    tool = files["environment/task/bin/task"].decode()
    for command in set(re.findall(r"`task (\w+)`", text)):
        assert f'case ["{command}"]' in tool, command
    assert "environment/task/bin/docs-search" in files


def test_the_settings_of_the_attempt_are_stated() -> None:
    settings = AttemptSettings(cpus=3, memory_mb=6144, budget_s=1500, max_submissions=4, workload="smoke", device="cpu")
    text = prompt("p28", named(dsls.load("tirx")), settings=settings)
    for stated in ("3 CPU cores, 6 GB", "25 minutes", "At most 4 submissions", "`SMOKE`", "runs on a CPU"):
        assert stated in text
    assert "NVIDIA" not in text


def test_the_gpu_is_named_where_grading_runs_on_one() -> None:
    assert "one NVIDIA H200" in prompt("p28", named(dsls.load("cute")))


def test_a_structured_skill_is_asked_for_in_the_section_on_the_skill_and_nowhere_else() -> None:
    source, dsl = subject_of(catalog.source_path("p28")), named(dsls.load("tirx"))
    free, structured = (instruction(source, dsl, SETTINGS, None, form) for form in ("free", "structured"))
    assert structured.startswith(free.rstrip("\n"))
    assert structured[len(free.rstrip("\n")) :].count("## ") == 5
