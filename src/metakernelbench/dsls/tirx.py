"""TIRx, the tensor program language of Apache TVM: LLVM on a CPU, CUDA on a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from threading import get_ident
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

_FOREIGN_OPERATIONS = {
    "cuda.func_call": _RAW_CODE,
    "cuda_func_call": _RAW_CODE,
    **{name: why for name, why in _RAW_INTRINSICS.items() if "call_" in name and why == _FOREIGN_CODE},
    "tvm_call_trace_packed": _FOREIGN_CODE,
    "tvm_call_trace_packed_lowered": _FOREIGN_CODE,
    "call_spirv_pure_glsl450": _FOREIGN_CODE,
}
"""The same as operations of a program, which reach a GPU's code in whatever way they were put in."""

_OPERATIONS_OF_LLVM = (
    "abs acos asin assume atan atan2 bitreverse bswap canonicalize ceil copysign cos cosh ctlz ctpop cttz dbg exp "
    "exp10 exp2 expect fabs floor fma fmuladd fptosi fptoui frexp fshl fshr is ldexp lifetime llrint llround log log10 "
    "log2 lrint lround masked maximum maxnum memcpy memmove memset minimum minnum nearbyint pow powi prefetch rint "
    "round roundeven sadd sin sinh smax smin smul sqrt ssub stepvector tan tanh trunc uadd umax umin umul usub vector "
    "x86"
)
_MATHEMATICS = (
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp10 exp2 expm1 fabs floor fma "
    "fmax fmin fmod hypot ldexp lgamma log log10 log1p log2 nearbyint nextafter pow rint round sin sinh sqrt tan tanh "
    "tgamma trunc"
)
_REFERRED = re.compile(
    rf"llvm\.(?:{'|'.join(_OPERATIONS_OF_LLVM.split())})(?:\..*)?|(?:{'|'.join(_MATHEMATICS.split())})[fl]?"
    r"|mem(?:cpy|move|set)|__(?:trunc|extend|fix|float)\w+|TVMFFIErrorSetRaised\w*"
)
"""What code that was compiled for a processor may refer to: arithmetic, and how TVM reports a wrong argument."""
_OPERATION = re.compile(r'"tirx\.([\w.]+)"')
_LOOKED_UP = frozenset({"__tvm_set_device", "runtime.cuTensorMapEncodeTiled"})
"""What it may look up by name in TVM, beside the kernels that it launches."""
_CALLED_ADDRESS = re.compile(r"\b(?:call|invoke) [^@\"\n]*%([\w.]+)\(")
_ADDRESS_OF_TVM = re.compile(r"%([\w.]+) = load ptr, ptr @__TVM\w+")
_KERNEL = re.compile(r"\w+_kernel(?:_\d+)?")
"""The name that the compiler gives to the part of a function that runs on a GPU, under which it is launched."""
_DECLARED = re.compile(r"^declare [^@\n]*@(\"[^\"\n]*\"|[^\s\"(]+)\(", re.MULTILINE)
_DEFINED = re.compile(r"^define [^@\n]*@(\"[^\"\n]*\"|[^\s\"(]+)\(", re.MULTILINE)
_SOUGHT = re.compile(r"^@(?:\.tvm_func\.(\S+)|\"\.tvm_func\.([^\"]+)\") =", re.MULTILINE)

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
        "tvm.script.from_source": "a kernel stands in kernel.py itself, not in a string",
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
        _settle_conversions()
        tvm.compile = tvm.driver.compile = _remembering(tvm.compile, origins)
        tvm_ffi.Module.get_function = _observed_lookup(tvm_ffi.Module.get_function, origins, observe, Passing)

    def versions(self) -> dict[str, str]:
        try:
            return {name: version(name) for name in _PACKAGES}
        except PackageNotFoundError:
            return {}


