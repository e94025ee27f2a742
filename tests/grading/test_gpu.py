"""Gradings on a real GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.hostile import HOSTILE, Hostile

from metakernelbench.dsls import dsl
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.contract import CONTRACT, Contract
from metakernelbench.grading.head_to_head import Entrant
from metakernelbench.grading.redteam import EXPLOITS, Sample, attempt, samples

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WITNESSES = Path(__file__).parents[2] / "witnesses"
CASES = [("tirx", "p28"), ("tirx", "p72"), ("cute", "p28"), ("cute", "p72")]


@pytest.fixture(scope="module")
def verifier() -> Iterator[VerifierProcess]:
    with VerifierProcess() as process:
        yield process


@pytest.mark.parametrize(("language", "problem"), CASES)
def test_witness_passes_at_the_full_workload(verifier: VerifierProcess, language: str, problem: str) -> None:
    if not dsl.load(language).versions():
        pytest.skip(f"{language} is not installed")
    source = (WITNESSES / language / f"{problem}.py").read_bytes()
    verdict = verifier.grade(problem, source, language, workload="full", device="cuda", final=True)
    assert verdict.passed, verdict.findings
    assert verdict.timing is not None and len(verdict.timing.implementation_ms) == CONTRACT.timed_calls
    assert not any("host memory" in note for note in verdict.isolation.notes), "GPU memory was not shared"


def test_memory_is_shared_with_another_process() -> None:
    import torch

    from metakernelbench.grading import cuda_ipc

    pointer, block = cuda_ipc.allocate(1 << 20)
    block.fill_(7)
    torch.cuda.synchronize()
    assert len(cuda_ipc.export(pointer)) == 128
    assert int(block.sum()) == 7 << 20
    cuda_ipc.free(pointer)


def test_a_buffer_that_is_still_to_be_looked_at_is_not_used_again() -> None:
    import torch

    from metakernelbench.grading.buffers import Form
    from metakernelbench.grading.transport import IpcTransport

    x = torch.ones(8, device="cuda")
    form = Form.of(("y",), (x,), x)
    transport = IpcTransport(form)
    for _ in range(20):
        kept = transport.pack((x,), form)
        kept.collect()
        transport.pack((x,), form, kept)
        assert kept.unchanged()
    transport.close()


def test_the_only_pair_of_buffers_is_looked_at_before_it_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from metakernelbench.grading import transport
    from metakernelbench.grading.buffers import Form

    monkeypatch.setattr(transport, "_MOST_OF_THE_GPU", 0)
    x = torch.ones(8, device="cuda")
    form = Form.of(("y",), (x,), x)
    carrier = transport.IpcTransport(form)
    for late in (False, True):
        kept = carrier.pack((x,), form)
        kept.collect()
        kept.target.fill_(3 if late else 0xFF)
        carrier.pack((x,), form, kept)
        assert kept.unchanged() is not late
    carrier.close()


@pytest.mark.parametrize("exploit", samples(EXPLOITS, "cuda"), ids=lambda exploit: exploit.path.stem)
def test_exploit_is_refused_with_its_code(verifier: VerifierProcess, exploit: Sample) -> None:
    outcome = attempt(verifier, exploit, "cuda")
    assert outcome.ok, f"{outcome.met}: {outcome.message}"


def test_gradings_one_after_the_other_leave_no_memory_behind(verifier: VerifierProcess) -> None:
    import torch

    def free() -> int:
        return int(torch.cuda.mem_get_info()[0])

    source = (WITNESSES / "tirx" / "p28.py").read_bytes()
    left = []
    for _ in range(3):
        assert verifier.grade("p28", source, "tirx", workload="full", device="cuda").passed
        left.append(free())
    assert left[2] > left[0] - (64 << 20)


def test_a_file_and_its_copy_are_equally_fast(verifier: VerifierProcess) -> None:
    source = (WITNESSES / "tirx" / "p21.py").read_bytes()
    result = verifier.head_to_head("p21", [Entrant("tirx", source)] * 2, workload="full", device="cuda")
    pair = result.pair(0, 1)
    assert pair is not None and 0.9 < pair.ratio < 1.1


@pytest.mark.parametrize("hostile", [h for h in HOSTILE if h.device == "cuda"], ids=lambda hostile: hostile.name)
def test_hostile_submission_leaves_the_gpu_as_it_was(verifier: VerifierProcess, hostile: Hostile) -> None:
    quick = Contract(correctness_draws=2, warmup_calls=2, timed_calls=6, rechecked_calls=1, time_limit_s=20)
    asked = {"workload": "full", "device": "cuda", "contract": quick}
    before = gpu_memory_mib()
    verdict = verifier.grade("p28", hostile.source, "tirx", final=True, **asked)
    assert {finding.code for finding in verdict.findings} & set(hostile.codes), verdict.findings
    assert gpu_memory_mib() < before + 4096, "memory that the verifier's own pool does not explain"
    honest = (WITNESSES / "tirx" / "p28.py").read_bytes()
    assert verifier.grade("p28", honest, "tirx", **asked).passed


def gpu_memory_mib() -> int:
    """In use on the first GPU, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
