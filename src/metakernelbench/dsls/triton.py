"""Triton: an extension of the benchmark, and the DSL of rehearsals on a CPU, where its interpreter runs the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from metakernelbench.dsls.dsl import Dsl, Interceptor, Observe

_RAW_CODE = "inline assembly is not Triton"
_FOREIGN_CODE = "it links code that was not written in Triton"
_LOADER = "it loads or launches binaries that were not compiled from this file"
_HOOK = "it changes how kernels are compiled or launched"


class TritonDsl(Dsl):
    name = "triton"
    title = "Triton"
    requirements = ("triton==3.7.1",)
    imports = frozenset({"triton"})
    forbidden: ClassVar[Mapping[str, str]] = {
        "triton.language.inline_asm_elementwise": _RAW_CODE,
        "triton.language.core.inline_asm_elementwise": _RAW_CODE,
        "triton.language.core.extern_elementwise": _FOREIGN_CODE,
        "triton.language.core.extern": _FOREIGN_CODE,
        "triton.experimental": "Gluon is another DSL",
        "triton.backends": _LOADER,
        "triton.compiler": _LOADER,
        "triton.tools.build_extern": _LOADER,
        "triton.tools.compile": _LOADER,
        "triton.tools.link": _LOADER,
        "triton.runtime.driver": _LOADER,
        "triton.runtime.build": _LOADER,
        "triton.runtime.cache": _LOADER,
        "triton.runtime.interpreter": "the interpreter belongs to the grader",
        "triton.knobs": _HOOK,
        "triton.plugins": _HOOK,
        "triton.instrumentation": _HOOK,
        "triton.profiler": _HOOK,
        "triton.testing.do_bench_cudagraph": "CUDA graphs are not allowed",
    }
    devices = frozenset({"cpu", "cuda"})
    kernel_name_patterns = (r"^\w+$",)  # a kernel carries its function's name, with nothing added
    documented = ("triton.language", "triton")

    def environment(self, device: str) -> dict[str, str]:
        return {"TRITON_INTERPRET": "1"} if device == "cpu" else {}

    def intercept(self, interceptor: Interceptor) -> None:
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        from metakernelbench.dsls.launches import Passing, observed

        observe = partial(observed, interceptor)
        for owner in (JITFunction, InterpretedFunction):
            owner.run = _observed_run(owner.run, observe, Passing)
        CompiledKernel.__getitem__ = _observed_getitem(CompiledKernel.__getitem__, observe, Passing)

    def versions(self) -> dict[str, str]:
        try:
            return {"triton": version("triton")}
        except PackageNotFoundError:
            return {}


def _observed_run(run: Callable[..., Any], observe: Observe, passing: Any) -> Callable[..., Any]:
    """`kernel[grid](...)` and `kernel.run(...)`, compiled or interpreted, under an autotuner or not."""

    def observed_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        def launch() -> Any:
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        if warmup:  # compiles, launches nothing
            return launch()
        if passing.on:
            return passing.counted(launch)
        code = kernel.fn.__code__
        return observe(f"{code.co_filename}:{kernel.fn.__name__}", [*args, *kwargs.values()], launch, _base)

    return observed_run


def _observed_getitem(getitem: Callable[..., Any], observe: Observe, passing: Any) -> Callable[..., Any]:
    """`compiled[grid](...)`, where compiled is what `kernel.warmup` returned."""

    def observed_getitem(compiled: Any, grid: Any) -> Callable[..., Any]:
        runner = getitem(compiled, grid)

        def launch(*args: Any, **kwargs: Any) -> Any:
            if passing.on:
                return passing.counted(runner, *args, **kwargs)
            return observe(compiled.name, args, lambda: runner(*args, **kwargs), _base)

        return launch

    return observed_getitem


def _base(argument: Any) -> Any:
    """The tensor behind a tensor descriptor or a reinterpreted tensor."""
    return getattr(argument, "base", None)
