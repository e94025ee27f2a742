"""A hundred hostile submissions in a row: none may leave anything behind, and the honest ones in between pass.

    python benchmarks/survival.py                 # on a CPU
    python benchmarks/survival.py --device cuda   # on a GPU, with those that only a GPU knows

Prints a line a grading: the code that met the submission, the seconds, and what was left behind. Exit code 1 where one
met another code than it may, something was left, the verifier failed, or an honest grading did not pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tree
from hostile import HOSTILE, Hostile

from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.slots import is_workers_uid

QUICK = Contract(correctness_draws=2, warmup_calls=2, timed_calls=6, rechecked_calls=1, time_limit_s=3)
HONEST = Contract(correctness_draws=2, warmup_calls=2, timed_calls=12, rechecked_calls=1, time_limit_s=120)
_PATIENCE_S = 5.0
_MOST_MEMORY_FILES = 16


def main() -> int:
    asked = parsed()
    chosen = [h for h in HOSTILE if h.device in ("", asked.device) and (not asked.only or asked.only in h.name)]
    trial = Trial(asked.device, asked.dsl)
    with VerifierProcess() as trial.verifier:
        trial.honest("before")
        for number, hostile in enumerate(itertools.islice(itertools.cycle(chosen), asked.number or len(chosen)), 1):
            trial.hostile(hostile, number)
            if number % asked.every == 0:
                trial.honest(f"after {number}")
        trial.honest("at the end")
    return trial.summary()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hostile submissions leave nothing behind.")
    parser.add_argument("--number", type=int, default=100, help="of hostile gradings; 0: each once (100)")
    parser.add_argument("--every", type=int, default=10, help="an honest grading after so many hostile ones (10)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dsl", default="tirx")
    parser.add_argument("--only", help="those whose name holds this")
    return parser.parse_args()


@dataclass
class Trial:
    """The gradings so far, and what they came to."""

    device: str
    dsl: str
    verifier: VerifierProcess = field(default_factory=VerifierProcess)
    codes: Counter[str] = field(default_factory=Counter[str])
    seconds: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])
    passed: int = 0
    clean: Census | None = None
    """What is there between gradings: the state after the first honest one."""

    def honest(self, when: str) -> None:
        """An honest grading, which must pass."""
        path = tree.ROOT / ("witnesses/tirx/p28.py" if self.device == "cuda" else "honest/workspaces.py")
        met, seconds = self._grade(path.read_bytes(), "tirx", HONEST)
        self.passed += met == "passed"
        self._tell(f"honest, {when}", met, seconds, ("passed",))

    def hostile(self, hostile: Hostile, number: int) -> None:
        met, seconds = self._grade(hostile.source, self.dsl, QUICK)
        self.codes[met] += 1
        self.seconds.append(seconds)
        self._tell(f"{number} {hostile.name}", met, seconds, hostile.codes)

    def summary(self) -> int:
        seconds = sorted(self.seconds)
        print(
            f"\n{len(seconds)} hostile gradings, {self.passed} honest ones passed; seconds a hostile one: median "
            f"{seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}; met: {json.dumps(dict(self.codes))}"
        )
        print("nothing left, nothing wrong" if not self.wrong else "WRONG:\n  " + "\n  ".join(self.wrong))
        return bool(self.wrong)

    def _grade(self, source: bytes, dsl: str, contract: Contract) -> tuple[str, float]:
        start = time.monotonic()
        workload = "full" if self.device == "cuda" else "smoke"
        try:
            verdict = self.verifier.grade(
                "p28", source, dsl, workload=workload, device=self.device, final=True, contract=contract
            )
        except InfrastructureFault as fault:
            return f"infrastructure ({fault.message})", time.monotonic() - start
        codes = [finding.code for finding in verdict.findings if finding.code not in _RULES]
        return (codes[0] if codes else "passed"), time.monotonic() - start

    def _tell(self, what: str, met: str, seconds: float, allowed: tuple[str, ...]) -> None:
        left = self._left()
        right = met in allowed and not left
        print(f"{what}: {met} in {seconds:.1f} s{'' if right else f'  WRONG, left: {left}'}", flush=True)
        if not right:
            self.wrong.append(f"{what}: {met}, left: {left}")

    def _left(self) -> list[str]:
        """What is there and was not after the first grading, once it had a few moments to go."""
        if self.clean is None:
            self.clean = Census.now(self.device)
            return []
        for _ in range(int(_PATIENCE_S / 0.25)):
            if not (left := Census.now(self.device).beyond(self.clean)):
                return []
            time.sleep(0.25)
        return left


_RULES = {"forbidden-import", "forbidden-attribute", "dunder-access", "dynamic-code", "monkeypatch", "file-access"}


@dataclass(frozen=True)
class Census:
    """What lies and runs on this machine of what a grading could leave."""

    things: frozenset[str]
    gpu_mib: int

    @staticmethod
    def now(device: str) -> Census:
        things = {*_processes(), *_files(), *_system_v(), *_groups(), *_verifiers_descriptors()}
        return Census(frozenset(things), _gpu_memory() if device == "cuda" else 0)

    def beyond(self, clean: Census) -> list[str]:
        """What is here and not in `clean`. GPU memory may differ by what the verifier's own pool grows."""
        left = sorted(self.things - clean.things)
        if self.gpu_mib > clean.gpu_mib + 2048:
            left.append(f"{self.gpu_mib - clean.gpu_mib} MiB of GPU memory")
        return left


