"""The `modal` judge: grades on rented GPUs of Modal, each verdict in a container that is used once, without a network.

The extra `modal` installs the client; `modal setup`, or the variables MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, say who
pays. A container has this package as it is here, and the DSLs in the versions they ask for.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib.metadata import PathDistribution, distribution
from pathlib import Path, PurePosixPath
from typing import Any, Self

from metakernelbench.dsls import dsl as dsls
from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.grading.contract import CONTRACT, Contract
from metakernelbench.grading.head_to_head import HeadToHead
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging import remote
from metakernelbench.judging.judge import GradingRequest

BASE_IMAGE = "nvidia/cuda:13.0.0-devel-ubuntu24.04"
"""Has the compiler that TIRx calls."""
TORCH = "torch==2.13.0"
_PACKAGE = "metakernelbench"
_PLACE = PurePosixPath("/opt/mkb")
"""Where this package lies in a container."""


class ModalJudge:
    """Asks Modal for one container a verdict. As many run at once as are asked for.

    `gpu` is Modal's name of one; `cpus` are cores and `memory_mb` memory of a container; `dsls` are those that it can
    grade, `packages` pip requirements that it has besides; `timeout_s` ends a grading that hangs.
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        gpu: str = "B200",
        cpus: float = 4,
        memory_mb: int = 16384,
        dsls: Sequence[str] = ("cute", "tirx"),
        packages: Sequence[str] = (),
        base_image: str = BASE_IMAGE,
        timeout_s: int = 3600,
        contract: Contract = CONTRACT,
    ) -> None:
        if device != "cuda":
            raise UserError("the `modal` judge grades on GPUs", hint='set `device` of [attempt] to "cuda"')
        self._contract = contract
        self._base_image, self._dsls, self._packages = base_image, tuple(dsls), tuple(packages)
        self._container: dict[str, Any] = {"gpu": gpu, "cpu": cpus, "memory": memory_mb, "timeout": timeout_s}
        self._open = AsyncExitStack()
        self._function: Any = None
        self._starting = asyncio.Lock()

    async def ready(self) -> None:
        """Build the image where that has not been done yet, and start the app. Raises `UserError` where Modal does not
        let us in."""
        with _told():
            async with self._starting:
                if self._function is None:
                    self._function = await self._start()

    async def look(self) -> None:
        """Raise `UserError` where nobody says who pays. Asks nobody."""
        from modal.config import config

        missing = [name for name in ("token_id", "token_secret") if not config.get(name)]
        if missing:
            raise UserError(
                f"Modal is given no {' and no '.join(missing)}", hint="`modal setup` logs in; docs/judges.md"
            )

    async def verdict(self, request: GradingRequest) -> Verdict:
        """Grade one implementation in a container of its own. Raises `UserError` where Modal does not let us in or what
        is asked for makes no sense, `InfrastructureFault` where a container was lost. A cancelled grading is ended."""
        return remote.verdict_in(await self._answered(request.device, remote.one(request, self._contract)))

    async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        """Time implementations of one problem interleaved, in one container on one GPU. Raises as `verdict`."""
        text = remote.several(requests, self._contract)
        return remote.head_to_head_in(await self._answered(requests[0].device, text))

    async def close(self) -> None:
        """End the app, and with it all of its containers."""
        await self._open.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answered(self, device: str, text: str) -> str:
        if device != "cuda":
            raise InfrastructureFault(f"this judge grades on cuda, the request is for {device}")
        await self.ready()
        call = None
        try:
            with _told():
                call = await self._function.spawn.aio(text)
                answer = await call.get.aio()
        except asyncio.CancelledError:
            if call is not None:
                await call.cancel.aio(terminate_containers=True)
            raise
        if not isinstance(answer, str):
            raise InfrastructureFault(f"Modal's container answered {type(answer).__name__}, not text")
        return answer

    async def _start(self) -> Any:
        """Start an app that lives as long as this judge."""
        made = image(self._base_image, self._dsls, self._packages)
        app, function = application(**self._container, image=made)
        await self._open.enter_async_context(app.run.aio())
        return function


@contextmanager
def _told() -> Iterator[None]:
    """Turn what Modal's client raises into an error of ours."""
    import modal

    try:
        yield
    except (modal.exception.AuthError, modal.exception.InvalidError) as error:
        raise UserError(
            f"Modal refuses the grading: {_said(error)}", hint="`modal setup` logs in; docs/judges.md"
        ) from error
    except (modal.exception.Error, OSError, TimeoutError) as error:
        raise InfrastructureFault(f"the grading was lost at Modal: {_said(error)}") from error


def application(*, image: Any, gpu: str, cpu: float, memory: int, timeout: int) -> tuple[Any, Any]:
    """The app and its one function, `remote.answer`, as Modal is told of them; nothing is sent yet."""
    import modal

    app = modal.App("metakernelbench-judge", include_source=False)
    options: dict[str, Any] = {
        "image": image,
        "gpu": gpu,
        "cpu": (cpu, cpu),  # no less, and no more when the neighbours are idle: times should not depend on them
        "memory": (memory, memory),
        "timeout": timeout,
        "single_use_containers": True,
        "block_network": True,
        "restrict_modal_access": True,
        "retries": 0,
    }
    plain = "_experimental_restrict_output"  # answers without pickle, which could run code here
    if plain in inspect.signature(app.function).parameters:
        options[plain] = True
    return app, app.function(**options)(remote.answer)


def image(base: str, names: Sequence[str], packages: Sequence[str]) -> Any:
    """What a container holds, as Modal is told; built there when an app starts."""
    import modal

    requirements = [requirement for name in names for requirement in dsls.load(name).requirements]
    installed = _installed()
    made = (
        modal.Image.from_registry(base, add_python="3.12")
        .apt_install("bubblewrap", "util-linux", "gcc", "libc6-dev")
        .uv_pip_install(TORCH, "numpy>=2", *dict.fromkeys(requirements), *packages)
        .env({"PYTHONPATH": str(_PLACE)})
    )
    for folder in (Path(__file__).parents[1], installed):
        made = made.add_local_dir(folder, str(_PLACE / folder.name), ignore=["**/__pycache__"])
    return made


def _installed() -> Path:
    """The folder of this package's metadata, by which DSLs are found."""
    found = distribution(_PACKAGE)
    folder = Path(str(getattr(found, "_path", "")))
    if not isinstance(found, PathDistribution) or not folder.is_dir():
        raise UserError(f"the metadata of {_PACKAGE} is not a folder", hint="install the package with pip")
    return folder


def _said(error: BaseException) -> str:
    """An error on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
