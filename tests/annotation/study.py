"""A small study in a store, with skills and trajectories: what runs, spreadsheets, commands and tables start from."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from metakernelbench.annotation.gold_set import gold_set
from metakernelbench.annotation.scripted import Reply
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.designs import cross_dsl
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.store import Store
from tests.analysis.support import verdict
from tests.annotation.support import step
from tests.experiments.support import spec_of

NAME = "small"
SOURCES = {"p03": "s11", "p28": "s02", "p36": "s03", "p49": "s26", "p66": "s40", "p72": "s37"}
"""Problem → the gold skill that its attempt in CuTe kept."""
FAILS = ("p28", "p49")
"""Problems whose attempts in TIRx fail once they have a skill."""
REMARK = "I do what the notes say about this kernel."


def small_study(folder: Path) -> Store:
    """Six problems in two languages by two models. With CuTe's skill, TIRx fails at two problems and is faster at the
    others; with TIRx's, CuTe stays as it is."""
    return copied(_made(), folder)


def copied(template: Path, folder: Path) -> Store:
    """A store of one's own, like another one."""
    shutil.copytree(template, folder, dirs_exist_ok=True)
    return Store.open(folder)


def scratch() -> Path:
    """A folder that lasts as long as this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _made() -> Path:
    """Making it takes longer than copying it."""
    folder = scratch()
    texts = {skill.id: skill.text for skill in gold_set().skill}
    spec = spec_of(folder, problems=tuple(SOURCES), dsls=("cute", "tirx"), models=("a/one", "b/two"))
    plan = cross_dsl(spec.problems, spec.dsls, spec.models, 1)
    with Store.open(folder, create=True) as store:
        store.save_experiment(spec, plan)
        for attempt in plan.attempts:
            store.save_attempt(NAME, attempt, record(attempt, texts[SOURCES[attempt.problem]]))
    return folder


def record(attempt: PlannedAttempt, skill: str) -> AttemptRecord:
    own = skill if attempt.label == "solo" and attempt.dsl == "cute" else f"Short, about {attempt.problem}.\n"
    treated = attempt.label == "from-cute"
    failed = treated and attempt.problem in FAILS
    ms = None if failed else 2.0 if treated else 4.0
    return AttemptRecord.model_validate(
        {
            "problem": attempt.problem,
            "dsl": attempt.dsl,
            "model": attempt.model,
            "replicate": 0,
            "arm": attempt.arm,
            "source": attempt.source,
            "ended": "completed",
            "instruction": "Write it.",
            "submissions": (
                {"number": 1, "requested_at_s": 60.0, "answered_at_s": 70.0, "source": "other", "answer": "graded"},
            ),
            "kernel": f"# {digest_of(attempt.key)}",
            "skill": own,
            "final": verdict(attempt.problem, attempt.dsl, ms),
            "trajectory": {"steps": [step(REMARK, f"cat {attempt.problem}", attempt.model)]},
            "fingerprint": "f",
            "started_at": "2026-01-01T00:00:00+00:00",
            "finished_at": "2026-01-01T00:40:00+00:00",
        }
    )


def replies() -> tuple[Reply, ...]:
    """Gold labels for the skills, `followed_fully` for all uptake, and one cause."""
    skills = [
        Reply(
            question="skill",
            contains=skill.text.strip(),
            labels=tuple(
                {"category": s.category, "quote": s.quote, "supported": s.supported} for s in skill.labels.statements
            ),
        )
        for skill in gold_set().skill
        if skill.id in SOURCES.values()
    ]
    categories = {s.category for skill in gold_set().skill for s in skill.labels.statements}
    followed = tuple(
        {"category": category, "uptake": "followed_fully", "evidence": REMARK} for category in sorted(categories)
    )
    cause = {"step": "unverified_adoption", "evidence": REMARK}
    return (
        *skills,
        Reply(question="skill", labels=()),
        Reply(question="uptake", uptake=followed),
        Reply(question="cause", causes=(cause,)),
    )


def write_replies(path: Path, given: tuple[Reply, ...]) -> Path:
    """The replies as a file for `--replies`. (Strings of JSON are strings of TOML.)"""
    lines: list[str] = []
    for reply in given:
        lines.append("[[reply]]")
        for name, value in reply.model_dump(exclude_none=True).items():
            lines.append(f"{name} = {_toml(value)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    match value:
        case dict():
            inside = ", ".join(f"{key} = {_toml(item)}" for key, item in value.items() if item is not None)
            return f"{{ {inside} }}"
        case list() | tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)
