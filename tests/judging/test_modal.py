"""The `modal` judge, with Modal's own client and a stand-in for Modal's servers.

Not tested, for want of an account: that Modal builds the image, has the GPU, and lets bubblewrap run.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("modal", reason="the extra `modal` is not installed")

from modal.client import _Client
from modal_proto import api_pb2

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.judging import remote
from metakernelbench.judging.modal import ModalJudge
from metakernelbench.judging.steadfast import Steadfast
from tests.grading.support import HONEST, QUICK, plugin_installed
from tests.judging.modal_server import Modal, serving
from tests.judging.support import request


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    with plugin_installed():
        yield


def on_a_cpu(text: str) -> str:
    """What a container does, a CPU standing in for its GPU."""
    return remote.answer(text.replace('"device": "cuda"', '"device": "cpu"'))


@contextlib.asynccontextmanager
async def judging(modal: Modal, monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[ModalJudge]:
    """A judge whose Modal is the stand-in."""
    async with serving(modal) as url:
        monkeypatch.setenv("MODAL_SERVER_URL", url)
        monkeypatch.setenv("MODAL_TOKEN_ID", "ak-1")
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-1")
        _Client._set_env_client(None)
        async with ModalJudge(**({"contract": QUICK} | options)) as judge:
            yield judge
        _Client._set_env_client(None)


def test_a_verdict_comes_back_from_a_container_that_is_used_once_and_has_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def life() -> None:
        modal = Modal(on_a_cpu)
        async with judging(modal, monkeypatch) as judge:
            good, bad = await asyncio.gather(
                judge.verdict(request(device="cuda")), judge.verdict(request("solve = 1", device="cuda"))
            )
            assert good.passed and bad.code == "no-solve"
            result = await judge.head_to_head([request(device="cuda"), request(HONEST + "# again", device="cuda")])
            assert result.pair(0, 1) is not None
            with pytest.raises(UserError, match="unknown problem `p282`"):
                await judge.verdict(request(problem="p282", device="cuda"))

        (created,) = modal.asked["FunctionCreate"]
        function, resources = created.function, created.function.resources
        assert (resources.gpu_config.gpu_type, resources.gpu_config.count) == ("B200", 1)
        assert (resources.milli_cpu, resources.milli_cpu_max) == (4000, 4000)
        assert (resources.memory_mb, resources.memory_mb_max) == (16384, 16384)
        assert function.block_network and function.untrusted and function.single_use_containers
        assert function.retry_policy.retries == 0
        assert (function.module_name, function.function_name) == ("metakernelbench.judging.remote", "answer")
        assert list(function.supported_output_formats) == [api_pb2.DATA_FORMAT_CBOR], "no pickle comes back"
        assert len(modal.asked["AppClientDisconnect"]) == 1, "the app ends with the judge"

    asyncio.run(life())


def test_the_image_has_the_pinned_versions_and_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life() -> None:
        modal = Modal(lambda _: remote.answer("{}"))
        async with judging(modal, monkeypatch, packages=["einops==0.8.1"]) as judge:
            with pytest.raises(InfrastructureFault):
                await judge.verdict(request(device="cuda"))
        commands = "\n".join(str(asked.image.dockerfile_commands) for asked in modal.asked["ImageGetOrCreate"])
        for wanted in ("nvidia/cuda:13", "torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.7.0", "einops==0.8.1"):
            assert wanted in commands
        for wanted in ("apache-tvm==0.25.0.post1", "apache-tvm-ffi==0.1.12", "bubblewrap"):
            assert wanted in commands
        files = {file.filename for asked in modal.asked["MountGetOrCreate"] for file in asked.files}
        assert "/opt/mkb/metakernelbench/judging/remote.py" in files
        (entry_points,) = [name for name in files if name.endswith(".dist-info/entry_points.txt")]
        assert entry_points.startswith("/opt/mkb/metakernelbench-")

    asyncio.run(life())


def test_a_container_that_dies_is_a_fault_and_the_next_grading_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = ["the container ran out of memory", "the machine was taken away"]

    def container(text: str) -> str:
        if dying:
            raise RuntimeError(dying.pop())
        return on_a_cpu(text)

    async def life() -> None:
        async with judging(Modal(container), monkeypatch) as judge:
            with pytest.raises(InfrastructureFault, match="lost at Modal: the machine was taken away"):
                await judge.verdict(request(device="cuda"))
            steadfast = Steadfast(judge, pause_s=0)
            assert (await steadfast.verdict(request("solve = 1", device="cuda"))).code == "no-solve"

    asyncio.run(life())


def test_a_cancelled_grading_ends_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def container(_: str) -> str:
        ended.wait(60)
        return "{}"

    async def life() -> None:
        modal = Modal(container)
        async with judging(modal, monkeypatch) as judge:
            waiting = asyncio.create_task(judge.verdict(request(device="cuda")))
            while "FunctionGetOutputs" not in modal.asked:
                await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            (cancelled,) = modal.asked["FunctionCallCancel"]
            assert cancelled.terminate_containers
            ended.set()

    asyncio.run(life())


def test_without_an_account_it_is_one_sentence_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life() -> None:
        modal = Modal(on_a_cpu)
        modal.refused = "Token ID not found"
        async with judging(modal, monkeypatch) as judge:
            with pytest.raises(UserError, match="Modal refuses the grading: Token ID not found") as caught:
                await judge.ready()
            assert "modal setup" in (caught.value.hint or "")

    asyncio.run(life())


def test_it_does_not_grade_on_a_cpu() -> None:
    with pytest.raises(UserError, match="grades on GPUs"):
        ModalJudge(device="cpu")
