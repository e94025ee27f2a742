"""Whatever a worker answers, the verifier takes it for what it may be: no crash, no hang, no other field changed."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metakernelbench.grading.buffers import Form
from metakernelbench.grading.calls import Budget, Link, Result, SubmissionFault
from metakernelbench.grading.channel import Channel, ChannelBroken
from metakernelbench.grading.codes import CODES
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.grading.dependence import _forbidden_actions
from metakernelbench.grading.report import render
from metakernelbench.grading.transport import FileTransport
from metakernelbench.grading.verdict import Finding, Isolation, Stage, Verdict
from tests.grading.stand_in import ID, always, stand_in
from tests.grading.support import HONEST, QUICK, SMUGGLED, Grader

FORM = Form.of(["y"], (), torch.zeros(2, 3))
REFUSALS = {"broken-channel", "wrong-structure", "lazy-output", "no-solve", "import-error", "runtime-error"} | {
    "memory-limit",
    "worker-died",
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("tensor") | json_values,
        "dtype": st.just("float32") | json_values,
        "shape": st.just([2, 3]) | json_values,
        "device": st.just("cpu") | json_values,
        "lazy": json_values,
    },
)
structures = st.fixed_dictionaries(
    {}, optional={"container": st.just("tensor") | json_values, "items": st.lists(items, max_size=3) | json_values}
)
events = st.lists(st.fixed_dictionaries({}, optional={"detail": json_values, "line": json_values}) | json_values)
answers = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["result", "error", "loaded"]) | json_values,
        "ns": st.integers(0, 10**9) | json_values,
        "structure": structures | json_values,
        "launches": json_values,
        "altered": json_values,
        "foreign": json_values,
        "events": events | json_values,
        "code": st.sampled_from(sorted(CODES)) | json_values,
        "text": st.text() | json_values,
        "line": st.integers(-5, 10**7) | json_values,
        "passed": json_values,
        "outputs": json_values,
    },
)


def answer(fields: dict[str, Any]) -> bytes:
    return json.dumps({**fields, "id": 0}).encode().replace(b'"id": 0', b'"id": ' + ID)


def called(*datagrams: bytes | None, seconds: float = 5.0) -> Result | Finding:
    """What a call comes to whose answer is this."""
    with stand_in(always(*datagrams)) as channel:
        try:
            return Link(channel, Budget(seconds)).call(FileTransport("cpu"), (), FORM)
        except SubmissionFault as fault:
            return fault.finding


def assert_harmless(outcome: Result | Finding) -> None:
    if isinstance(outcome, Finding):
        assert outcome.code in REFUSALS
        assert outcome.line is None or (type(outcome.line) is int and 0 < outcome.line < 10**6)
        findings = [outcome]
    else:
        assert math.isfinite(outcome.claimed_ms) and outcome.claimed_ms >= 0
        assert outcome.outputs[0].isnan().all(), "an answer has no part in the outputs"
        assert type(outcome.launches) is int and type(outcome.altered) is int
        assert isinstance(outcome.foreign, str) and len(outcome.foreign) <= 80
        findings = _forbidden_actions(outcome.events)
    assert_can_be_told(findings)


def assert_can_be_told(findings: list[Finding]) -> None:
    """A verdict with these findings can be stored, read again and printed."""
    if not findings:
        return
    verdict = Verdict(
        problem="p28",
        dsl="toy",
        workload="smoke",
        device="cpu",
        passed=False,
        ended_at=Stage.CORRECTNESS,
        findings=tuple(findings),
        isolation=Isolation(method="none"),
        contract_version=CONTRACT_VERSION,
    )
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert len(render(verdict).encode()) < 20_000
    assert all(len(finding.message) < 2000 for finding in findings)


@settings(max_examples=200, deadline=None)
@given(answers)
def test_any_answer_is_a_result_or_a_finding(fields: dict[str, Any]) -> None:
    assert_harmless(called(answer(fields)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_broken_channel(data: bytes) -> None:
    outcome = called(data)
    assert isinstance(outcome, Finding) and outcome.code in ("broken-channel", "worker-died")


@settings(max_examples=100, deadline=None)
@given(st.lists(answers.map(answer) | st.binary(max_size=50) | st.just(answer({"op": "result", "ns": 5})), max_size=5))
def test_several_answers_are_never_taken_for_the_next_request(datagrams: list[bytes]) -> None:
    with stand_in(always(*datagrams, None)) as channel:
        link, results = Link(channel, Budget(5.0)), 0
        for _ in range(3):
            try:
                assert_harmless(link.call(FileTransport("cpu"), (), FORM))
                results += 1
            except SubmissionFault as fault:
                assert fault.finding.code in REFUSALS
        assert results <= 1


@pytest.mark.parametrize(
    "data",
    [
        b'{"op": "result", "ns": 5, "id": ' + ID,  # cut short
        b'{"op": "result", "ns": 5}',
        b'{"op": "result", "ns": 5, "id": "' + ID + b'"}',
        b'{"op": "result", "ns": 1e999, "id": ' + ID + b"}",
        b'{"op": "result", "ns": ' + b"9" * 4000 + b', "id": ' + ID + b"}",
        b'{"op": "result", "ns": 5, "events": ' + b"[" * 1000 + b"]" * 1000 + b', "id": ' + ID + b"}",
        b'{"op": "result", "ns": 5, "foreign": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b', "id": ' + ID + b"}",
        b"[" * 60_000,
        b"x" * 70_000,
    ],
    ids=["partial", "no id", "text for id", "infinite", "huge number", "deep list", "deep object", "brackets", "long"],
)
def test_malformed_answers_are_a_broken_channel(data: bytes) -> None:
    outcome = called(data)
    assert isinstance(outcome, Finding) and outcome.code == "broken-channel"


def test_no_answer_ends_with_the_budget() -> None:
    started = time.monotonic()
    outcome = called(seconds=0.3)
    assert isinstance(outcome, Finding) and outcome.code == "time-limit"
    assert time.monotonic() - started < 10


def test_messages_that_are_answered_and_not_taken_do_not_block_the_verifier() -> None:
    ours, _theirs = Channel.pair()  # a worker can look at messages without taking them
    with pytest.raises(ChannelBroken, match="not taken"):
        for _ in range(10_000):
            ours.send({"op": "call", "values": [0] * 100})


# The same from inside a real worker, whose submission took over its end of the channel -------------------------------

TAKEN_OVER = (
    SMUGGLED
    + """
