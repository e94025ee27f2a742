"""`task check` as the agent runs it: what it says, and its exit status."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from metakernelbench.attempts.payload import check, trial
from tests.attempts.payload.support import KERNEL, lay_out, task

EAGER = """
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    return (total * scale * weight.float()).to(x.dtype)
"""


def checked(root: Path, source: str | None) -> tuple[int, str]:
    if source is not None:
        (root / "app" / "kernel.py").write_text(source)
    done = task(root, "check")
    assert done.stderr == ""
    return done.returncode, done.stdout


def tried(root: Path, mode: str, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What one of the processes that run kernel.py reports."""
    (root / "app" / "kernel.py").write_text(source)
    for name, value in (("MKB_ROOT", root), ("PYTHONPATH", root / "task"), ("OMP_NUM_THREADS", 1)):
        monkeypatch.setenv(name, str(value))
    return "\n".join(f"{state} {what}: {detail}" for state, what, detail in check._trial(mode))


class TestWhereKernelsRunOnTheCpu:
    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        lay_out(tmp_path, monkeypatch, devices=("cpu",), device="cpu")
        return tmp_path

    def test_a_right_kernel_is_compared_with_the_reference(self, root: Path) -> None:
        code, text = checked(root, KERNEL)
        assert code == 0, text
        assert re.search(r"ok +values: smoke workload on the CPU, 2 draws: normalised: largest error", text)
        assert "not checked  the rest: values, dependence on the kernels and speed on the grading machine" in text
        assert text.splitlines()[-1].endswith("Nothing wrong was found. `task submit` sends it.")
        assert "WRONG" not in text

    def test_broken_rules_and_wrong_values_are_told_together(self, root: Path) -> None:
        code, text = checked(root, "import numpy\n" + KERNEL.replace("1e-5", "0.5"))
        assert code == 1
        assert "WRONG        rules: line 1: [forbidden-import] `numpy`" in text
        assert "import: kernel.py can be imported" in text
        assert re.search(r"WRONG +values: smoke workload on the CPU: normalised: largest error .*, allowed", text)
        assert text.splitlines()[-1].endswith("Correct what is marked WRONG, then run `task check` again.")

    def test_a_solve_that_launches_nothing_is_wrong_although_its_values_are_right(self, root: Path) -> None:
        call = "norm(x, residual, weight, out)\n    return"
        code, text = checked(root, KERNEL.replace(call, call.replace("norm(", "norm.function(")))
        assert code == 1
        assert "`solve` launched no kernel of Toy" in text

    def test_an_error_of_solve_names_the_line(self, root: Path) -> None:
        code, text = checked(root, KERNEL.replace("return out", "print('look here')\n    return out.nothing"))
        assert code == 1
        assert "line 17: AttributeError: 'Tensor' object has no attribute 'nothing'" in text
        assert "look here" in text

    def test_a_crash_of_the_process_is_reported_and_not_shared(self, root: Path) -> None:
        code, text = checked(root, "import os\nos.kill(os.getpid(), 11)\nsolve = 1\n")
        assert code == 1
        assert "WRONG        import: the process was ended by signal 11" in text


class TestWhereGradingRunsOnAGpu:
    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        lay_out(tmp_path, monkeypatch, devices=("cuda",), device="cuda")
        return tmp_path

    def test_shapes_are_followed_on_the_graded_workload_without_a_gpu(self, root: Path) -> None:
        asks = "torch.cuda.get_device_capability() == (9, 0) and x.is_cuda and x.shape == (14509, 4096)"
        asked = f"assert not x.is_cuda or {asks}\n    torch.cuda.current_stream().cuda_stream\n    out ="
        right = KERNEL.replace("out =", asked)
        code, text = checked(root, right)
        assert code == 0, text
        assert "kernels: not compiled, which needs a GPU; 1 launch asked for (`norm`)" in text
        assert "outputs: structure, shapes and dtypes as the reference's (full workload)" in text
        assert "launches left out: normalised come from kernels" in text
        assert "speed on the NVIDIA H200" in text

    def test_a_wrong_shape_is_found(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = tried(root, "gpu", KERNEL.replace("return out", "return out[:, :8].float()"), monkeypatch)
        assert "wrong outputs: output 0 has shape [14509, 8]; the reference's has [14509, 4096]" in text
        assert "output 0 has dtype torch.float32; the reference's has torch.bfloat16" in text

    def test_what_eager_code_computes_alone_is_found(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = tried(root, "cpu", KERNEL.replace("    return out", EAGER), monkeypatch)
        assert "wrong values" in text
        assert "all outputs are right, so that they do not depend on the kernels" in text

    def test_what_needs_data_is_said_to_be_unchecked(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = tried(root, "gpu", KERNEL.replace("out =", "n = int(x.sum())\n    out ="), monkeypatch)
        assert re.search(r"open kernels: line 14: .*may be no fault", text)


class TestWhatIsReadFromTheSourceAlone:
    """No process that runs kernel.py is started."""

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        lay_out(tmp_path, monkeypatch, devices=("cpu",), device="cpu")
        return tmp_path

    @pytest.mark.parametrize(
        ("source", "found"),
        [
            (None, r"\[missing\] There is no kernel.py"),
            ("", r"\[empty\]"),
            ("def solve(:\n", r"line 1: \[syntax-error\]"),
            ("x = 1\n", r"\[no-solve\]"),
        ],
    )
    def test_a_file_that_cannot_be_used_ends_the_check(self, root: Path, source: str | None, found: str) -> None:
        code, text = checked(root, source)
        assert code == 1
        assert re.search(f"WRONG +source: {found}", text)
        assert len(text.splitlines()) == 3


def test_a_process_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PATIENCE_S", 0.5)
    start = time.monotonic()
    assert check._run(["sleep", "60"], tmp_path / "printed") is None
    assert time.monotonic() - start < 30
    assert "did not end" not in check._death(0)
    assert "does not end" in check._death(None)


class TestPieces:
    @pytest.mark.parametrize(
        ("error", "excused"),
        [
            (RuntimeError("Found no NVIDIA driver on your system."), True),
            (RuntimeError("Cannot access data pointer of Tensor (e.g. FakeTensor)"), True),
            (ValueError("expected 3 arguments"), False),
            (AssertionError(""), False),
        ],
    )
    def test_only_what_a_missing_gpu_explains_is_excused(self, error: Exception, excused: bool) -> None:
        assert trial.no_fault(error) is excused

    def test_structures_are_compared_before_tensors(self) -> None:
        import torch

        one = torch.zeros(2)
        assert trial.differences((one, one), (one, one), "cpu") == []
        assert "returned a list" in trial.differences([one], (one,), "cpu")[0]
        assert "returned 1 values" in trial.differences((one,), (one, one), "cpu")[0]
        assert "is a int" in trial.differences((1,), (one,), "cpu")[0]
        assert trial.differences(None, one, "cpu") == ["`solve` returned a NoneType; the reference returns a Tensor"]
        assert trial.differences(one[:1], one, "cpu", shapes=False) == []
        assert trial.differences(one.double(), one, "cpu") == [
            "output 0 has dtype torch.float64; the reference's has torch.float32"
        ]

    def test_findings_survive_a_process_that_dies(self, tmp_path: Path) -> None:
        report = trial.Report(tmp_path / "report")
        report.say("ok", "import", "done")
        report.begin("values")
        lines = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
        assert lines == [["ok", "import", "done"], ["began", "values", ""]]
