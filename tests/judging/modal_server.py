# ruff: noqa: N802 (the names of the calls are Modal's)
"""Stands in for Modal: as much of its API, over a real socket, as an app with one function needs.

Modal's own client speaks to it, so what it is asked for is what Modal would be asked for. Its containers are threads of
this process that do what a container would: call the function.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpclib
from grpclib.server import Server
from modal._serialization import serialize_data_format
from modal_proto import api_grpc, api_pb2


class Modal:
    """The stand-in. `container` is what the function does; it may raise, which is a container's death."""

    def __init__(self, container: Callable[[str], str]) -> None:
        self.container = container
        self.asked: dict[str, list[Any]] = {}
        """Name of a call → the requests."""
        self.refused: str | None = None
        self._outputs: dict[str, asyncio.Task[str]] = {}

    async def ClientHello(self, _: Any) -> Any:
        return api_pb2.ClientHelloResponse(image_builder_version="2025.06")

    async def EnvironmentGetOrCreate(self, _: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def AppCreate(self, _: Any) -> Any:
        return api_pb2.AppCreateResponse(app_id="ap-1")

    async def AppHeartbeat(self, _: Any) -> Any:
        return _nothing()

    async def AppPublish(self, _: Any) -> Any:
        return api_pb2.AppPublishResponse()

    async def AppClientDisconnect(self, _: Any) -> Any:
        return _nothing()

    async def ImageGetOrCreate(self, request: Any) -> Any:
        number = len(self.asked["ImageGetOrCreate"])
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        return api_pb2.ImageGetOrCreateResponse(image_id=f"im-{number}", result=done)

    async def MountBatchedCheckExistence(self, _: Any) -> Any:
        return api_pb2.MountBatchedCheckExistenceResponse()  # none is missing

    async def MountPutFile(self, _: Any) -> Any:
        return api_pb2.MountPutFileResponse(exists=True)

    async def MountGetOrCreate(self, _: Any) -> Any:
        return api_pb2.MountGetOrCreateResponse(mount_id=f"mo-{len(self.asked['MountGetOrCreate'])}")

    async def FunctionPrecreate(self, _: Any) -> Any:
        return api_pb2.FunctionPrecreateResponse(function_id="fu-1")

    async def FunctionCreate(self, request: Any) -> Any:
        ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=request.function)
        data = api_pb2.FunctionData(ranked_functions=[ranked])
        handle = api_pb2.FunctionHandleMetadata(
            function_name=request.function.function_name,
            function_type=request.function.function_type,
            definition_id="de-1",
            supported_input_formats=request.function.supported_input_formats,
            supported_output_formats=request.function.supported_output_formats,
        )
        return api_pb2.FunctionCreateResponse(function_id="fu-1", function_data=data, handle_metadata=handle)

    async def FunctionMap(self, request: Any) -> Any:
        call = f"fc-{len(self.asked['FunctionMap'])}"
        (item,) = request.pipelined_inputs
        arguments, _ = pickle.loads(item.input.args)
        self._outputs[call] = asyncio.create_task(asyncio.to_thread(self.container, *arguments))
        handed = api_pb2.FunctionPutInputsResponseItem(idx=0, input_id=f"in-{call}", input_jwt="")
        return api_pb2.FunctionMapResponse(function_call_id=call, pipelined_inputs=[handed])

    async def FunctionGetOutputs(self, request: Any) -> Any:
        output = self._outputs[request.function_call_id]
        await asyncio.wait([output], timeout=max(request.timeout, 0.0))
        if not output.done():
            return api_pb2.FunctionGetOutputsResponse()
        item: dict[str, Any] = {"idx": 0, "input_id": f"in-{request.function_call_id}"}
        if error := output.exception():
            status = api_pb2.GenericResult.GENERIC_STATUS_INTERNAL_FAILURE
            result = api_pb2.GenericResult(status=status, exception=str(error))
        else:
            status = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
            data = serialize_data_format(output.result(), api_pb2.DATA_FORMAT_CBOR)
            result = api_pb2.GenericResult(status=status, data=data)
            item["data_format"] = api_pb2.DATA_FORMAT_CBOR
        return api_pb2.FunctionGetOutputsResponse(outputs=[api_pb2.FunctionGetOutputsItem(result=result, **item)])

    async def FunctionCallCancel(self, _: Any) -> Any:
        return _nothing()

    async def serve(self, stream: Any, name: str) -> None:
        """Answer one call."""
        request = await stream.recv_message()
        self.asked.setdefault(name, []).append(request)
        if self.refused is not None and name == "AppCreate":
            raise grpclib.GRPCError(grpclib.Status.UNAUTHENTICATED, self.refused)
        answer = getattr(self, name, None)
        if answer is None:
            raise grpclib.GRPCError(grpclib.Status.UNIMPLEMENTED, f"the stand-in does not know {name}")
        await stream.send_message(await answer(request))


def _nothing() -> Any:
    from google.protobuf import empty_pb2

    return empty_pb2.Empty()


@asynccontextmanager
async def serving(modal: Modal) -> AsyncIterator[str]:
    """The stand-in on a port of this machine; its URL."""
    server = Server([_service(modal)])
    await server.start("127.0.0.1", 0)
    (socket,) = server._server.sockets  # type: ignore[union-attr]
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.close()  # not waited for: the client keeps its connection for later


def _service(modal: Modal) -> Any:
    """All of Modal's calls, each given to the stand-in."""

    def handler(name: str) -> Any:
        async def handle(_: Any, stream: Any) -> None:
            await modal.serve(stream, name)

        return handle

    names = api_grpc.ModalClientBase.__abstractmethods__ if True else ()
    return type("Service", (api_grpc.ModalClientBase,), {name: handler(name) for name in names})()