json, time, socket = modules['json'], modules['time'], modules['socket']
Channel = modules['metakernelbench.grading.channel'].Channel
honest_send = Channel.send
line = lambda channel: getattr(channel, ''.join(['_soc', 'ket']))
"""
)

BEHAVIOURS = {
    "garbage": ("line(self).send(b'\\xff\\x00' * 100)", {"broken-channel"}),
    "huge": ("line(self).send(b'[' * 150000)", {"broken-channel"}),
    "deep": ("line(self).send(b'{\"a\":' * 900 + b'1' + b'}' * 900)", {"broken-channel"}),
    "wrong types": (
        "honest_send(self, {'id': message['id'], 'op': [], 'ns': {}, 'launches': 'x'})",
        {"broken-channel"},
    ),
    "partial": ("line(self).send(json.dumps(message).encode()[:-5])", {"broken-channel"}),
    "twice": ("honest_send(self, message); honest_send(self, message)", {"broken-channel"}),
    "early": ("honest_send(self, {**message, 'id': 1}); honest_send(self, message)", {"broken-channel"}),
    "late": ("time.sleep(60)", {"time-limit"}),
    "never": ("time.sleep(1) or None", {"time-limit"}),
    "closed": ("line(self).shutdown(socket.SHUT_RDWR)", {"worker-died"}),
    "empty": ("line(self).send(b'')", {"worker-died"}),
    "descriptors": ("[socket.send_fds(line(self), [b'{}'], [0, 1]) for _ in range(50)]", {"broken-channel"}),
    "codes of others": (
        "honest_send(self, {'id': message['id'], 'op': 'error', 'code': 'missing'})",
        {"runtime-error"},
    ),
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_taken_over_worker_is_refused(grade: Grader, name: str) -> None:
    statement, codes = BEHAVIOURS[name]
    taken_over = f"def send(self, message, descriptors=()):\n    {statement}\nChannel.send = send\n"
    verdict = grade(TAKEN_OVER + taken_over + HONEST, contract=dataclasses.replace(QUICK, time_limit_s=3))
    assert verdict.code in codes, verdict.findings
    assert len(verdict.findings) == 1
    assert grade(HONEST).passed or name != "garbage"  # once is enough


def test_what_a_worker_adds_to_its_answers_changes_no_field(grade: Grader) -> None:
    added = {
        "passed": False,
        "speedup": 1e9,
        "versions": {"torch": "0"},
        "isolation": "full",
        "comparisons": [],
        "outputs": [1],
        "draws_passed": 10**6,
        "seconds": {"timing": -1},
        "findings": [{"code": "missing"}],
    }
    taken_over = f"def send(self, message, descriptors=()):\n    honest_send(self, {{**message, **{added!r}}})\n"
    honest = grade(HONEST)
    other = grade(TAKEN_OVER + taken_over + "Channel.send = send\n" + HONEST)
    measured = {"timing", "clocks", "seconds", "source_sha256", "comparisons"}
    assert {k: v for k, v in dataclasses.asdict(other).items() if k not in measured} == {
        k: v for k, v in dataclasses.asdict(honest).items() if k not in measured
    }
    assert other.timing is not None and other.timing.speedup < 1000
