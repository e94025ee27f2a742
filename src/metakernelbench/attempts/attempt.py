"""Runs one attempt: a Harbor trial with the judge's mailbox beside it, then the final grading, then the record."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import platform
import random
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from metakernelbench.attempts.agents.models import OWN_SANDBOXES, TERMINUS, agent_options, check_model, quiet_libraries
from metakernelbench.attempts.agents.script import load_script
from metakernelbench.attempts.agents.scripted_model import ScriptedModel
from metakernelbench.attempts.ending import ending_of
from metakernelbench.attempts.mailbox import Mailbox, read_file
from metakernelbench.attempts.record import AttemptRecord, Usage
from metakernelbench.attempts.safekeeping import Kept, found, keep
from metakernelbench.attempts.settings import SCRIPTED, AttemptSettings
from metakernelbench.attempts.task import digest, task_files, write_task
from metakernelbench.dsls import dsl as dsls
from metakernelbench.dsls.docs import build as docs
from metakernelbench.errors import InfrastructureFault, TriedEnough
from metakernelbench.experiments.planned import PlannedAttempt, SkillForm
from metakernelbench.grading.contract import CONTRACT, CONTRACT_VERSION
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest, Judge

__all__ = ["check_model", "fingerprint", "run_attempt"]

_FINAL_TRIES = 3
_FINAL_PAUSE_S = 4.0
"""Seconds before the second try of a final grading, on average; twice as many before the third."""
_MAX_SKILL_BYTES = 200_000
_TRIAL = "trial"
_IDENTITY = ("problem", "dsl", "model", "replicate", "arm", "source", "material", "without", "skill_form")


@dataclass
class _Work:
    """What has been collected of an attempt so far."""

    kernel: bytes | None = None
    skill: str | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    lost: InfrastructureFault | None = None
    """Why nothing could be collected."""


def fingerprint(planned: PlannedAttempt, settings: AttemptSettings, skill: str | None) -> str:
    """Digest of everything that an attempt's outcome may depend on and that we control."""
    parts = {
        "task": _task_digest(planned.problem, planned.dsl, settings.model_dump_json(), skill, planned.skill_form),
        "contract": CONTRACT_VERSION,
        "model": planned.model,
        "settings": settings.model_dump(mode="json", exclude={"script"}),
        "script": None,
    }
    if planned.model.startswith(SCRIPTED) and settings.script is not None:
        parts["script"] = load_script(settings.script, planned.key).model_dump(mode="json", exclude={"match"})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=4096)
def _task_digest(problem: str, dsl: str, settings: str, skill: str | None, skill_form: SkillForm) -> str:
    """Digest of a task's files; `settings` are JSON. Remembered, because planning asks for each task very often."""
    return digest(task_files(problem, dsl, AttemptSettings.model_validate_json(settings), skill, skill_form))


