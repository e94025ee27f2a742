"""The `ray` judge: grades on the GPUs of a Ray cluster, each verdict in a worker process of Ray that ends with it.

Every node needs metakernelbench, the DSLs and a driver; `runtime_env` can bring what is missing. The extra `ray`
installs the client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.grading.contract import CONTRACT, Contract
from metakernelbench.grading.head_to_head import HeadToHead
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging import remote
from metakernelbench.judging.judge import GradingRequest

_LISTENING_S = 10.0
"""How long a cluster may take to accept a connection."""


class RayJudge:
    """Asks a Ray cluster for one GPU a verdict. Requests that find none free wait in Ray's own queue.

    `address` is the cluster's, `auto` for the one that this machine belongs to, or `local` for one that is started here
    and ends with the judge. `cpus` are cores for each grading, `resources` whatever else a node must have, such as
    `{"accelerator_type:B200": 0.001}`, and `runtime_env` is Ray's.
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        address: str = "auto",
        cpus: float = 4,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        contract: Contract = CONTRACT,
    ) -> None:
        self._device, self._contract = device, contract
        self._address = address
        self._runtime_env = dict(runtime_env or {})
        self._gpus, self._cpus, self._resources = int(device == "cuda"), cpus, dict(resources or {})
        self._task: Any = None
        self.at_once: int | None = None
        """How many gradings the cluster can do at once; None until this judge has joined it."""
        self._connected_here = False
        self._connecting = asyncio.Lock()

    async def ready(self) -> None:
        """Join the cluster. Raises `UserError` where it cannot be joined or has no node that can grade."""
        async with self._connecting:
            if self._task is None:
                self._task = await asyncio.to_thread(self._connect)

    async def look(self) -> None:
        """As `ready`, but brings nothing along, starts no cluster where one is to be started, and leaves again."""
        if self._address == "local":
            return
        try:
            await asyncio.to_thread(self._join, {})
        finally:
            await self.close()

    async def verdict(self, request: GradingRequest) -> Verdict:
        """Grade one implementation somewhere in the cluster. Raises `UserError` where no cluster can be reached or what
        is asked for makes no sense, `InfrastructureFault` where a worker or a node died. A cancelled grading is
        ended."""
        return remote.verdict_in(await self._answered(request.device, remote.one(request, self._contract)))

    async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        """Time implementations of one problem interleaved, in one worker on one GPU. Raises as `verdict`."""
        text = remote.several(requests, self._contract)
        return remote.head_to_head_in(await self._answered(requests[0].device, text))

    async def close(self) -> None:
        """Leave the cluster, if this judge has joined it."""
        if self._connected_here:
            import ray

            self._connected_here = False
            await asyncio.to_thread(ray.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answered(self, device: str, text: str) -> str:
        if device != self._device:
            raise InfrastructureFault(f"this judge grades on {self._device}, the request is for {device}")
        await self.ready()
        import ray

        reference = self._task.remote(text)
        try:
            answer: str = await reference
        except asyncio.CancelledError:
            ray.cancel(reference, force=True)
            raise
        except ray.exceptions.RayError as error:
            raise InfrastructureFault(f"the grading was lost in the Ray cluster: {_said(error)}") from error
        return answer

    def _connect(self) -> Any:
        """The function that grades in the cluster, one call a worker process. Raises `UserError`."""
        self._join(self._runtime_env)
        import ray

        single_use = ray.remote(
            max_calls=1, max_retries=0, num_gpus=self._gpus, num_cpus=self._cpus, resources=self._resources
        )
        return single_use(remote.answer)

    def _join(self, runtime_env: Mapping[str, Any]) -> None:
        """Be a client of the cluster. Raises `UserError`, also where it has no node that can grade."""
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a task without a GPU leaves them visible
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "3")  # for a cluster that is gone it would be minutes
        import ray

        if not ray.is_initialized():
            try:
                _knock(self._address)
                ray.init(
                    address=self._address,
                    namespace="metakernelbench",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env=runtime_env or None,
                    **({"include_dashboard": False} if self._address == "local" else {}),
                )
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise UserError(
                    f"no Ray cluster can be joined at `{self._address}`: {_said(error)}",
                    hint="start one with `ray start --head`, or set `address` of [judge_options]; "
                    "for a cluster that asks for a token, set RAY_AUTH_MODE=token",
                ) from error
            self._connected_here = True
        self._check_resources(ray.cluster_resources())

    def _check_resources(self, has: Mapping[str, float]) -> None:
        """Raise `UserError` where no node can ever grade: Ray would wait for one without end."""
        wanted = {"GPU": self._gpus, "CPU": self._cpus, **self._resources}
        short = [f"{amount:g} {name}" for name, amount in wanted.items() if amount > has.get(name, 0)]
        if short:
            raise UserError(
                f"the Ray cluster has not what a grading needs: {', '.join(short)}",
                hint="add nodes, or change `cpus` and `resources` of [judge_options]",
            )
        self.at_once = min(int(has[name] // amount) for name, amount in wanted.items() if amount > 0)


def _knock(address: str) -> None:
    """Raise `OSError` where nobody listens at `host:port` or `ray://host:port`: Ray would try for two minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    at = urlsplit(address if "://" in address else f"//{address}")
    if at.hostname is not None and at.port is not None:
        socket.create_connection((at.hostname, at.port), timeout=_LISTENING_S).close()


def _said(error: BaseException) -> str:
    """The first line of what Ray says, which says it all; the rest is advice and traces."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
