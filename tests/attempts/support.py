"""What the tests of attempts share: a judge that answers at once, sandboxes, and scripts for the scripted model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts.agents.models import quiet_libraries
from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.grading.verdict import Finding, Isolation, Stage, Timing, Verdict
from metakernelbench.judging.judge import GradingRequest

needs_sandbox = [
    pytest.mark.sandbox,
    pytest.mark.skipif(sandbox_available() is not None, reason=str(sandbox_available())),
]


@dataclass
class WordJudge:
    """Judges by a word in the source: `right` passes; `slow` takes a minute; `broken` is a fault of the judge's own."""

    seen: list[GradingRequest] = field(default_factory=list)

    async def verdict(self, request: GradingRequest) -> Verdict:
        self.seen.append(request)
        if b"broken" in request.source:
            raise InfrastructureFault("the GPU has gone")
        if b"slow" in request.source:
            await asyncio.sleep(60)
        return verdict_on(request, passed=b"right" in request.source)

    async def close(self) -> None:
        """Nothing is held."""


def verdict_on(request: GradingRequest, *, passed: bool) -> Verdict:
    """A complete verdict."""
    timing = Timing(
        implementation_ms=(1.0,), eager_ms=(2.0,), implementation_median_ms=1.0, eager_median_ms=2.0, speedup=2.0
    )
    return Verdict(
        problem=request.problem,
        dsl=request.dsl,
        workload=request.workload,
        device=request.device,
        passed=passed,
        ended_at=None if passed else Stage.IMPORT,
        findings=() if passed else (Finding(code="import-error", message="kernel.py raised while it was imported."),),
        timing=timing if passed else None,
        final=request.final,
        isolation=Isolation(method="process"),
        contract_version=CONTRACT_VERSION,
    )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(work)


def running(word: str) -> bool:
    """Whether any process of this machine has `word` among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


@contextlib.asynccontextmanager
async def sandbox(kind: str, folder: Path, *, memory_mb: int = 1024, slot: int = 0) -> AsyncIterator[Any]:
    """A started environment of ours, `bubblewrap` or `host`, with an empty task."""
    quiet_libraries()
    from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    from metakernelbench.attempts.sandbox.bubblewrap import BubblewrapEnvironment
    from metakernelbench.attempts.sandbox.host import HostEnvironment

    make: Callable[..., Any] = {"bubblewrap": BubblewrapEnvironment, "host": HostEnvironment}[kind]
    task = folder / "environment" / "task"
    task.mkdir(parents=True)
    (task / "profile.sh").write_text("PS1='$ '\n")
    environment = make(
        environment_dir=task.parent,
        environment_name="test",
        session_id="test__env",
        trial_paths=TrialPaths(folder / "trial"),
        task_env_config=EnvironmentConfig(cpus=1, memory_mb=memory_mb, network_mode="no-network", workdir="/app"),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        slot=slot,
    )
    try:
        await environment.start(force_build=False)
        yield environment
    finally:
        await environment.stop(delete=True)