async def run_attempt(
    planned: PlannedAttempt,
    *,
    settings: AttemptSettings,
    skill: str | None,
    judge: Judge,
    folder: Path,
    slot: int = 0,
) -> AttemptRecord:
    """Run one attempt to its end, leaving Harbor's files in `folder`.

    `skill` is attached to the instruction: the source's skill, or what the design gives in its place. `slot` must
    differ between attempts that run side by side. Raises `UserError` where no attempt with these settings can succeed,
    and `InfrastructureFault` for what may be tried again: a provider that is down, a sandbox that did not start or was
    lost. A final grading that failed three times is `TriedEnough`. A later call with the same `folder` goes on where
    this one stopped, so the folder has to go once the record is in the store.
    """
    check_model(planned.model, settings)
    folder = folder.resolve()
    digest_now = fingerprint(planned, settings, skill)
    kept = await asyncio.to_thread(found, folder, digest_now)
    if kept is not None:
        return await _graded(kept, planned, settings, judge, folder)
    started_at = datetime.now(UTC)
    files = task_files(planned.problem, planned.dsl, settings, skill, planned.skill_form)
    documentation = await asyncio.to_thread(docs.build, dsls.load(planned.dsl))
    write_task(files, folder / "task", documentation.folder, copy=settings.sandbox not in OWN_SANDBOXES)
    shutil.rmtree(folder / _TRIAL, ignore_errors=True)
    mailbox = mailbox_of(planned, settings, judge)
    work = _Work()
    async with _endpoint(planned, settings) as api_base:
        trial = await _trial(planned, settings, folder, slot, api_base)
        _attend(trial, mailbox, work)
        result = await _run(trial, mailbox)
    if work.lost is not None:
        raise work.lost
    trajectory = _trajectory(folder)
    record = AttemptRecord(
        **{name: getattr(planned, name) for name in _IDENTITY},
        ended=ending_of(result, trajectory, says_when_done=settings.agent == TERMINUS),
        instruction=files["instruction.md"].decode(),
        submissions=tuple(mailbox.submissions),
        kernel=None if work.kernel is None else work.kernel.decode(errors="replace"),
        skill=work.skill,
        usage=_usage(result.agent_result),
        trajectory=trajectory,
        seconds={**_phases(result), **work.seconds},
        fingerprint=digest_now,
        versions=_versions(settings),
        sandbox={"kind": settings.sandbox, **_limits_in_force(trial.agent_environment)},
        started_at=started_at.isoformat(timespec="seconds"),
        finished_at=_now(),
    )
    kept = await asyncio.to_thread(keep, folder, record, work.kernel)
    return await _graded(kept, planned, settings, judge, folder)


async def _graded(
    kept: Kept, planned: PlannedAttempt, settings: AttemptSettings, judge: Judge, folder: Path
) -> AttemptRecord:
    """The whole record. Only the grading is tried again after a fault of ours."""
    if kept.source is None or kept.complete:
        return kept.record
    start = time.monotonic()
    request = _request(planned, settings, kept.source, final=True)
    for number in range(1, _FINAL_TRIES + 1):
        try:
            verdict = await judge.verdict(request)
        except InfrastructureFault as fault:
            if number == _FINAL_TRIES:
                raise TriedEnough(f"the final grading failed {number} times: {fault.message}") from fault
            await asyncio.sleep(_FINAL_PAUSE_S * number * random.uniform(0.5, 1.5))
        else:
            break
    seconds = {**kept.record.seconds, "final_grading": time.monotonic() - start}
    record = kept.record.model_copy(update={"final": verdict, "seconds": seconds, "finished_at": _now()})
    await asyncio.to_thread(keep, folder, record, kept.source)
    return record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def mailbox_of(planned: PlannedAttempt, settings: AttemptSettings, judge: Judge) -> Mailbox:
    """The mailbox of one attempt, whose submissions `judge` grades."""
    from metakernelbench.grading.report import render

    async def grade(source: bytes) -> Verdict:
        return await judge.verdict(_request(planned, settings, source))

    return Mailbox(grade, render, budget_s=settings.budget_s, max_submissions=settings.max_submissions)


def _request(
    planned: PlannedAttempt, settings: AttemptSettings, source: bytes, *, final: bool = False
) -> GradingRequest:
    return GradingRequest(
        problem=planned.problem,
        dsl=planned.dsl,
        source=source,
        workload=settings.workload,
        device=settings.device,
        final=final,
    )


@contextlib.asynccontextmanager
async def _endpoint(planned: PlannedAttempt, settings: AttemptSettings) -> AsyncIterator[str | None]:
    """Where the model answers: the stand-in's address for prepared turns, None for a provider that LiteLLM knows."""
    if not planned.model.startswith(SCRIPTED) or settings.script is None:
        yield None
        return
    async with ScriptedModel(load_script(settings.script, planned.key)) as model:
        yield model.api_base