def _remembering(compile_: Callable[..., Any], origins: _Origins) -> Callable[..., Any]:
    """`tvm.compile`, noting which file asked for it. Raises `ValueError` for a program that is not TIRx all through."""

    def remembering_compile(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_(*args, **kwargs)
        _refuse_foreign_code(compiled.mod, kwargs["mod"] if "mod" in kwargs else args[0])
        origins[compiled.mod.__chandle__()] = sys._getframe(1).f_code.co_filename, compiled
        return compiled

    return remembering_compile


def _refuse_foreign_code(module: Any, program: Any) -> None:
    """Raise `ValueError` where compiled code for a processor refers to what is not TIRx.

    What comes out of the compiler is looked at, since there are many ways to put a call in: operations made by name,
    shapes and strides, pragmas, passes, intrinsics that call addresses.
    """
    if module.kind != "llvm" or any(part.kind != "cuda" for part in module.imports):
        raise ValueError(f"a target other than llvm and cuda: {_FOREIGN_CODE}")
    code = module.inspect_source("ll")
    foreign = [name for name in _DECLARED.findall(code) if not _REFERRED.fullmatch(name)]
    functions = {str(name.name_hint) for name in getattr(program, "functions", ())}
    foreign += [
        name
        for name in _DEFINED.findall(code)
        if not name.startswith(("__tvm_", "__trunc", "__extend")) and name not in functions
    ]
    for plain, quoted in _SOUGHT.findall(code):
        name = plain or quoted
        if name not in _LOOKED_UP and not (module.imports and _KERNEL.fullmatch(name)):
            foreign.append(name)
    if foreign:
        raise ValueError(f"`{foreign[0]}` in a kernel: {_FOREIGN_CODE}")
    if "inttoptr" in code:
        raise ValueError(f"an address made of an integer: {_FOREIGN_CODE}")
    if " asm " in code or any(map(_calls_an_address, code.split("\ndefine "))):
        raise ValueError(f"a call of an address, or assembly: {_FOREIGN_CODE}")
    if module.imports:
        _refuse_foreign_operations(program)


def _refuse_foreign_operations(program: Any) -> None:
    """Raise `ValueError` where a program for a GPU holds an operation that brings source along or calls what is not
    TIRx. The GPU's code cannot tell: the compiler makes functions from source text of its own there. The program is
    read as the compiler would store it, which no class of the submission's can change."""
    import tvm

    for operation in set(_OPERATION.findall(tvm.ir.save_json(program))):
        if operation in _FOREIGN_OPERATIONS:
            raise ValueError(f"`{operation}` in a kernel: {_FOREIGN_OPERATIONS[operation]}")


def _calls_an_address(function: str) -> bool:
    """Whether a function calls anything by its address, other than what TVM puts there for it."""
    return not set(_CALLED_ADDRESS.findall(function)) <= set(_ADDRESS_OF_TVM.findall(function))


def _argument_types() -> frozenset[type]:
    """What a kernel may be launched with as it is: others could run code of their own while they are converted."""
    import torch
    import tvm_ffi

    return frozenset(
        {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}
        | {tvm_ffi.Tensor, tvm_ffi.Shape, tvm_ffi.Device, tvm_ffi.dtype}
    )


def _settle_conversions() -> None:
    """Let TVM decide now how it converts each type that is admitted, which it does once in a thread: later, an
    attribute put on `torch.Tensor` could make it run code of its own."""
    import torch
    import tvm_ffi

    tensor = torch.zeros(1)
    values: list[Any] = [tensor, torch.nn.Parameter(tensor, requires_grad=False), 1, 1.0, True, "", None]
    values += [tvm_ffi.from_dlpack(tensor), tvm_ffi.Shape((1,)), tvm_ffi.device("cpu", 0), tvm_ffi.dtype("float32")]
    for value in values:
        tvm_ffi.convert([value])
        tvm_ffi.Array([value])


def _plain(argument: Any) -> Any:
    """An argument of another type as one that can be admitted, converted before the launch. Raises `TypeError`."""
    import torch.utils.dlpack

    if isinstance(argument, int):
        return int.__int__(argument)
    if isinstance(argument, float):
        return float.__float__(argument)
    if hasattr(argument, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(argument)
    raise TypeError(f"a kernel is launched with tensors and numbers, not with {type(argument).__name__}")


def _observed_lookup(
    get_function: Callable[..., Any], origins: _Origins, observe: Observe, passing: Any
) -> Callable[..., Any]:
    """`exe(...)`, `exe["main"]`, `exe.mod["main"]`, `module.main` and the like: all of them look a function up here."""
    from tvm_ffi import Function

    # By identity: a class may say that it equals another.
    call, admitted = Function.__call__, frozenset(map(id, _argument_types()))
    thread = get_ident()

    class ObservedFunction(Function):  # type: ignore[misc]
        """A compiled function that hands its calls to the interceptor. It stays a function for the runtime."""

        def __call__(self, *args: Any) -> Any:
            if get_ident() != thread:
                raise RuntimeError("a kernel is launched by the thread that imported kernel.py")
            if not admitted.issuperset(map(id, map(type, args))):
                args = tuple(x if id(type(x)) in admitted else _plain(x) for x in args)
            if passing.on:
                return passing.counted(call, self, *args)
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
