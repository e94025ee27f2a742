"""Runs every launch path of a DSL under its plugin, in a process of its own: `python -m tests.dsls.observe DSL`.

Interception cannot be undone, hence the process. Prints one JSON object: launch path → what was seen and what came of
it, once with the launch performed and once with it left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from metakernelbench.dsls.dsl import load

Path = Callable[[torch.Tensor, torch.Tensor], Any]


def tirx_paths() -> dict[str, Path]:
    import tvm_ffi

    from tests.dsls.kernels_tirx import executable

    looked_up = executable["main"]
    return {
        "exe(...)": executable,
        "exe['main']": looked_up,
        "exe.mod['main']": executable.mod["main"],
        "exe.mod.main": executable.mod.main,
        "exe.mod(...)": executable.mod,
        "exe.jit()": executable.jit(),
        "get_function": executable.mod.get_function("main"),
        "tvm_ffi tensors": lambda a, b: looked_up(tvm_ffi.from_dlpack(a), tvm_ffi.from_dlpack(b)),
    }


def triton_paths() -> dict[str, Path]:
    import triton

    from tests.dsls.kernels_triton import double

    tuned = triton.heuristics({"BLOCK": lambda _arguments: 8})(double)
    return {
        "kernel[grid]": lambda a, b: double[(1,)](a, b, 8, BLOCK=8),
        "keywords": lambda a, b: double[(1,)](source=a, target=b, size=8, BLOCK=8),
        "run": lambda a, b: double.run(a, b, 8, BLOCK=8, grid=(1,), warmup=False),
        "heuristics": lambda a, b: tuned[lambda meta: (triton.cdiv(8, meta["BLOCK"]),)](a, b, 8),
    }


def cute_paths() -> dict[str, Path]:
    from cutlass import Float32, cute
    from cutlass.cute.runtime import from_dlpack, make_ptr

    from tests.dsls.kernels_cute import double, double_twice, fill_from

    example = from_dlpack(torch.zeros(8))
    compiled = cute.compile(double, example, example)
    pointer = cute.compile(fill_from, make_ptr(Float32, 0), Float32(0))
    return {
        "jit": lambda a, b: double(from_dlpack(a), from_dlpack(b)),
        "jit within jit": lambda a, b: double_twice(from_dlpack(a), from_dlpack(b)),
        "compiled, cute tensors": lambda a, b: compiled(from_dlpack(a), from_dlpack(b)),
        "compiled, torch tensors": compiled,
        "compiled.to": lambda a, b: compiled.to(None)(from_dlpack(a), from_dlpack(b)),
        "compiled, pointers": lambda a, b: pointer(make_ptr(Float32, b.data_ptr()), 2.0) if a.numel() else None,
    }


PATHS: dict[str, Callable[[], dict[str, Path]]] = {"tirx": tirx_paths, "triton": triton_paths, "cute": cute_paths}


def main(dsl: str) -> None:
    seen: list[tuple[str, list[torch.Tensor]]] = []
    perform = True

    def interceptor(kernel: str, tensors: Any, launch: Callable[[], None]) -> None:
        seen.append((kernel, list(tensors)))
        if perform:
            launch()

    load(dsl).intercept(interceptor)
    report = {}
    for name, path in PATHS[dsl]().items():
        a, b = torch.ones(8), torch.zeros(8)
        outcomes = []
        for perform in (True, False):  # noqa: B007  read by the interceptor
            seen.clear()
            b.zero_()
            path(a, b)
            kernels = [kernel for kernel, _ in seen]
            pointers = {x.data_ptr() for _, tensors in seen for x in tensors}
            outcomes.append(
                {"kernels": kernels, "sees_target": b.data_ptr() in pointers, "written": bool((b != 0).any())}
            )
        report[name] = {"performed": outcomes[0], "left_out": outcomes[1]}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
