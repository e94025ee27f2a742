"""Why a run would end here before its first attempt: all that can be found out without starting or keeping anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from metakernelbench.attempts.agents.models import obstacles as obstacles_to
from metakernelbench.errors import MkbError
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.judging.registry import open_judge


async def obstacles(spec: ExperimentSpec) -> list[str]:
    """A sentence each: of the agent, the sandbox and the models, of the store, of the judge."""
    found = [error.message for model in spec.models for error in obstacles_to(model, spec.attempt)]
    sentences = [*found, _to_the_store(spec), await _to_the_judge(spec)]
    return list(dict.fromkeys(sentence for sentence in sentences if sentence is not None))


def _to_the_store(spec: ExperimentSpec) -> str | None:
    """A folder has to be there or to be made, and to be written to; a database has been asked already."""
    folder = Path(spec.artifacts if spec.artifacts is not None and "://" in spec.store else spec.store)
    database = folder / "store.sqlite"
    try:
        if database.exists() and not database.is_file():
            return f"the store {folder} cannot be used: {database} is not a file"
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"the folder {folder} cannot be made or written to: {error.strerror}"


async def _to_the_judge(spec: ExperimentSpec) -> str | None:
    try:
        judge = open_judge(spec.judge, device=spec.attempt.device, options=spec.judge_options)
        try:
            await judge.look()
        finally:
            await judge.close()
    except MkbError as error:
        return error.message
    return None
