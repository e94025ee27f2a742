"""Messages between verifier and worker: one JSON object a datagram over a Unix socket, with size limits, never pickle.

Descriptors travel from verifier to worker only: the verifier never accepts one. Both sides use this module; it needs
the standard library only. Whatever the worker's side of the socket holds, `receive` answers with a dictionary or with
one of two exceptions.
"""

from __future__ import annotations

import array
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

MAX_MESSAGE = 65_536
"""Bytes of the longest message; both sides cut their texts so that they fit."""
_MAX_DEPTH = 16
"""Lists and objects inside each other: what is deeper would overflow whoever shows or compares it."""
_TICK_S = 0.25


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelBroken(Exception):
    """The other side sent what is no message."""


class ChannelTimeout(Exception):
    """No message within the time allowed."""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def decode(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises `ChannelBroken` for anything else, however it is malformed."""
    try:
        message = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ChannelBroken(f"not a JSON message ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise ChannelBroken("not a JSON object")
    if not _is_shallow(message):
        raise ChannelBroken("too many lists inside each other")
    return message


def _is_shallow(message: dict[str, Any]) -> bool:
    layer: list[Any] = [message]
    for _ in range(_MAX_DEPTH):
        if not layer:
            return True
        inside = [value.values() if isinstance(value, dict) else value for value in layer]
        layer = [item for values in inside for item in values if isinstance(item, dict | list)]
    return False


class Channel:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """A connected pair: our end, and the socket whose descriptor goes to the other process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises `ChannelClosed`, and `ChannelBroken` where the other side lets messages pile up."""
        data = json.dumps(message, allow_nan=False).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes is too long")
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([data], attached, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise ChannelBroken("messages are answered and not taken") from None
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def await_busily(self, seconds: float) -> None:
        """Return when there is something to receive, or after this time; the processor does not rest meanwhile."""
        end = time.monotonic() + seconds
        while not self._poll.poll(0) and time.monotonic() < end:
            pass

    def receive_with_descriptors(self) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors. For the worker's side: waits as long as it takes."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE + 1, 8)
        if not data:
            raise ChannelClosed("end of stream")
        return decode(data), descriptors

    def receive(self, timeout_s: float, tick: Callable[[], None] | None = None) -> dict[str, Any]:
        """The next message. For the verifier's side: `tick` runs four times a second while it waits and may raise."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            if self._poll.poll(1000 * max(0.0, min(remaining, _TICK_S))):
                break
            if tick is not None:
                tick()
            if remaining <= 0:
                raise ChannelTimeout(f"no answer within {timeout_s:.1f} s")
        try:
            data = self._socket.recv(MAX_MESSAGE + 1)  # descriptors sent along are discarded by the kernel
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("end of stream")
        if len(data) > MAX_MESSAGE:
            raise ChannelBroken("message too long")
        return decode(data)

    def close(self) -> None:
        self._socket.close()
