"""Warp: kernels as Python functions, compiled through LLVM for a CPU and through NVRTC for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from metakernelbench.dsls.dsl import Dsl, Interceptor, Observe

_RAW_CODE = "source text of another language is not Warp"
_LOADER = "it loads binaries that were not compiled from this file"
_LIBRARY = "it holds or generates kernels that are not yours"
_GRAPH = "CUDA graphs are not allowed"
_HOOK = "it changes how kernels are compiled or launched"
_CAPTURES = ("begin", "debug_dot_print", "end", "if", "launch", "load", "load_from_bytes", "save", "while")


class WarpDsl(Dsl):
    name = "warp"
    title = "NVIDIA Warp"
    requirements = ("warp-lang==1.19.0",)
    imports = frozenset({"warp"})
    forbidden: ClassVar[Mapping[str, str]] = {
        "warp.func_native": _RAW_CODE,
        "warp.build_experimental": _RAW_CODE,
        "warp.native": _RAW_CODE,
        "warp.load_module": _LOADER,
        "warp.load_aot_module": _LOADER,
        "warp.compile_aot_module": _LOADER,
        "warp.from_ptr": "a kernel gets tensors, not addresses",
        "warp.from_ipc_handle": "one process is all there is",
        "warp.event_from_ipc_handle": "one process is all there is",
        "warp.map": _LIBRARY,
        "warp.fem": _LIBRARY,
        "warp.optim": _LIBRARY,
        "warp.sparse": _LIBRARY,
        "warp.utils": _LIBRARY,
        "warp.examples": _LIBRARY,
        "warp.tests": _LIBRARY,
        "warp.render": "there is nothing to be drawn",
        "warp.jax_kernel": "JAX is not part of the task",
        "warp.jax_callable": "JAX is not part of the task",
        "warp.config": _HOOK,
        "warp.clear_kernel_cache": _HOOK,
        "warp._src": _HOOK,
        "warp.ScopedCapture": _GRAPH,
        **{f"warp.capture_{name}": _GRAPH for name in _CAPTURES},
    }
    devices = frozenset({"cpu", "cuda"})
    kernel_name_patterns = (r"_cuda_kernel_forward$",)
    documented = ("warp",)
    guide = Path(__file__).with_name("guide.md")

    def intercept(self, interceptor: Interceptor) -> None:
        import warp
        from warp._src import context

        from metakernelbench.dsls.launches import observed

        warp.config.quiet = True
        observe = partial(observed, interceptor)
        context.launch = warp.launch = _observed_launch(context.launch, observe)
        context.launch_tiled = warp.launch_tiled = _observed_launch(context.launch_tiled, observe)
        context.Launch.launch = _observed_recorded(context.Launch.launch, observe)

    def versions(self) -> dict[str, str]:
        try:
            return {"warp-lang": version("warp-lang")}
        except PackageNotFoundError:
            return {}


def _observed_launch(launch: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    """`warp.launch(kernel, ...)` and `warp.launch_tiled(kernel, ...)`."""

    def observed_launch(
        kernel: Any, dim: Any, inputs: Sequence[Any] = (), outputs: Sequence[Any] = (), **settings: Any
    ) -> Any:
        def perform() -> Any:
            return launch(kernel, dim=dim, inputs=inputs, outputs=outputs, **settings)

        if settings.get("record_cmd"):  # prepares a launch, performs none
            return perform()
        return observe(_name(kernel), [*inputs, *outputs], perform, _tensor)

    return observed_launch


def _observed_recorded(launch: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    """`command.launch()`, where command is what `warp.launch(..., record_cmd=True)` returned."""

    def observed_recorded(command: Any, stream: Any = None) -> Any:
        arrays = [getattr(value, "data", None) for value in command.params]
        return observe(_name(command.kernel), arrays, lambda: launch(command, stream))

    return observed_recorded


def _name(kernel: Any) -> str:
    return f"{kernel.func.__code__.co_filename}:{kernel.func.__name__}"


def _tensor(argument: Any) -> Any:
    """The tensor that a Warp array was made of."""
    return getattr(argument, "_tensor", None)
