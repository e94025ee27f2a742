"""The `ray` judge on a real cluster of one node, processor cores standing in for GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.judging.ray import RayJudge
from metakernelbench.judging.steadfast import Steadfast
from tests.grading.support import HONEST, QUICK, plugin_installed
from tests.judging.support import processes, request

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")
"""Not imported here: Ray reads the environment when it is imported."""

SLOW = "import time\ndef solve(*i): time.sleep(1000)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with two cores."""
    with plugin_installed(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")  # nobody else on this machine can give it tasks
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
        port, folder = _free_port(), tempfile.mkdtemp(prefix="mkb-ray-", dir="/tmp")
        command = [
            *(str(Path(sysconfig.get_path("scripts")) / "ray"), "start", "--head", "--block", "--num-cpus=2"),
            *(f"--port={port}", "--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats"),
            *("--node-ip-address=127.0.0.1", "--object-store-memory=100000000"),
            f"--temp-dir={folder}",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


def _wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def grading_slowly(judge: RayJudge | Steadfast) -> AsyncIterator[tuple[asyncio.Task[object], int]]:
    """A grading that hangs, and the process of the worker that it hangs in."""
    before = processes("ray::answer")
    waiting: asyncio.Task[object] = asyncio.create_task(judge.verdict(request(SLOW)))
    until = time.monotonic() + 60
    while not (found := processes("ray::answer") - before) or not processes("metakernelbench.grading", min(found)):
        assert time.monotonic() < until
        await asyncio.sleep(0.2)
    yield waiting, found.pop()


async def gone(pids: set[int]) -> bool:
    """Whether all of these processes end in time."""
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.timeout(600)  # gradings of other processes on this machine come first
def test_judge_survives_what_it_meets(cluster: str) -> None:
    """One judge through a whole life, since joining a cluster is what takes time."""

    async def life() -> None:
        judge = RayJudge(device="cpu", address=cluster, cpus=1, contract=QUICK)
        good, bad = await asyncio.gather(judge.verdict(request()), judge.verdict(request("solve = 1")))
        assert good.passed and bad.code == "no-solve"
        assert judge.at_once == 2
        result = await judge.head_to_head([request(), request(HONEST + "# again")])
        assert result.pair(0, 1) is not None
        with pytest.raises(UserError, match="unknown problem `p282`"):
            await judge.verdict(request(problem="p282"))
        with pytest.raises(InfrastructureFault, match="cuda"):
            await judge.verdict(request(device="cuda"))

        async with grading_slowly(judge) as (waiting, worker):
            verifiers = processes("metakernelbench.grading", worker)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(InfrastructureFault, match="lost in the Ray cluster"):
                await waiting
            assert await gone(verifiers), "nothing goes on grading"

        async with grading_slowly(judge) as (waiting, worker):
            verifiers = processes("metakernelbench.grading", worker)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await gone({worker, *verifiers})

        async with grading_slowly(Steadfast(judge, pause_s=0)) as (waiting, worker):
            os.kill(worker, signal.SIGKILL)
            await asyncio.sleep(0)
            assert await gone({worker})
            assert not waiting.done(), "it is asked for again"
            waiting.cancel()
        await judge.close()

        async with RayJudge(device="cuda", address=cluster, cpus=1) as judge:
            with pytest.raises(UserError, match="has not what a grading needs: 1 GPU"):
                await judge.verdict(request(device="cuda"))
        async with RayJudge(device="cpu", address="no-port") as judge:
            with pytest.raises(UserError, match="no Ray cluster can be joined at `no-port`"):
                await judge.verdict(request())

    asyncio.run(life())
