"""The record of one attempt: everything that a reader needs to see what happened and why."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from metakernelbench.grading.verdict import Verdict


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Submission(_Record):
    """One request for feedback, as the judge saw it."""

    number: int | None
    """1, 2, ... for counted submissions; None for one that was answered but not counted."""
    requested_at_s: float
    """Seconds of the attempt's clock when the request was seen."""
    answered_at_s: float | None = None
    """Seconds of the attempt's clock when the answer was written; None where the attempt ended first."""
    source: str | None = None
    """The snapshot that was graded; None where it could not be read."""
    verdict: Verdict | None = None
    answer: str
    """The text that the agent was shown."""


class Usage(_Record):
    """What the model was asked and what it cost. None where the provider did not say."""

    turns: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None


type Ending = Literal["completed", "budget", "agent_exit", "agent_error", "skipped"]
"""How the agent's work ended: it said it was done, the clock ran out, it left the terminal, it failed for a reason of
its own, or the attempt was not run because its source left nothing to attach."""


class AttemptRecord(_Record):
    """One finished attempt."""

    problem: str
    dsl: str
    model: str
    replicate: int
    arm: Literal["solo", "conditioned"]
    source: str | None = None
    """Key of the attempt of which something was attached."""
    material: Literal["skill", "implementation", "trajectory"] = "skill"
    """What of the source was attached."""
    without: str | None = None
    """The category of statements that was taken out of the attached skill."""
    skill_form: Literal["free", "structured"] = "free"
    """How the attempt was asked to write down its own skill."""
    ended: Ending
    instruction: str
    """The instruction as sent, attachment included."""
    submissions: tuple[Submission, ...] = ()
    kernel: str | None = None
    """The final kernel.py; None where there was none."""
    skill: str | None = None
    """The final SKILL.md; None where there was none or it was blank."""
    final: Verdict | None = None
    """The verdict on the final kernel; None where there was no kernel or the attempt was skipped."""
    usage: Usage = Usage()
    trajectory: dict[str, Any] | None = None
    """The agent's own trajectory (ATIF), where it left one."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall clock by phase: sandbox_start, agent, grading, ..."""
    tries: int = 1
    """How many times the attempt was started, transient faults of ours included."""
    fingerprint: str
    """Digest of task, contract and source skill; a record with another one than the plan's is stale."""
    versions: dict[str, str] = Field(default_factory=dict)
    sandbox: dict[str, str] = Field(default_factory=dict)
    """What kept the agent apart and what limited it: `kind`, and resource → by what means."""
    started_at: str
    """UTC, ISO 8601."""
    finished_at: str
