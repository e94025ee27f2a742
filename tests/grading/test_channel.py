from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metakernelbench.grading.channel import (
    MAX_MESSAGE,
    Channel,
    ChannelBroken,
    ChannelClosed,
    ChannelTimeout,
    decode,
)


def test_message_and_descriptors_arrive() -> None:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    read, write = os.pipe()
    ours.send({"op": "call", "id": 7}, [write])
    message, descriptors = other.receive_with_descriptors()
    assert message == {"op": "call", "id": 7}
    os.write(descriptors[0], b"through")
    assert os.read(read, 10) == b"through"
    other.send({"id": 7})
    assert ours.receive(1.0) == {"id": 7}


def test_closed_silent_and_overlong_ends_are_told_apart() -> None:
    ours, theirs = Channel.pair()
    with pytest.raises(ChannelTimeout):
        ours.receive(0.01)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE)
    theirs.send(b"x" * (MAX_MESSAGE + 1))
    with pytest.raises(ChannelBroken):
        ours.receive(1.0)
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)
    with pytest.raises(ChannelClosed):
        ours.send({"op": "call"})


def test_descriptors_from_the_other_side_are_dropped() -> None:
    ours, theirs = Channel.pair()
    before = len(list(Path("/proc/self/fd").iterdir()))
    socket.send_fds(theirs, [b"{}"], [0, 1, 2])
    assert ours.receive(1.0) == {}
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_tick_can_end_the_waiting() -> None:
    ours, _theirs = Channel.pair()

    def tick() -> None:
        raise RuntimeError("seen enough")

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="seen enough"):
        ours.receive(30.0, tick)
    assert time.monotonic() - started < 10


@given(st.binary(max_size=2000))
def test_any_bytes_decode_to_an_object_or_are_refused(data: bytes) -> None:
    with suppress(ChannelBroken):
        assert isinstance(decode(data), dict)


@pytest.mark.parametrize(
    "text",
    ["[" * 60_000, "1" * 60_000, '{"ns": NaN}', '{"ns": Infinity}', "[]", "null", '"x"', "", '{"a": 1', "\ud800"],
)
def test_malformed_messages_are_refused(text: str) -> None:
    with pytest.raises(ChannelBroken):
        decode(text.encode("utf-8", errors="surrogatepass"))


def test_what_is_sent_is_plain_json() -> None:
    ours, theirs = Channel.pair()
    ours.send({"values": [1, 2.5, None, True, "text"]})
    assert json.loads(theirs.recv(1000)) == {"values": [1, 2.5, None, True, "text"]}
