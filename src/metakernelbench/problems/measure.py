"""What a problem costs where it runs: time and memory of its draw, reference, vectorised form and anchor.

`mkb problems measure` runs this once per problem, each in a process of its own, so that one that does not fit takes
nothing with it. The results are kept as `records/<gpu>/problems.jsonl`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from metakernelbench.grading.compare import anchor_of, as_tuple, compare_all, reference_numerics
from metakernelbench.problems.catalog import load
from metakernelbench.problems.problem import Inputs, Outputs, copies

_SECONDS_OF_CALLS = 1.0
_MIN_CALLS, _MAX_CALLS = 3, 25


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One problem at one workload on one device."""

    problem: str
    workload: str
    device: str
    """The GPU's name, or `cpu`."""
    torch: str
    """torch's version."""
    inputs: tuple[tuple[str, list[int], str], ...]
    """(name, shape, dtype) of each input tensor; (name, [], type) of each Python number."""
    outputs: tuple[tuple[str, list[int], str], ...]
    draw_s: float
    """One draw, once the device is warm."""
    reference_ms: float
    """Median of the eager reference."""
    vectorized_ms: float | None
    """Median of the vectorised form, where there is one."""
    vectorized_passes: bool | None
    """Whether the contract accepts the vectorised form on this draw."""
    anchor_s: float
    peak_gb: float | None
    """Peak of the GPU memory, in 10^9 bytes, with inputs, promoted inputs, outputs and anchor held; None on a CPU."""
    allowances: tuple[float | None, ...]
    """Of each output, on this draw; None for integer outputs."""


def measure(problem_id: str, workload: str, device_name: str, seed: int = 0) -> Measurement:
    """Measure in this process. `device_name` is `cpu` or `cuda`."""
    problem, device = load(problem_id), torch.device(device_name)
    with reference_numerics():
        problem.draw(workload, seed + 1, device)  # warms up the generator's kernels
        draw_s, inputs = _timed(lambda: problem.draw(workload, seed, device), device)
        signature = _describe(inspect.signature(problem.reference).parameters, inputs)
        reference_ms, expected = _median_ms(problem.reference, inputs, device)
        vectorized_ms, vectorized = None, None
        if problem.vectorized is not None:
            vectorized_ms, vectorized = _median_ms(problem.vectorized, inputs, device)
        anchor_s, anchor = _timed(lambda: anchor_of(problem.reference, inputs), device)
        comparisons = compare_all(problem.outputs, expected, expected, anchor)
        passes = None
        if vectorized is not None:
            passes = all(c.passed for c in compare_all(problem.outputs, vectorized, expected, anchor))
    cuda = device.type == "cuda"
    return Measurement(
        problem=problem_id,
        workload=workload,
        device=torch.cuda.get_device_name() if cuda else "cpu",
        torch=torch.__version__,
        inputs=signature,
        outputs=_describe(problem.outputs, as_tuple(expected)),
        draw_s=draw_s,
        reference_ms=reference_ms,
        vectorized_ms=vectorized_ms,
        vectorized_passes=passes,
        anchor_s=anchor_s,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        allowances=tuple(c.allowance for c in comparisons),
    )


def measure_in_own_process(problem_id: str, workload: str, device_name: str, timeout_s: float) -> Measurement | str:
    """`measure` in a fresh process; where that fails, the last line of what it said."""
    command = [sys.executable, "-m", "metakernelbench.problems.measure", problem_id, workload, device_name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {timeout_s:.0f} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def _describe(names: Any, values: tuple[Any, ...]) -> tuple[tuple[str, list[int], str], ...]:
    def one(name: str, value: Any) -> tuple[str, list[int], str]:
        if isinstance(value, torch.Tensor):
            return name, list(value.shape), str(value.dtype).removeprefix("torch.")
        return name, [], type(value).__name__

    return tuple(one(name, value) for name, value in zip(names, values, strict=True))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _timed[T](work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds of `work`, device work included, and its result."""
    _synchronise(device)
    start = time.perf_counter()
    result = work()
    _synchronise(device)
    return time.perf_counter() - start, result


def _median_ms(function: Callable[..., Outputs], inputs: Inputs, device: torch.device) -> tuple[float, Outputs]:
    """Median milliseconds of calls on copies of the tensors (some references update a cache in place), one result."""
    arguments = copies(inputs)
    first_s, result = _timed(lambda: function(*arguments), device)
    del arguments
    seconds: list[float] = []
    while len(seconds) < _MIN_CALLS or (sum(seconds) < _SECONDS_OF_CALLS and len(seconds) < _MAX_CALLS):
        arguments = copies(inputs)
        seconds.append(_timed(lambda call=arguments: function(*call), device)[0])  # type: ignore[misc]
        if first_s > 10 * _SECONDS_OF_CALLS:
            break
    return 1e3 * median(seconds), result


if __name__ == "__main__":
    _problem, _workload, _device = sys.argv[1:]
    print(json.dumps(dataclasses.asdict(measure(_problem, _workload, _device))))
