"""CuTe DSL (CUTLASS 4): compiles anywhere, runs on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from metakernelbench.dsls.dsl import Dsl, Interceptor, Observe
from metakernelbench.dsls.guides import guide_of

_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
_RAW_CODE = "inline assembly and raw IR are not CuTe DSL"
_FOREIGN_CODE = "it links code that was not written in CuTe DSL"
_LOADER = "it loads or launches binaries that were not compiled from this file"
_HOOK = "it changes how kernels are compiled or launched"
_GRAPH = "CUDA graphs are not allowed"

# The driver's bindings may be imported for their stream and device types; these functions lead round the DSL.
_DRIVER_LOADERS = (
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleLoadFatBinary",
    "cuLibraryLoadData",
    "cuLibraryLoadFromFile",
    "cuLinkCreate",
    "cuLinkAddData",
    "cuLinkAddFile",
    "cuLaunch",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
    "cuLaunchHostFunc",
)
_DRIVER_GRAPHS = (
    "cuStreamBeginCapture",
    "cuStreamBeginCaptureToGraph",
    "cuGraphCreate",
    "cuGraphInstantiate",
    "cuGraphInstantiateWithParams",
    "cuGraphLaunch",
)


class CuteDsl(Dsl):
    name = "cute"
    title = "CuTe DSL"
    requirements = ("nvidia-cutlass-dsl[cu13]==4.7.0", "apache-tvm-ffi==0.1.12")
    imports = frozenset({"cutlass", "cuda.bindings.driver", "tvm_ffi"})
    forbidden: ClassVar[Mapping[str, str]] = {
        "cutlass._mlir": _RAW_CODE,
        "cutlass._mlir_helpers": _RAW_CODE,
        "cutlass.cute.arch.inline_ptx": _RAW_CODE,
        "cutlass.cute.arch.nvvm_wrappers.inline_ptx": _RAW_CODE,
        "cutlass.experimental.primitives.inline_ptx": _RAW_CODE,
        "cutlass.experimental.primitives.nvvm_wrapper": _RAW_CODE,
        "cutlass.cute.ffi": _FOREIGN_CODE,
        "cutlass.cute.extern": _FOREIGN_CODE,
        "cutlass.cute.BitCode": _FOREIGN_CODE,
        "cutlass.cute.LinkLibraries": _FOREIGN_CODE,
        "cutlass.base_dsl.ffi": _FOREIGN_CODE,
        "cutlass.base_dsl.compiler": _HOOK,
        "cutlass.base_dsl.dsl": _HOOK,
        "cutlass.base_dsl.env_manager": _HOOK,
        "cutlass.base_dsl.cache_helpers": _HOOK,
        "cutlass.base_dsl.export": _LOADER,
        "cutlass.base_dsl.jit_executor": _LOADER,
        "cutlass.base_dsl.runtime": _LOADER,
        "cutlass.cutlass_dsl.cuda_jit_executor": _LOADER,
        "cutlass.cutlass_dsl.cuda_library_adapter": _LOADER,
        "cutlass.cutlass_dsl.tvm_ffi_provider": _LOADER,
        "cutlass.cute.export": _LOADER,
        "cutlass.cute.runtime.load_module": _LOADER,
        "cutlass.runtime.load_module": _LOADER,
        "cutlass.cute.testing": "it captures CUDA graphs and allocates inputs of its own",
        "cutlass.jax": "JAX is not part of the task",
        **{f"cuda.bindings.driver.{name}": _LOADER for name in _DRIVER_LOADERS},
        **{f"cuda.bindings.driver.{name}": _GRAPH for name in _DRIVER_GRAPHS},
        "tvm_ffi.cpp": "it compiles C++ and CUDA source",
        "tvm_ffi.load_module": _LOADER,
        "tvm_ffi.system_lib": _LOADER,
        "tvm_ffi.Module": _LOADER,
        "tvm_ffi.module": _LOADER,
        "tvm_ffi.core": _LOADER,
        "tvm_ffi.get_global_func": "it reaches every function of the runtime by name",
        "tvm_ffi.registry": _HOOK,
        "tvm_ffi.register_global_func": _HOOK,
        "tvm_ffi.init_ffi_api": _HOOK,
    }
    devices = frozenset({"cuda"})
    kernel_name_patterns = (r"^kernel_cutlass_",)
    documented = ("cutlass.cute", "cutlass", "tvm_ffi")
    guide = guide_of("cute")

    def environment(self, device: str) -> dict[str, str]:
        # Without a GPU there is nothing to take the architecture from, and kernels can only be compiled.
        return {} if device == "cuda" else {"CUTE_DSL_ARCH": "sm_100a"}

    def compiling_for(self, arch: str) -> dict[str, str]:
        return {"CUTE_DSL_ARCH": arch}

    def intercept(self, interceptor: Interceptor) -> None:
        from cutlass.base_dsl.dsl import BaseDSL
        from cutlass.base_dsl.jit_executor import JitCompiledFunction, JitExecutor
        from cutlass.cute import runtime

        from metakernelbench.dsls.launches import Passing, observed

        observe = partial(observed, interceptor)
        _remember_sources(runtime._Tensor)
        BaseDSL._func = _observed_jit(BaseDSL._func, observe, Passing)
        for owner in (JitCompiledFunction, JitExecutor, *_tvm_ffi_functions()):
            owner.__call__ = _observed_call(owner.__call__, observe, Passing)

    def versions(self) -> dict[str, str]:
        try:
            return {name: version(name) for name in _PACKAGES}
        except PackageNotFoundError:
            return {}


def _tvm_ffi_functions() -> tuple[Any, ...]:
    """What `cute.compile` returns with `--enable-tvm-ffi`; none where that package is missing."""
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:
        return ()
    return (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs)


def _remember_sources(cute_tensor: Any) -> None:
    """Make every cute tensor remember what `from_dlpack` made it of."""
    original = cute_tensor.__init__

    def init(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        original(self, tensor, *args, **kwargs)
        self._source = tensor

    cute_tensor.__init__ = init


def _observed_jit(func: Callable[..., Any], observe: Observe, passing: Any) -> Callable[..., Any]:
    """`host_function(...)` and what `cute.compile(host_function, ...)` does: both end here."""

    def observed_func(dsl: Any, host_function: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = f"{host_function.__code__.co_filename}:{host_function.__name__}"
        if kwargs.get("compile_only"):
            compiled = func(dsl, host_function, *args, **kwargs)
            compiled._origin = kernel
            return compiled
        if _tracing():
            return func(dsl, host_function, *args, **kwargs)
        if passing.on:
            return passing.counted(func, dsl, host_function, *args, **kwargs)
        values = [*args, *kwargs.values()]
        return observe(kernel, values, lambda: func(dsl, host_function, *args, **kwargs), _resolve)

    return observed_func


def _tracing() -> bool:
    """Whether this is a call inside a function that is being compiled, which launches nothing."""
    from cutlass._mlir import ir

    return ir.Context.current is not None and ir.InsertionPoint.current is not None


def _observed_call(call: Callable[..., Any], observe: Observe, passing: Any) -> Callable[..., Any]:
    """Calls of what `cute.compile` returned."""

    def observed_call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        if passing.on:
            return passing.counted(call, compiled, *args, **kwargs)
        kernel: str = getattr(compiled, "_origin", getattr(compiled, "function_name", "unknown"))
        values = [*args, *kwargs.values()]
        return observe(kernel, values, lambda: call(compiled, *args, **kwargs), _resolve)

    return observed_call


def _resolve(argument: Any) -> Any:
    """The tensor behind a cute tensor, the address behind a cute pointer."""
    source = getattr(argument, "_source", None)
    return source if source is not None else getattr(argument, "_pointer", None)
