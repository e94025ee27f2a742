"""What the verifier reads of other processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from metakernelbench.grading import processes

BUSY = """
import threading, time
def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
threads = [threading.Thread(target=work, args=(0.004,)) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(time.process_time(), flush=True)
input()
"""
"""Its threads have ended when it prints; each ran for less than a tick of the kernel."""


def test_processor_time_is_finer_than_a_tick_and_counts_threads_that_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        told = float(child.stdout.readline())
        assert processes.seconds_run([child.pid]) == pytest.approx(told, abs=0.002)
        child.communicate("")


def test_processor_time_of_children_counts_while_they_run_and_when_they_were_waited_for() -> None:
    before = processes.seconds_run([os.getpid()])
    busy = "import time\nwhile time.process_time() < 0.2: pass"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", busy]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.seconds_run([os.getpid()]) - before == pytest.approx(0.2, abs=0.04)
    assert processes.seconds_run([os.getpid()]) - before == pytest.approx(0.2, abs=0.04)


def test_a_process_that_is_gone_has_run_for_no_time() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as child:
        pass
    assert processes.seconds_run([child.pid]) == 0.0
