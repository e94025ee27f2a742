"""Judges of several processes share a machine's GPUs: one grading a GPU, and nobody waits while one is free.

No GPU is needed: what is tested is who may use which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.judging import local
from metakernelbench.judging.gpus import reservation, visible_gpus
from metakernelbench.judging.judge import GradingRequest
from metakernelbench.judging.local import LocalJudge
from metakernelbench.judging.registry import open_judge
from tests.judging.support import verifiers


@pytest.fixture
def gpus() -> list[str]:
    """Names that no other test and no real GPU has."""
    return [f"GPU-{uuid.uuid4()}" for _ in range(2)]


def machine_with(folder: Path, monkeypatch: pytest.MonkeyPatch, listing: str) -> None:
    """A machine whose driver lists these GPUs."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_all_gpus_of_the_machine_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(tmp_path, monkeypatch, "GPU 0: NVIDIA B200 (UUID: GPU-1)\nGPU 1: NVIDIA B200 (UUID: GPU-2)")
    assert visible_gpus() == ["0", "1"]


def test_only_gpus_that_the_process_may_see_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert visible_gpus() == ["3", "GPU-abc"]


def test_where_nothing_is_known_the_first_gpu_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(tmp_path, monkeypatch, "NVIDIA-SMI has failed because it could not communicate with the driver")
    assert visible_gpus() == ["0"]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert visible_gpus() == ["0"]


def test_a_judge_uses_all_gpus_at_once_and_two_judges_share_them(gpus: list[str]) -> None:
    async def life() -> None:
        one, other = LocalJudge("cuda", gpus=gpus), LocalJudge("cuda", gpus=gpus)
        assert one.at_once == 2
        async with contextlib.AsyncExitStack() as first, contextlib.AsyncExitStack() as second:
            a = await first.enter_async_context(one._place("cuda"))
            b = await second.enter_async_context(other._place("cuda"))
            assert {a.gpu, b.gpu} == set(gpus)
            waiting = asyncio.create_task(first.enter_async_context(one._place("cuda")))
            await asyncio.sleep(0.5)
            assert not waiting.done(), "both are in use"
            await second.aclose()
            assert (await asyncio.wait_for(waiting, 10)).gpu == b.gpu
        await one.close()
        await other.close()

    asyncio.run(life())


def test_a_process_that_dies_lets_its_gpu_go(gpus: list[str]) -> None:
    holding = (
        "import sys, time\nfrom metakernelbench.judging.gpus import reservation\n"
        "with reservation(sys.argv[1]) as held:\n    print(held, flush=True)\n    time.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", holding, gpus[0]], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    with reservation(gpus[0]) as held, reservation(gpus[1]) as other:
        assert (held, other) == (False, True)
    process.kill()
    process.communicate()
    with reservation(gpus[0]) as held:
        assert held


def test_every_gpu_has_a_verifier_that_sees_no_other(gpus: list[str]) -> None:
    request = GradingRequest(problem="p28", dsl="no-such-dsl", source=b"def solve(): ...")

    async def life() -> None:
        before = verifiers()
        async with LocalJudge("cuda", gpus=gpus) as judge:
            answers = await asyncio.gather(*(judge.verdict(request) for _ in range(3)), return_exceptions=True)
            assert all(isinstance(answer, UserError) for answer in answers)
            environments = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in verifiers() - before]
            seen = [v.partition("=")[2] for env in environments for v in env if v.startswith("CUDA_VISIBLE_DEVICES=")]
            assert sorted(seen) == sorted(gpus)

    asyncio.run(life())


def test_a_machine_without_a_gpu_says_so_before_anything_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_DRIVERS", ("/dev/no-such-driver",))
    with pytest.raises(UserError, match="no CUDA GPU"):
        asyncio.run(open_judge("local", device="cuda").ready())
    asyncio.run(open_judge("local", device="cpu").ready())


def test_a_judge_without_gpus_is_refused() -> None:
    with pytest.raises(UserError, match="empty list"):
        LocalJudge("cuda", gpus=[])


def test_a_lock_file_that_cannot_be_made_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(InfrastructureFault, match="cannot be opened"), reservation("0"):
        pass
