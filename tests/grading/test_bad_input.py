"""Whatever is handed in as kernel.py ends in a verdict with one clear reason, and the next grading works."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from metakernelbench.grading.slots import is_workers_uid
from metakernelbench.grading.verdict import Stage
from tests.grading.support import HONEST, QUICK, SMUGGLED, Grader

HOSTILE = {
    "missing": (None, Stage.SOURCE, "missing"),
    "empty": (b"", Stage.SOURCE, "empty"),
    "blank": (b" \n\n", Stage.SOURCE, "empty"),
    "code behind an encoding": (
        b"# coding: raw_unicode_escape\ndef solve(): pass\n# \\u000aimport os\n",
        Stage.SOURCE,
        "not-utf8",
    ),
    "a comment that is code in UTF-7": (
        b"# coding: utf-7\ndef solve(): pass\n# +AAo-import os\n",
        Stage.SOURCE,
        "not-utf8",
    ),
    "an encoding behind a carriage return": (
        b"\r# coding: unicode_escape\rdef solve(): pass\r# \\nimport os\r",
        Stage.SOURCE,
        "not-utf8",
    ),
    "text that another encoding reads otherwise": (
        "# coding: latin-1\nx = 'é'\ndef solve(): pass\n".encode(),
        Stage.SOURCE,
        "not-utf8",
    ),
    "not UTF-8": (b"x = '\xff'\ndef solve(): pass\n", Stage.SOURCE, "not-utf8"),
    "too large": (b"#" * 300_001, Stage.SOURCE, "too-large"),
    "no Python": (b"def solve(:\n", Stage.SOURCE, "syntax-error"),
    "nested too deep": (b"x = " + b"(" * 100_000, Stage.SOURCE, "syntax-error"),
    "NUL bytes": (b"def solve(): pass\n\0", Stage.SOURCE, "syntax-error"),
    "no solve": (b"def resolve(): pass\n", Stage.SOURCE, "no-solve"),
    "solve is no function": (b"solve = 3\n", Stage.IMPORT, "no-solve"),
    "raises at import": (b"def solve(): pass\nraise ValueError('at import')\n", Stage.IMPORT, "import-error"),
    "leaves at import": (b"def solve(): pass\nraise SystemExit(0)\n", Stage.IMPORT, "import-error"),
    "takes no arguments": (b"def solve(): pass\n", Stage.CORRECTNESS, "runtime-error"),
    "returns nothing": (b"def solve(*inputs): pass\n", Stage.CORRECTNESS, "wrong-structure"),
    "returns a list": (b"def solve(h, r, w): return [h]\n", Stage.CORRECTNESS, "wrong-structure"),
    "returns another dtype": (b"def solve(h, r, w): return h.float()\n", Stage.CORRECTNESS, "wrong-structure"),
    "returns another shape": (b"def solve(h, r, w): return h[:1]\n", Stage.CORRECTNESS, "wrong-structure"),
    "returns an input": (b"def solve(h, r, w): return h\n", Stage.CORRECTNESS, "wrong-output"),
    "sleeps too long": (b"import time\ndef solve(*inputs): time.sleep(100)\n", Stage.CORRECTNESS, "time-limit"),
    "spins too long": (b"def solve(*inputs):\n    while True: pass\n", Stage.CORRECTNESS, "time-limit"),
    "takes all memory": (
        b"import torch\ndef solve(*inputs):\n    held = []\n    while True: held.append(torch.empty(1 << 30))\n",
        Stage.CORRECTNESS,
        "memory-limit",
    ),
    "leaves in a call": (SMUGGLED.encode() + b"def solve(*inputs): os._exit(0)\n", Stage.CORRECTNESS, "worker-died"),
    "crashes": (SMUGGLED.encode() + b"def solve(*inputs): os.abort()\n", Stage.CORRECTNESS, "worker-died"),
    "kills all others": (SMUGGLED.encode() + b"def solve(*i): os.kill(-1, 9)\n", Stage.CORRECTNESS, "wrong-structure"),
    "kills its group": (SMUGGLED.encode() + b"def solve(*inputs): os.killpg(0, 9)\n", Stage.CORRECTNESS, "worker-died"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_kernel_gets_one_clear_reason_in_bounded_time(grade: Grader, name: str) -> None:
    source, stage, code = HOSTILE[name]
    started = time.monotonic()
    verdict = grade(source, contract=dataclasses.replace(QUICK, time_limit_s=4))
    assert (verdict.ended_at, verdict.code) == (stage, code), verdict.findings
    assert len(verdict.findings) == 1 and verdict.findings[0].message
    assert time.monotonic() - started < 60
    assert not _left_behind()


def test_next_grading_works_after_the_worst(grade: Grader) -> None:
    for source in (SMUGGLED + "os.kill(-1, 9)\ndef solve(): pass", SMUGGLED + FORKING):
        assert not grade(source).passed
        assert grade(HONEST).passed


FORKING = """
for _ in range(40):
    if os.fork() == 0:
        os.setsid()
        modules["time"].sleep(1000)
def solve(hidden_states, residual, weight):
    return hidden_states
"""


def test_forked_processes_end_with_the_grading(grade: Grader) -> None:
    assert grade(SMUGGLED + FORKING).code == "wrong-output"
    assert not _left_behind()


def test_what_was_printed_is_in_the_verdict_and_harmless(grade: Grader) -> None:
    verdict = grade(b"print('before \\x1b[31mred')\ndef solve(*inputs):\n    print('x' * 5_000_000, 'the end')\n")
    assert verdict.code == "wrong-structure"
    assert verdict.submission_output.rstrip().endswith("the end")
    assert "\x1b" not in verdict.submission_output
    assert len(verdict.submission_output) <= 5000


def test_endless_printing_is_stopped(grade: Grader) -> None:
    assert grade("def solve(*inputs):\n    while True: print('x' * 1_000_000)\n").code == "output-flood"


def test_error_names_the_line_and_shows_the_traceback(grade: Grader) -> None:
    verdict = grade("\n\ndef solve(*inputs):\n    return missing_name\n")
    assert verdict.code == "runtime-error"
    assert verdict.findings[0].line == 4
    assert "missing_name" in verdict.findings[0].message


def _left_behind() -> list[str]:
    """Processes of the workers' user that still run a few moments after the grading, and that are this test's or
    nobody's: other gradings may run on this machine."""
    for _ in range(40):
        found = [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and _is_workers(p) and _is_ours(p)]
        if not found:
            break
        time.sleep(0.1)
    return found


def _is_workers(process: Path) -> bool:
    try:
        return is_workers_uid(process.stat().st_uid) and "sleep 100000" not in _command(process)
    except OSError:
        return False


def _is_ours(process: Path) -> bool:
    """Whether it descends from this process, or from no process but the workers' and the first."""
    pid = int(process.name)
    while pid > 1:
        if pid == os.getpid():
            return True
        folder = Path("/proc") / str(pid)
        try:
            if not is_workers_uid(folder.stat().st_uid):
                return _descends_from_this_process(pid)
            pid = _parent(pid)
        except OSError:
            return False
    return True


def _descends_from_this_process(pid: int) -> bool:
    try:
        while pid > 1 and pid != os.getpid():
            pid = _parent(pid)
    except OSError:
        return False
    return pid == os.getpid()


def _parent(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def _command(process: Path) -> str:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
