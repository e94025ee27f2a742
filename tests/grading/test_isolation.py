"""Workers without bubblewrap: a supervisor ends all that they leave behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from metakernelbench.dsls import dsl
from metakernelbench.grading.calls import Budget, Link, SubmissionFault, load
from metakernelbench.grading.draws import Draws
from metakernelbench.grading.isolation import Host, Sandbox
from metakernelbench.grading.launching import bubblewrap_problem
from metakernelbench.problems import catalog
from tests.grading.support import SMUGGLED

METHODS = ["process", *(["bubblewrap"] if bubblewrap_problem() is None else [])]


def running(mark: str) -> list[str]:
    """Processes with `mark` in their environment or name."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "comm").read_text():
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_supervisor_ends_descendants_that_left_their_session() -> None:
    plugin = dsl.load("triton")
    form = Draws(catalog.load("p28"), "smoke", "cpu").next().form()
    host = Host(plugin, "cpu", method="process")
    sandbox = Sandbox(host)
    assert sandbox.isolation.method == "process"
    assert any("network" in note for note in sandbox.isolation.notes)
    escape = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        descriptor = os.open("/proc/self/comm", os.O_WRONLY)
        os.write(descriptor, b"mkb-escaped")
        modules["time"].sleep(1000)
    os._exit(0)
def solve(): pass
"""
    link = Link(sandbox.fork().channel, Budget(60.0))
    load(link, (SMUGGLED + escape).encode(), plugin, form, "cpu", observed=False)
    for _ in range(50):
        if running("mkb-escaped"):
            break
        time.sleep(0.1)
    assert running("mkb-escaped")
    sandbox.close()
    assert not running("mkb-escaped")
    assert not host.runtime.exists()


@pytest.mark.parametrize("method", METHODS)
def test_one_worker_can_be_ended_in_the_middle_of_an_endless_call(method: str) -> None:
    plugin = dsl.load("triton")
    form = Draws(catalog.load("p28"), "smoke", "cpu").next().form()
    host = Host(plugin, "cpu", method=method)
    sandbox = Sandbox(host)
    try:
        endless, other = sandbox.fork(), sandbox.fork()
        mark = f"endless-{method}"[:15]
        source = f"""
descriptor = os.open("/proc/self/comm", os.O_WRONLY)
os.write(descriptor, b"{mark}")
while True: pass
def solve(): pass
"""
        with pytest.raises(SubmissionFault):
            link = Link(endless.channel, Budget(3.0))
            load(link, (SMUGGLED + source).encode(), plugin, form, "cpu", observed=True)
        assert running(mark)
        sandbox.end(endless)
        assert not running(mark)
        load(Link(other.channel, Budget(60.0)), b"def solve(): pass", plugin, form, "cpu", observed=False)
        sandbox.end(other)  # one that waits for a request ends by itself
    finally:
        sandbox.close()
        host.close()


def test_worker_that_answers_nonsense_is_refused() -> None:
    from metakernelbench.grading.channel import Channel

    ours, theirs = Channel.pair()
    theirs.send(b'{"id": 12345}')
    with pytest.raises(SubmissionFault) as raised:
        Link(ours, Budget(1.0)).request({"op": "call"})
    assert raised.value.finding.code == "broken-channel"
