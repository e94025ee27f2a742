"""TIRx, the tensor program language of Apache TVM: LLVM on a CPU, CUDA on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
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
_BY_OPERATION = "an operation of any kind is made by its name; use the functions of `tvm.script.tirx`"
_BUILDER = "programs are written with `tvm.script.tirx`, not put together"

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
    "call_intrin": _BY_OPERATION,
    "Call": _BY_OPERATION,
    "register_script_namespace": _HOOK,
    "nvshmem": "one GPU is all there is",
}
_SCRIPT_MODULES = ("tvm.script.tirx", "tvm.tirx", "tvm.tirx.op", "tvm.tirx.script", "tvm.tirx.script.builder")

_FOREIGN_OPERATIONS = frozenset(
    f"tirx.{name}"
    for name in (
        "call_extern",
        "call_pure_extern",
        "tvm_call_packed",
        "tvm_call_packed_lowered",
        "tvm_call_cpacked",
        "tvm_call_cpacked_lowered",
        "tvm_call_trace_packed",
        "tvm_call_trace_packed_lowered",
        "anylist_setitem_call_packed",
        "anylist_setitem_call_cpacked",
    )
)
"""What a program calls that is not TIRx: any function of the process, of the C library or of the Python interpreter."""
_FOREIGN_PRAGMA = "pragma_import_"
"""Begins the name of an attribute that brings C or LLVM source along."""

_OWN_PASSES = "tirx.add_lower_pass"

type _Origins = dict[int, tuple[str, Any]]
"""Handle of a compiled module → the file that had it compiled, and the module, which keeps the handle from reuse."""


class TirxDsl(Dsl):
    name = "tirx"
    title = "TIRx"
    requirements = ("apache-tvm==0.25.0.post1", "apache-tvm-ffi==0.1.12")
    imports = frozenset({"tvm", "tvm_ffi"})
    forbidden: ClassVar[Mapping[str, str]] = {
        **{f"{module}.{name}": why for module in _SCRIPT_MODULES for name, why in _RAW_INTRINSICS.items()},
        "tvm.tirx.op.Op": _BY_OPERATION,
        "tvm.tirx.expr.Call": _BY_OPERATION,
        "tvm.tirx.TilePrimitiveCall": _BY_OPERATION,
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
        "tvm.ir.register_intrin_lowering": _HOOK,
        "tvm.ir.register_op_attr": _HOOK,
        "tvm.ir.Op": _BY_OPERATION,
        "tvm.ir.op": _BY_OPERATION,
        "tvm.ir.EnvFunc": _BY_NAME,
        "tvm.ir.make_node": _BUILDER,
        "tvm.ir.load_json": _BUILDER,
        "tvm.ir.json_compact": _BUILDER,
        "tvm.script.parser": _BUILDER,
        "tvm.script.ir_builder": _BUILDER,
        "tvm.script.register_dialect": _HOOK,
        "tvm.register_object": _HOOK,
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
    """`tvm.compile`, noting which file asked for it. Raises `ValueError` for a program that is not TIRx all through,
    however it was put together."""

    def remembering_compile(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            _refuse_foreign_code(given)
        _refuse_own_passes(args, kwargs)
        compiled = compile_(*args, **kwargs)
        origins[compiled.mod.__chandle__()] = sys._getframe(1).f_code.co_filename, compiled
        return compiled

    return remembering_compile


def _refuse_foreign_code(program: Any) -> None:
    """Raise `ValueError` where a function calls what is not TIRx, or brings source of another language along."""
    from tvm.ir import IRModule
    from tvm.tirx import AttrStmt, Call, PrimFunc
    from tvm.tirx.stmt_functor import post_order_visit

    def visit(node: Any) -> None:
        if isinstance(node, Call) and (name := getattr(node.op, "name", "")) in _FOREIGN_OPERATIONS:
            raise ValueError(f"`{name}` in a kernel: {_FOREIGN_CODE}")
        if isinstance(node, AttrStmt) and node.attr_key.startswith(_FOREIGN_PRAGMA):
            raise ValueError(f"`{node.attr_key}` in a kernel: {_RAW_CODE}")

    functions = program.functions.values() if isinstance(program, IRModule) else [program]
    for function in functions:
        if isinstance(function, PrimFunc):
            post_order_visit(function.body, visit)


def _refuse_own_passes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `ValueError` where a pass of the submission would rewrite its program after that was looked at."""
    from tvm.ir.transform import Pass, PassContext

    given = [*args, *kwargs.values()]
    if any(isinstance(x, Pass) or callable(x) for x in given):
        raise ValueError(f"a pass or pipeline that is an object: {_HOOK}; name one of the compiler's own")
    if _OWN_PASSES in PassContext.current().config:
        raise ValueError(f"`{_OWN_PASSES}`: {_HOOK}")


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
