from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.judging.local import LocalJudge
from tests.grading.support import HONEST, QUICK, plugin_installed
from tests.judging.support import request, verifiers


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    with plugin_installed():
        yield


def test_judge_survives_what_it_meets() -> None:
    """One judge through a whole life, since a verifier's start is what takes time."""

    others = verifiers()  # of other tests in this process

    async def life() -> None:
        async with LocalJudge("cpu", contract=QUICK) as judge:
            good, bad = await asyncio.gather(judge.verdict(request()), judge.verdict(request("solve = 1")))
            assert good.passed and bad.code == "no-solve"

            result = await judge.head_to_head([request(), request("solve = 1"), request(HONEST + "# again")])
            assert [verdict.code for verdict in result.verdicts] == [None, "no-solve", None]
            assert result.pair(0, 2) is not None
            with pytest.raises(UserError, match="one problem"):
                await judge.head_to_head([request(), request(problem="p21")])

            with pytest.raises(UserError, match="p28"):
                await judge.verdict(request(problem="p282"))
            with pytest.raises(InfrastructureFault, match="cuda"):
                await judge.verdict(request(device="cuda"))

            waiting = asyncio.create_task(judge.verdict(request("import time\ndef solve(*i): time.sleep(1000)")))
            await asyncio.sleep(3)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await judge.verdict(request())).passed

            waiting = asyncio.create_task(judge.verdict(request("import time\ndef solve(*i): time.sleep(1000)")))
            await asyncio.sleep(3)
            (pid,) = verifiers() - others
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(InfrastructureFault, match="ended unexpectedly"):
                await waiting
            assert (await judge.verdict(request())).passed
        assert not verifiers() - others

    asyncio.run(life())
