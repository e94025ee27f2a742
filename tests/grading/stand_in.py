"""A stand-in for a worker that was taken over: it answers a verifier's requests with whatever bytes it likes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from metakernelbench.grading.channel import MAX_MESSAGE, Channel

ID = b"@ID@"
"""Stands in an answer for the number that the verifier waits for."""

type Behaviour = Callable[[dict[str, object]], Iterable[bytes | None]]
"""Request → the datagrams to send; None closes the connection. What comes before and after a call, to wake up and
to deliver, is answered honestly."""


@contextmanager
def stand_in(behaviour: Behaviour) -> Iterator[Channel]:
    """The verifier's end of a connection whose other end behaves so. Answers wait in the socket's buffer."""
    ours, theirs = Channel.pair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE)
    thread = threading.Thread(target=_serve, args=(theirs, behaviour), daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(10)
        assert not thread.is_alive()


def always(*datagrams: bytes | None) -> Behaviour:
    """The same answer to every request."""
    return lambda _request: datagrams


def _serve(theirs: socket.socket, behaviour: Behaviour) -> None:
    with theirs, contextlib.suppress(OSError):  # the verifier has gone, or took the message for too long
        while True:
            data, descriptors, _, _ = socket.recv_fds(theirs, MAX_MESSAGE + 1, 8)
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                return
            request = json.loads(data)
            told = [b'{"id": ' + ID + b"}"] if request["op"] in ("wake", "deliver") else behaviour(request)
            for datagram in told:
                if datagram is None:
                    return
                theirs.send(datagram.replace(ID, str(request["id"]).encode()))
