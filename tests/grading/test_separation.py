"""What a worker in a sandbox sees of the rest of the machine: nothing that it could use."""

from __future__ import annotations

import shutil

import pytest

from metakernelbench.grading import seccomp
from metakernelbench.grading.launching import bubblewrap_problem
from metakernelbench.problems.catalog import source_path
from tests.grading.support import HONEST, SMUGGLED, Grader

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(bubblewrap_problem() is not None, reason=str(bubblewrap_problem())),
]

PROBES = {
    "problem modules on disk": f"os.path.exists({str(source_path('p28'))!r})",
    "the problems package": "modules['importlib.util'].find_spec('metakernelbench.problems') is not None",
    "the verifier": "modules['importlib.util'].find_spec('metakernelbench.grading.verifier') is not None",
    "processes of the machine": "max(int(n) for n in os.listdir('/proc') if n.isdigit()) > 100",
    "a home folder": "os.access('/root', os.W_OK) or os.path.isdir('/home')",
    "writable packages": "any(os.access(p, os.W_OK) for p in modules['sys'].path if os.path.isdir(p))",
    "a writable root": "os.access('/', os.W_OK) or os.access('/usr', os.W_OK)",
    "a user of power": "os.getuid() == 0 or 'CapEff:\\t0000000000000000' not in open_text('/proc/self/status')",
    "new privileges": "'NoNewPrivs:\\t1' not in open_text('/proc/self/status')",
    "a network": "open_text('/proc/net/route').count('\\n') > 1",
    "a shadow file": "os.path.exists('/etc/shadow')",
    "new user namespaces": "can_unshare()",
}
if seccomp.program() is not None:
    CALLS = [*seccomp.REFUSED.values(), *seccomp.REFUSED_TO_WORKERS.values()]
    PROBES["calls that only an attacker needs"] = f"not all(map(is_refused, {CALLS}))"
    PROBES["sockets of a network"] = "any(map(can_open_socket, (2, 10, 16, 40))) or not can_open_socket(1)"

HELPERS = """
def open_text(path):
    descriptor = os.open(path, os.O_RDONLY)
    return os.read(descriptor, 10000).decode()

def is_refused(number):
    ctypes = modules['importlib'].import_module('ctypes')
    return ctypes.CDLL(None, use_errno=True).syscall(number, -1, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1

def can_open_socket(family):
    socket = modules['importlib'].import_module('socket')
    try:
        getattr(socket, ''.join(['sock', 'et']))(family, socket.SOCK_DGRAM).close()
    except PermissionError:
        return False
    return True

def can_unshare():
    try:
        os.unshare(os.CLONE_NEWUSER)
    except OSError:
        return False
    return True
"""


@pytest.mark.parametrize("what", PROBES)
def test_worker_does_not_see(grade: Grader, what: str) -> None:
    imports = "modules['importlib'].import_module('importlib.util')\n"
    solve = f"def solve(*i):\n    raise ValueError(f'seen={{{PROBES[what]}}}')\n"
    verdict = grade(SMUGGLED + imports + HELPERS + solve)
    assert verdict.isolation.method == "bubblewrap"
    assert "seen=False" in verdict.findings[0].message, verdict.findings


def test_worker_writes_to_its_scratch_and_finds_nothing_there_the_next_time(grade: Grader) -> None:
    leaving = SMUGGLED + "os.close(os.open('/scratch/left', os.O_CREAT | os.O_WRONLY))\n"
    assert (
        grade(leaving + "def solve(*i): raise ValueError(str(os.listdir('/scratch')))")
        .findings[0]
        .message.count("left")
    )
    verdict = grade(SMUGGLED + "def solve(*i): raise ValueError(str(os.listdir('/scratch') + os.listdir('/dev/shm')))")
    assert "left" not in verdict.findings[0].message


def test_files_cannot_fill_the_machine(grade: Grader) -> None:
    source = SMUGGLED + (
        "def solve(*i):\n"
        "    f = os.open('/scratch/bomb', os.O_CREAT | os.O_WRONLY)\n"
        "    while True: os.write(f, bytes(1 << 24))\n"
    )
    free = shutil.disk_usage("/").free
    verdict = grade(source)
    assert verdict.code in ("runtime-error", "worker-died", "memory-limit")
    assert shutil.disk_usage("/").free > free - (1 << 30)


def test_honest_kernel_passes_there(grade: Grader) -> None:
    verdict = grade(HONEST)
    assert verdict.passed and verdict.isolation.method == "bubblewrap"
