"""Runs kernel.py once for `task check`: `python trial.py MODE REPORT`. Appends what it finds to REPORT, a line a fact.

`gpu`   as if on the GPU: tensors that have shapes and dtypes and no data, launches left out, kernels compiled for it
`cpu`   with real data on the CPU: the smoke workload, compared as in a grading; where the DSL has no CPU, launches are
        left out, and what is right all the same was computed by eager code
"""

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from metakernelbench.grading.compare import anchor_of, compare_all, reference_numerics

ROOT = Path(os.environ.get("MKB_ROOT") or "/")
KERNEL = ROOT / "app" / "kernel.py"
FACTS = ROOT / "task" / "facts.json"
_DRAWS = 2
_ADDRESS = 1 << 34
"""What a tensor without data answers when it is asked for its address."""
_NO_FAULT = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException")
_NO_GPU = ("no cuda gpus", "nvidia driver", "cuda driver", "no cuda-capable", "not compiled with cuda", "data pointer",
           "faketensor", "fake tensor", "cuinit", "libcuda", "__dlpack__", "dlpack", "cuda unavailable",
           "driver error", "no active drivers")  # fmt: skip
"""Parts of messages that say no more than that there is no GPU, or no data, here."""


class Report:
    """What has been found, written down at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, state: str, what: str, detail: str = "") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([state, what, detail]) + "\n")

    def begin(self, what: str) -> None:
        """If nothing more is said, this is where the process ended."""
        self.say("began", what)


def main(mode: str, report: Report) -> None:
    facts = json.loads(FACTS.read_text())
    sys.path.insert(0, str(KERNEL.parent))
    problem = importlib.import_module("problem")
    launches: list[str] = []
    report.begin("import")
    performed = mode == "cpu" and "cpu" in facts["devices"]
    if not performed:
        pretend_gpu(facts)
    note_launches(facts, launches, performed=performed)
    kernel = imported(report)
    if kernel is None or not fits(kernel, problem, report):
        return
    if mode == "gpu":
        as_if_on_the_gpu(kernel.solve, problem, facts, launches, report)
    else:
        on_the_cpu(kernel.solve, problem, facts, launches, report)


def imported(report: Report) -> ModuleType | None:
    """kernel.py as a module; None, and the reason in the report, where it cannot be had."""
    try:
        kernel = importlib.import_module("kernel")
    except BaseException as error:
        report.say("wrong", "import", explained(error))
        return None
    report.say("ok", "import", "kernel.py can be imported")
    return kernel


def fits(kernel: ModuleType, problem: ModuleType, report: Report) -> bool:
    """Whether `solve` can be called with the arguments of `reference`."""
    solve = getattr(kernel, "solve", None)
    names = list(inspect.signature(problem.reference).parameters)
    if not callable(solve):
        report.say("wrong", "signature", f"`solve` is a {type(solve).__name__}, which cannot be called")
        return False
    try:
        inspect.signature(solve).bind(*names)
    except TypeError as error:
        report.say("wrong", "signature", f"{error}; `solve` is called with {len(names)} arguments: {', '.join(names)}")
        return False
    except ValueError:  # callables without a signature
        pass
    report.say("ok", "signature", f"`solve` can be called with the {len(names)} arguments of `reference`")
    return True


# as if on the GPU -----------------------------------------------------------------------------------------------------


def pretend_gpu(facts: dict[str, Any]) -> None:
    """Make torch answer questions about the GPU as it will where it is graded; nothing is ever run on it."""
    if facts["capability"] is None:
        return
    major, minor = facts["capability"]
    properties = SimpleNamespace(
        name=facts["gpu"], major=major, minor=minor, multi_processor_count=facts["processors"], warp_size=32
    )
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), synchronize=always(None))
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (major, minor),
        "get_device_name": facts["gpu"],
        "get_device_properties": properties,
        "current_stream": stream,
        "default_stream": stream,
        "synchronize": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
    fake_tensors: Any = importlib.import_module("torch._subclasses.fake_tensor")
    # It must not start CUDA now that there seems to be a GPU.
    fake_tensors.init_gpu_context = always(None)
    fake_tensors.FakeTensorMode.avoid_device_init = property(always(True))
    fake_tensors.FakeTensor.data_ptr = always(_ADDRESS)


def always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def note_launches(facts: dict[str, Any], launches: list[str], *, performed: bool) -> None:
    """From here on launches are noted, and performed or left out."""

    def note(name: str, _tensors: Sequence[torch.Tensor], launch: Callable[[], None]) -> None:
        launches.append(name.rpartition(":")[2])
        if performed:
            launch()

    getattr(importlib.import_module(facts["module"]), facts["class"])().intercept(note)


def as_if_on_the_gpu(
    solve: Callable[..., Any], problem: ModuleType, facts: dict[str, Any], launches: list[str], report: Report
) -> None:
    what = "kernels"
    report.begin(what)
    mode = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    workload, inputs, expected = without_data(problem, mode, facts)
    try:
        with mode, torch.no_grad():
            actual = solve(*inputs)
    except BaseException as error:
        shown = explained(error)
        if no_fault(error):
            report.say("open", what, f"{shown}. There is no GPU and no data here, so that this may be no fault")
        else:
            report.say("wrong", what, f"on tensors of the {workload} workload's shapes: {shown}")
        return
    shaped = expected is not None
    wrong = differences(actual, expected if shaped else problem.reference(*drawn(problem)), "cuda", shapes=shaped)
    for difference in wrong:
        report.say("wrong", "outputs", difference)
    if not launches:
        report.say("wrong", what, f"`solve` launched no kernel of {facts['title']}")
        return
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(launches))
    compiled = f"compiled for {facts['arch']}" if facts["compiles_here"] else "not compiled, which needs a GPU"
    report.say("ok", what, f"{compiled}; {len(launches)} launch{'es' if len(launches) > 1 else ''} asked for ({names})")
    if not wrong:
        seen = f"structure, shapes and dtypes as the reference's ({workload} workload)"
        partly = "structure and dtypes as the reference's; shapes not compared, because the reference needs data"
        report.say("ok", "outputs", seen if shaped else partly)


def without_data(problem: ModuleType, mode: Any, facts: dict[str, Any]) -> tuple[str, Sequence[Any], Any]:
    """Inputs on a GPU that is not there, of the graded workload if its inputs can be made without data, and what the
    reference returns for them (None where it needs data)."""
    device = torch.device("cuda")
    form = getattr(problem, "vectorized", problem.reference)  # the same in everything but time
    for name in dict.fromkeys((facts["workload"], "smoke")):
        try:
            with mode, torch.no_grad():
                inputs = problem.make_inputs(getattr(problem, name.upper()), device)
                copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)
        except Exception:
            continue
        try:
            with mode, torch.no_grad():
                return name, inputs, form(*copies)
        except Exception:
            return name, inputs, None
    real = drawn(problem)
    with mode:
        moved = tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) if isinstance(x, torch.Tensor) else x
            for x in real
        )
    return "smoke", moved, problem.reference(*real)


def no_fault(error: BaseException) -> bool:
    """Whether an error says no more than that data, or a GPU, are missing here."""
    text = f"{type(error).__name__}: {error}".lower()
    return type(error).__name__ in _NO_FAULT or any(part in text for part in _NO_GPU)


# on the CPU -----------------------------------------------------------------------------------------------------------


def on_the_cpu(
    solve: Callable[..., Any], problem: ModuleType, facts: dict[str, Any], launches: list[str], report: Report
) -> None:
    what = "values"
    report.begin(what)
    runs_kernels = "cpu" in facts["devices"]
    for _ in range(_DRAWS):
        inputs = drawn(problem)
        with reference_numerics():
            expected = problem.reference(*copied(inputs))
            anchor = anchor_of(problem.reference, inputs)
        try:
            actual = solve(*copied(inputs))
        except BaseException as error:
            optional = facts["device"] == "cuda"
            why = ". `solve` need not run on CPU tensors: this may be no fault" if optional else ""
            state = "open" if optional else "wrong"
            report.say(state, what, f"smoke workload on the CPU: {explained(error)}{why}")
            return
        if wrong := differences(actual, expected, "cpu"):
            for difference in wrong:
                report.say("wrong", what, f"smoke workload on the CPU: {difference}")
            return
        results = compare_all(problem.OUTPUTS, actual, expected, anchor)
        if not runs_kernels:
            say_what_eager_code_did(results, report)
            return
        if not all(result.passed for result in results):
            for result in results:
                report.say("ok" if result.passed else "wrong", what, f"smoke workload on the CPU: {described(result)}")
            return
    if not launches:
        report.say("wrong", what, f"the values are right, but `solve` launched no kernel of {facts['title']}")
        return
    tightest = "; ".join(described(result) for result in results)
    report.say("ok", what, f"smoke workload on the CPU, {_DRAWS} draws: {tightest}")


def say_what_eager_code_did(results: Sequence[Any], report: Report) -> None:
    """Outputs that are right although no kernel ran."""
    right = [result.output for result in results if result.passed]
    kernels = [result.output for result in results if not result.passed]
    where = "smoke workload on the CPU, launches left out"
    if not kernels:
        report.say("wrong", "values", f"{where}: all outputs are right, so that they do not depend on the kernels")
        return
    if right:
        report.say("ok", "values", f"{where}: {', '.join(right)} right, so computed by eager code alone")
    report.say("open", "values", f"{where}: {', '.join(kernels)} come from kernels, which run on a GPU only")


def drawn(problem: ModuleType) -> tuple[Any, ...]:
    with reference_numerics():
        inputs: tuple[Any, ...] = problem.make_inputs(problem.SMOKE, torch.device("cpu"))
    return inputs


def copied(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)


def described(result: Any) -> str:
    if result.error is None:
        return f"{result.output}: {result.mismatches} of {result.elements} elements differ"
    return f"{result.output}: largest error {result.error:.3g}, allowed {result.allowance:.3g}"


# both -----------------------------------------------------------------------------------------------------------------


def differences(actual: Any, expected: Any, device: str, *, shapes: bool = True) -> list[str]:
    """How what `solve` returned differs from the reference's result in everything but values, and perhaps shapes."""
    several = isinstance(expected, tuple | list)
    if type(actual) is not type(expected) and (several or not isinstance(actual, torch.Tensor)):
        return [f"`solve` returned a {type(actual).__name__}; the reference returns a {type(expected).__name__}"]
    pairs = list(zip(actual, expected, strict=False)) if several else [(actual, expected)]
    if several and len(actual) != len(expected):
        return [f"`solve` returned {len(actual)} values; the reference returns {len(expected)}"]
    found = (_differences(f"output {number}", a, e, device) for number, (a, e) in enumerate(pairs))
    return [text for texts in found for text in texts if shapes or "has shape" not in text]


def _differences(name: str, actual: Any, expected: Any, device: str) -> Iterator[str]:
    if not isinstance(actual, torch.Tensor):
        yield f"{name} is a {type(actual).__name__}, not a tensor"
        return
    for what, a, e in (
        ("shape", list(actual.shape), list(expected.shape)),
        ("dtype", actual.dtype, expected.dtype),
        ("device", actual.device.type, device),
    ):
        if a != e:
            yield f"{name} has {what} {a}; the reference's has {e}"
    if device == "cpu" and type(actual) is not torch.Tensor:
        yield f"{name} is a {type(actual).__name__}; return plain tensors"


def explained(error: BaseException) -> str:
    """The error in one line, with the line of kernel.py that it comes from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(KERNEL)]
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    place = f"line {line}: " if line else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{place}{type(error).__name__}: {text[:500]}"


if __name__ == "__main__":
    main(sys.argv[1], Report(Path(sys.argv[2])))