def _processes() -> Iterator[str]:
    """Processes with a user id of workers that descend from this process, or are nobody's."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_ours(int(folder.name)):
            yield f"process {folder.name}"


def _is_ours(pid: int) -> bool:
    """Whether it is a worker's, and descends from this process or from none that could be another verifier."""
    try:
        if not is_workers_uid(Path(f"/proc/{pid}").stat().st_uid):
            return False
        while is_workers_uid(Path(f"/proc/{pid}").stat().st_uid):
            if (pid := _parent(pid)) <= 1:
                return True  # nobody's
        while pid not in (0, 1, os.getpid()):
            pid = _parent(pid)
        return pid == os.getpid()
    except (OSError, IndexError):
        return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def _files() -> Iterator[str]:
    """Entries of the temporary folders; those of other verifiers are named after these."""
    ours = {str(os.getpid()), *(pid for pid in _children(os.getpid()))}
    for name in os.listdir("/tmp"):  # noqa: PTH208
        if name.startswith("mkb-left") or (name.startswith("mkb-") and name.split("-")[1] in ours):
            yield f"/tmp/{name}"
    for path in Path("/dev/shm").iterdir():
        if is_workers_uid(path.lstat().st_uid):
            yield str(path)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _system_v() -> Iterator[str]:
    for kind in ("shm", "sem", "msg"):
        titles, *lines = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
        owner = titles.index("uid")
        yield from (f"{kind} of System V {line[1]}" for line in lines if is_workers_uid(int(line[owner])))


def _groups() -> Iterator[str]:
    pids = set(_children(os.getpid()))
    for group in Path("/sys/fs/cgroup").rglob("mkb-*-*"):
        if group.name.split("-")[1] in pids:
            yield f"group {group}"


def _verifiers_descriptors() -> Iterator[str]:
    """The verifier's open descriptors, counted by kind: it serves all gradings and must not gather any. A few of the
    last grading's shared memory go with the next collection of garbage."""
    counts: Counter[str] = Counter()
    for pid in _children(os.getpid()):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                counts[str(descriptor.readlink()).partition(":")[0].partition("/proc")[0]] += 1
            except OSError:
                continue
    counts["/memfd"] = max(0, counts["/memfd"] - _MOST_MEMORY_FILES)
    return (f"descriptor {number} of the verifier's ({kind})" for kind, n in counts.items() for number in range(n))


def _gpu_memory() -> int:
    """MiB in use on the first GPU; 0 where nvidia-smi cannot say."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return int(told[0]) if told and told[0].isdigit() else 0


if __name__ == "__main__":
    raise SystemExit(main())
