"""Coverage-guided fuzzing of the verifier's side of the channel (atheris, from libFuzzer).

    python -m benchmarks.fuzz_channel -max_total_time=600 [a folder for the corpus]

An input is what a worker sends in answer to a request. Where its first byte is even, that is datagrams as they are,
each behind two bytes of its length, in which `@ID@` becomes the number that the verifier waits for; where it is odd, an
answer of the protocol's fields with values made from the input, since mutated text is hardly ever JSON. Each input
answers a call and then an import. What must hold is what `tests/grading/test_hostile_worker.py` says; anything else is
printed with the input that caused it, and ends the run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import atheris

with atheris.instrument_imports(include=["metakernelbench.grading"]):
    from tests.grading.stand_in import always, stand_in
    from tests.grading.test_hostile_worker import FORM, answer, assert_harmless

    from metakernelbench.grading import calls, channel

from metakernelbench.grading.transport import FileTransport

_FIELDS = [
    *("op", "ns", "structure", "launches", "foreign", "altered", "events", "code", "text", "line"),
    *("container", "items", "type", "dtype", "shape", "device", "lazy", "detail"),
]
_KNOWN = ["result", "error", "loaded", "tensor", "float32", "cpu", [2, 3], 5, 0, "runtime-error", "missing", "y"]
_KNOWN += [{"type": "tensor", "dtype": "float32", "shape": [2, 3]}, {"container": "tensor", "items": [{}]}]
_SEEDS = (
    b'{"id": @ID@, "op": "result", "ns": 5}',
    b'{"id": @ID@, "op": "result", "ns": 5, "launches": 1, "foreign": "", "altered": 0, "events": []}',
    b'{"id": @ID@, "op": "result", "ns": 5, "events": [{"detail": "opened a socket", "line": 3}]}',
    b'{"id": @ID@, "op": "result", "ns": 5, "structure": {"container": "tensor", "items": [{"type": "tensor", "dtype":'
    b' "float32", "shape": [2, 3], "device": "cpu", "lazy": ""}]}}',
    b'{"id": @ID@, "op": "error", "code": "runtime-error", "text": "Traceback", "line": 7}',
    b'{"id": @ID@, "op": "loaded"}',
)


def datagrams(data: bytes) -> list[bytes]:
    """The messages that an input stands for, at most four."""
    if data[:1] and data[0] % 2:
        return [answer(made_answer(atheris.FuzzedDataProvider(data[1:])))]
    found: list[bytes] = []
    data = data[1:]
    while data and len(found) < 4:
        size = int.from_bytes(data[:2], "little")
        found.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [message for message in found if len(message) <= 2 * channel.MAX_MESSAGE]


def made_answer(given: atheris.FuzzedDataProvider) -> dict[str, Any]:
    """An answer with some of the protocol's fields."""
    right = {"op": given.PickValueInList(["result", "error"]), "ns": 5} if given.ConsumeBool() else {}
    fields = {given.PickValueInList(_FIELDS): made_value(given, 0) for _ in range(given.ConsumeIntInRange(0, 5))}
    return fields | right


def made_value(given: atheris.FuzzedDataProvider, depth: int) -> Any:
    """Any JSON value, or one that the protocol knows."""
    kind = given.ConsumeIntInRange(0, 8 if depth < 6 else 5)
    if kind == 6:
        return [made_value(given, depth + 1) for _ in range(given.ConsumeIntInRange(0, 4))]
    if kind >= 7:
        names = [given.PickValueInList(_FIELDS) for _ in range(given.ConsumeIntInRange(0, 6))]
        return {name: made_value(given, depth + 1) for name in names}
    makers: list[Callable[[], Any]] = [
        lambda: given.PickValueInList(_KNOWN),
        lambda: given.ConsumeUnicode(given.ConsumeIntInRange(0, 20)),
        lambda: given.ConsumeIntInRange(-(2**62), 2**62) * given.PickValueInList([1, 1, 2**200]),
        given.ConsumeRegularFloat,
        given.ConsumeBool,
        lambda: None,
    ]
    return makers[kind]()


def one_input(data: bytes) -> None:
    """Answer a call, and then an import, with the same datagrams."""
    messages = datagrams(data)
    with stand_in(always(*messages, None)) as ours:
        link = calls.Link(ours, calls.Budget(2.0))
        try:
            assert_harmless(link.call(FileTransport("cpu"), (), FORM))
        except calls.SubmissionFault as fault:
            assert_harmless(fault.finding)
    with stand_in(always(*messages, None)) as ours:
        try:
            reply = calls.Link(ours, calls.Budget(2.0)).request({"op": "load"})
            calls.raise_if_error(reply)
        except calls.SubmissionFault as fault:
            assert_harmless(fault.finding)


def main() -> None:
    with tempfile.TemporaryDirectory() as seeds:
        for number, seed in enumerate(_SEEDS):
            framed = len(seed).to_bytes(2, "little") + seed
            (Path(seeds) / f"one-{number}").write_bytes(b"\0" + framed)
            (Path(seeds) / f"two-{number}").write_bytes(b"\0" + framed + framed)
        for number in range(64):
            (Path(seeds) / f"made-{number}").write_bytes(b"\1" + Random(number).randbytes(400))
        atheris.Setup([*sys.argv, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
