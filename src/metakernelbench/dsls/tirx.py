"""TIRx, the tensor program language of Apache TVM: LLVM on a CPU, CUDA on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from metakernelbench.dsls.dsl import Dsl, Interceptor, Observe
from metakernelbench.dsls.guides import guide_of

_PACKAGES = ("apache-tvm", "apache-tvm-ffi")
_RAW_CODE = "source text of another language is not TIRx"
_FOREIGN_CODE = "it calls code that was not written in TIRx"
_LOADER = "it loads or launches binaries that were not compiled from this file"
_HOOK = "it changes how kernels are compiled or launched"
_BY_NAME = "it reaches every function of the runtime by name, loaders and compilers included"
_LIBRARY = "it holds or generates kernels that are not yours"

# Intrinsics that take source, or call what is not TIRx, in every module under which they can be found.
_RAW_INTRINSICS = {
    "cuda.func_call": _RAW_CODE,
    "call_kernel": _RAW_CODE,
    "call_extern": _FOREIGN_CODE,
    "call_pure_extern": _FOREIGN_CODE,
    "call_packed": _FOREIGN_CODE,
    "call_packed_lowered": _FOREIGN_CODE,
    "call_cpacked": _FOREIGN_CODE,
    "call_cpacked_lowered": _FOREIGN_CODE,
    "tvm_call_packed": _FOREIGN_CODE,
    "tvm_call_packed_lowered": _FOREIGN_CODE,
    "tvm_call_cpacked": _FOREIGN_CODE,
    "tvm_call_cpacked_lowered": _FOREIGN_CODE,
    "anylist_setitem_call_packed": _FOREIGN_CODE,
    "anylist_setitem_call_cpacked": _FOREIGN_CODE,
    "register_script_namespace": _HOOK,
    "nvshmem": "one GPU is all there is",
}
_SCRIPT_MODULES = ("tvm.script.tirx", "tvm.tirx", "tvm.tirx.op", "tvm.tirx.script", "tvm.tirx.script.builder")

type _Origins = dict[int, tuple[str, Any]]
"""Handle of a compiled module → the file that had it compiled, and the module, which keeps the handle from reuse."""


class TirxDsl(Dsl):
    name = "tirx"
    title = "TIRx"
    requirements = ("apache-tvm==0.25.0.post1", "apache-tvm-ffi==0.1.12")
    imports = frozenset({"tvm", "tvm_ffi"})
    forbidden: ClassVar[Mapping[str, str]] = {
        **{f"{module}.{name}": why for module in _SCRIPT_MODULES for name, why in _RAW_INTRINSICS.items()},
        "tvm.tirx.build": "compile with `tvm.compile`, which the grader observes",
        "tvm.tirx.bench": _HOOK,
        "tvm.tirx.script.builder.external_kernel": _RAW_CODE,
        "tvm.tirx.script.builder.triton": "Triton is another DSL",
        "tvm.backend": "the intrinsics of a back end are reached through `tvm.script.tirx`",
        "tvm.contrib": _LIBRARY,
        "tvm.topi": _LIBRARY,
        "tvm.relax": _LIBRARY,
        "tvm.s_tir": _LIBRARY,
        "tvm.te": _LIBRARY,
        "tvm.support": "it starts compilers and writes files",
        "tvm.rpc": "one machine is all there is",
        "tvm.driver": "compile with `tvm.compile`, which the grader observes",
        "tvm.build": "compile with `tvm.compile`, which the grader observes",
        "tvm.register_global_func": _HOOK,
        "tvm.get_global_func": _BY_NAME,
        "tvm.ir.instrument": _HOOK,
        "tvm.instrument": _HOOK,
        "tvm.runtime.load_module": _LOADER,
        "tvm.runtime.load_static_library": _LOADER,
        "tvm.runtime.module": _LOADER,
        "tvm.runtime.executable": _LOADER,
        "tvm.runtime.system_lib": _LOADER,
        "tvm.runtime.disco": "one process is all there is",
        "tvm.runtime.vm": _LIBRARY,
        "tvm.tirx.register_tir_pipeline": _HOOK,
        "tvm.tirx.compilation_pipeline.register_tir_pipeline": _HOOK,
        "tvm_ffi.cpp": "it compiles C++ and CUDA source",
        "tvm_ffi.load_module": _LOADER,
        "tvm_ffi.system_lib": _LOADER,
        "tvm_ffi.module": _LOADER,
        "tvm_ffi.core": _LOADER,
        "tvm_ffi.get_global_func": _BY_NAME,
        "tvm_ffi.registry": _BY_NAME,
        "tvm_ffi.register_global_func": _HOOK,
        "tvm_ffi.init_ffi_api": _BY_NAME,
    }
    devices = frozenset({"cpu", "cuda"})
    kernel_name_patterns = (r"_kernel$", r"_kernel_\d+$")
    documented = ("tvm.script.tirx", "tvm", "tvm_ffi")
    guide = guide_of("tirx")

    def environment(self, device: str) -> dict[str, str]:
        # Threads of TVM's pool that wait for work must not spin while the other side is being timed.
        return {"TVM_THREAD_POOL_SPIN_COUNT": "0"}

    def compiling_for(self, arch: str) -> dict[str, str]:
        return {}  # kernel.py names the target itself

    def intercept(self, interceptor: Interceptor) -> None:
        import tvm
        import tvm_ffi

        from metakernelbench.dsls.launches import Passing, observed

        observe = partial(observed, interceptor)
        origins: _Origins = {}
        tvm.compile = tvm.driver.compile = _remembering(tvm.compile, origins)
        tvm_ffi.Module.get_function = _observed_lookup(tvm_ffi.Module.get_function, origins, observe, Passing)

    def versions(self) -> dict[str, str]:
        try:
            return {name: version(name) for name in _PACKAGES}
        except PackageNotFoundError:
            return {}


def _remembering(compile_: Callable[..., Any], origins: _Origins) -> Callable[..., Any]:
    """`tvm.compile`, noting which file asked for it."""

    def remembering_compile(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_(*args, **kwargs)
        origins[compiled.mod.__chandle__()] = sys._getframe(1).f_code.co_filename, compiled
        return compiled

    return remembering_compile


def _observed_lookup(
    get_function: Callable[..., Any], origins: _Origins, observe: Observe, passing: Any
) -> Callable[..., Any]:
    """`exe(...)`, `exe["main"]`, `exe.mod["main"]`, `module.main` and the like: all of them look a function up here."""
    from tvm_ffi import Function

    call = Function.__call__

    class ObservedFunction(Function):  # type: ignore[misc]
        """A compiled function that hands its calls to the interceptor. It stays a function for the runtime."""

        def __call__(self, *args: Any) -> Any:
            if passing.on:
                passing.launches += 1
                return call(self, *args)
            return observe(self.kernel, args, lambda: Function.__call__(self, *args))

    def observed_get_function(module: Any, name: str, query_imports: bool = False) -> Any:
        origin = origins.get(module.__chandle__())
        function = get_function(module, name, query_imports)
        if origin is None:  # the compiler's own, no launch
            return function
        found = ObservedFunction.__new__(ObservedFunction)
        found.__move_handle_from__(function)
        found.kernel = f"{origin[0]}:{name}"
        return found

    return observed_get_function
