"""The settings of an attempt: what an experiment may vary, with the benchmark's values as defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from metakernelbench.attempts.images import Image

SCRIPTED = "scripted/"
"""Prefix of the model names that stand for prepared turns instead of a model."""


class AttemptSettings(BaseModel):
    """How attempts are run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str = "terminus-2"
    """Name of a Harbor agent."""
    sandbox: str = "bubblewrap"
    """`bubblewrap`; `host`, which isolates nothing and is for prepared turns only; or the name of one of Harbor's
    environment types, such as `docker`."""
    sandbox_options: dict[str, Any] = Field(default_factory=dict)
    """What Harbor's environment type is given besides: `keep_containers` for `docker`, ..."""
    image: Image = Image()
    """What the sandbox's image is built from, for environment types that build one."""
    cpus: int = Field(default=2, ge=1)
    """Processor cores of the sandbox."""
    memory_mb: int = Field(default=8192, ge=512)
    """Memory of the sandbox."""
    budget_s: float = Field(default=2400.0, gt=0, allow_inf_nan=False)
    """Wall clock of the agent's work, waits for the model and for gradings included."""
    max_submissions: int = Field(default=10, ge=0)
    """Submissions that are graded during the attempt; the final grading comes on top."""
    workload: Literal["full", "smoke"] = "full"
    device: Literal["cpu", "cuda"] = "cuda"
    """Where implementations are graded."""
    gpu: str = "NVIDIA H200"
    """The GPU that the instruction names where `device` is `cuda`."""
    script: Path | None = None
    """Prepared turns for a `scripted/...` model; `attempts/agents/script.py` says how they are written."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Passed on to the agent: `temperature`, `reasoning_effort`, `api_base`, `model_info`, ..."""