async def _trial(
    planned: PlannedAttempt, settings: AttemptSettings, folder: Path, slot: int, api_base: str | None
) -> Any:
    """Harbor's trial of the task in `folder`. Its own verifier is off: scoring is the judge's."""
    quiet_libraries()
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
    from harbor.trial.trial import Trial

    model_name, options = agent_options(planned.model, settings, api_base)
    own = OWN_SANDBOXES.get(settings.sandbox)
    environment = (
        EnvironmentConfig(import_path=own, kwargs={"slot": slot})
        if own
        else EnvironmentConfig(type=settings.sandbox, kwargs=settings.sandbox_options)
    )
    return await Trial.create(
        TrialConfig(
            task=TaskConfig(path=folder / "task"),
            trials_dir=folder,
            trial_name=_TRIAL,
            # The agent's own folder is copied out of the sandbox at the end, over the host's: not over the trajectory.
            agent=AgentConfig(
                name=settings.agent, model_name=model_name, kwargs=options, exclude_logs=["trajectory*.json"]
            ),
            environment=environment,
            verifier=VerifierConfig(disable=True),
        )
    )


async def _run(trial: Any, mailbox: Mailbox) -> Any:
    """Harbor's result. A judge that cannot work at all ends the attempt with its own error."""
    running = asyncio.create_task(trial.run())
    mailbox.on_failure = running.cancel
    try:
        return await running
    except asyncio.CancelledError:
        if mailbox.failure is not None:
            raise mailbox.failure from None
        raise


def _attend(trial: Any, mailbox: Mailbox, work: _Work) -> None:
    """Open the mailbox when the agent starts; close it and collect the work when it ends, however it ends."""
    from harbor.trial.hooks import TrialEvent

    async def begin(_: Any) -> None:
        await mailbox.open(trial.agent_environment)

    async def end(_: Any) -> None:
        environment = trial.agent_environment
        try:
            if hasattr(environment, "quiesce"):  # from here on the agent's files hold still
                await environment.quiesce()
            await _collect(environment, work)
        except InfrastructureFault as fault:
            work.lost = fault
        finally:
            await mailbox.close()

    trial.add_hook(TrialEvent.AGENT_START, begin)
    trial.add_hook(TrialEvent.AGENT_END, end)


async def _collect(environment: Any, work: _Work) -> None:
    """Read the deliverables."""
    work.kernel = await read_file(environment, "/app/kernel.py", CONTRACT.max_source_bytes + 1)
    skill = await read_file(environment, "/app/SKILL.md", _MAX_SKILL_BYTES)
    text = "" if skill is None else skill.decode(errors="replace")
    work.skill = text if text.strip() else None


def _trajectory(folder: Path) -> dict[str, Any] | None:
    try:
        trajectory: dict[str, Any] = json.loads((folder / _TRIAL / "agent" / "trajectory.json").read_text())
    except (OSError, ValueError):
        return None
    return trajectory


def _usage(context: Any) -> Usage:
    if context is None:
        return Usage()
    return Usage(
        turns=int((context.metadata or {}).get("n_episodes", 0)),
        input_tokens=context.n_input_tokens,
        cached_tokens=context.n_cache_tokens,
        output_tokens=context.n_output_tokens,
        cost_usd=context.cost_usd,
    )


def _phases(result: Any) -> dict[str, float]:
    names = {"environment_setup": "sandbox_start", "agent_setup": "agent_setup", "agent_execution": "agent"}
    seconds = {}
    for phase, name in names.items():
        timing = getattr(result, phase)
        if timing is not None and timing.started_at and timing.finished_at:
            seconds[name] = (timing.finished_at - timing.started_at).total_seconds()
    return seconds


def _versions(settings: AttemptSettings) -> dict[str, str]:
    packages = {name: version(name) for name in ("metakernelbench", "harbor", "litellm")}
    return {**packages, "python": platform.python_version(), "agent": settings.agent}


def _limits_in_force(environment: Any) -> dict[str, str]:
    limits = getattr(environment, "limits", None)
    return dict(limits.in_force) if limits is not None else {}
