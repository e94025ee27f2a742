"""What kernel.py may use: the tables of the static rules. `rules.py` applies them."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED_MODULES = _words(
    "__future__ abc array bisect cmath collections contextlib copy dataclasses decimal enum fractions functools heapq "
    "itertools logging math numbers operator random re statistics string struct textwrap time torch types typing "
    "typing_extensions warnings weakref"
)
"""What every submission may import; the DSL's own modules come on top."""

STANDARD_LIBRARY = ALLOWED_MODULES - {"torch", "__future__"}
"""Of those, the modules of which only public names may be used."""

MODULES_ELSEWHERE: dict[str, frozenset[str]] = {
    **{module: ALLOWED_MODULES - {module, "abc"} for module in STANDARD_LIBRARY},
    "torch": ALLOWED_MODULES - _words("abc copy random types"),
}
"""For each module, what is another module where it is found in it. Left out is what is something of its own there, as
`time.time` is."""

STREAM_HANDLES = frozenset({"cuda.bindings.driver.CUstream", "cuda.bindings.runtime.cudaStream_t"})
"""All that may be used of the CUDA bindings: the types in which a stream is handed to a DSL."""

OTHER_COMPILERS = _words(
    "triton cutlass tvm tvm_ffi tilelang cupy numba pycuda taichi jax mlx nvmath pallas warp cuda thunderkittens "
    "hidet halide pybind11 cffi nanobind"
)
"""Modules that are kernel languages, compilers or ways to native code."""

_EVALUATING = _words("get_type_hints get_annotations evaluate_forward_ref ForwardRef")
"""What turns text into annotations by running it."""

FORBIDDEN_NAMES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "torch.compile",
            "torch._dynamo",
            "torch._inductor",
            "torch.jit",
            "torch.export",
            "torch.onnx",
            "torch.fx",
            "torch.utils.cpp_extension",
            "torch.utils._triton",
            "torch.cuda.jiterator",
            "torch.cuda._compile_kernel",
            "torch.nn.attention.flex_attention",
        ),
        ("other-compiler", "compiles kernels that are not written in the DSL"),
    ),
    **dict.fromkeys(
        ("torch.cuda.CUDAGraph", "torch.cuda.graph", "torch.cuda.graphs", "torch.cuda.make_graphed_callables"),
        ("cuda-graph", "captures a CUDA graph"),
    ),
    **dict.fromkeys(("torch._native", "torch._vendor"), ("library-kernel", "holds kernels that are not yours")),
    **dict.fromkeys(
        ("torch.library", "torch.overrides", "torch.utils._python_dispatch", "torch.utils._device"),
        ("monkeypatch", "changes what torch's own operations do"),
    ),
    **dict.fromkeys(
        (
            "torch.load",
            "torch.save",
            "torch.hub",
            "torch.package",
            "torch.serialization",
            "torch.from_file",
            "torch.UntypedStorage.from_file",
            "torch.ops.load_library",
            "torch.classes",
        ),
        ("file-access", "reads or writes files"),
    ),
    **dict.fromkeys(
        (
            "torch.distributed",
            "torch.multiprocessing",
            "torch.profiler",
            "torch.autograd.profiler",
            "torch.cuda.cudart",
            "torch.cuda.memory.change_current_allocator",
            "torch.cuda.memory.CUDAPluggableAllocator",
            "torch.cuda.CUDAPluggableAllocator",
            "torch.utils.data",
            "types.CodeType",
            "types.FunctionType",
            "types.FrameType",
            "types.ModuleType",
            "types.LambdaType",
            "operator.attrgetter",
            "operator.methodcaller",
            "string.Formatter",
            "enum.global_enum",
        ),
        ("forbidden-attribute", "leads where a kernel has no need to go"),
    ),
    **dict.fromkeys(
        (
            *(f"{module}.{name}" for module in ("typing", "typing_extensions") for name in _EVALUATING),
            "functools.singledispatch",
            "functools.singledispatchmethod",
            "torch.utils.benchmark",
        ),
        ("dynamic-code", "runs what a string or an annotation holds"),
    ),
    "logging.currentframe": ("dunder-access", "reaches the frames of the interpreter"),
    "logging.FileHandler": ("file-access", "writes files"),
    "logging.handlers": ("file-access", "writes files and opens connections"),
    "logging.config": ("dynamic-import", "imports and runs what a configuration names"),
}
"""Dotted name → code and why. What lies below a name is meant as well."""

SMUGGLED_MODULES = _words(
    "sys os builtins bltns ctypes subprocess socket importlib inspect gc threading multiprocessing _thread pickle "
    "shutil tempfile traceback"
)
"""Modules that others import for themselves, and that a kernel could reach through them; an underscore in front is no
matter."""

PRIVATE = re.compile(r"torch\.(?!ops\.)(?:\w+\.)*_[^_]")
ALLOWED_PRIVATE = re.compile(
    r"torch\._(check\w*|scaled_mm|scaled_grouped_mm|grouped_mm|int_mm|foreach_\w+|assert|weight_\w+)$"
    r"|torch\.cuda\._sleep$"  # holds a GPU up, which is nobody's loss but the submission's
)
"""Operations of torch that are public in all but name; its other names with an underscore are internals."""

ASSIGNABLE = ("torch.backends",)
"""Settings that a submission may assign to; nothing else of a module may be assigned."""

TELLTALE_ATTRIBUTES = {
    "load_inline": "other-compiler",
    "cpp_extension": "other-compiler",
    "_inductor": "other-compiler",
    "_dynamo": "other-compiler",
    "jiterator": "other-compiler",
    "CUDAGraph": "cuda-graph",
    "make_graphed_callables": "cuda-graph",
    "load_library": "file-access",
    "cudart": "forbidden-attribute",
    "_C": "forbidden-attribute",
    "f_back": "dunder-access",
    "f_globals": "dunder-access",
    "f_locals": "dunder-access",
    "f_builtins": "dunder-access",
    "gi_frame": "dunder-access",
    "cr_frame": "dunder-access",
    "tb_frame": "dunder-access",
}
"""Attributes that mean the same whatever they are read from."""

OFTEN_OWN_ATTRIBUTES = frozenset({"_C"})
"""Of those, what an honest class calls something of its own (the C of a product): no matter on `self`."""

HARMLESS_DUNDERS = _words(
    "__init__ __call__ __name__ __qualname__ __doc__ __version__ __post_init__ __class__ __len__ __getitem__ "
    "__setitem__ __enter__ __exit__ __new__ __iter__ __next__ __eq__ __hash__ __repr__ __str__ __file__ __main__ "
    "__setattr__ __all__ __slots__ __author__ __debug__ __contains__ __radd__ __rmul__ __rsub__ __dlpack__ "
    "__dlpack_device__ __cuda_array_interface__ __match_args__ __add__ __mul__ __sub__ __matmul__"
)
"""Double-underscore names that may be read. Any of them may be defined in a class, but for `HOOK_METHODS`."""

HOOK_METHODS = frozenset({"__torch_function__", "__torch_dispatch__", "__del__", "__init_subclass__", "__set_name__"})
"""Methods through which code runs at times that are not a call of `solve`."""

DANGEROUS_BUILTINS = {
    "exec": "dynamic-code",
    "eval": "dynamic-code",
    "compile": "dynamic-code",
    "__import__": "dynamic-import",
    "globals": "dunder-access",
    "locals": "dunder-access",
    "vars": "dunder-access",
    "breakpoint": "dynamic-code",
    "input": "file-access",
    "open": "file-access",
    "delattr": "monkeypatch",
}
"""Built-in functions that a kernel has no need of, unless kernel.py defines the name itself."""

FOREIGN_SOURCE = re.compile(
    r"""__global__\s+[\w:<>,*&\s]+\( | extern\s+"C" | \#include\s*[<"] | \.visible\s+\.entry | ^\s*\.version\s+\d
    | asm\s+volatile | @triton\.jit | ^\s*define\s[^@\n]*@[\w.]+\( | ^\s*\.target\s+sm_
    | __device__\s+[\w:<>,*&\s]+\(""",
    re.VERBOSE | re.MULTILINE,
)
"""Source text of another kernel language."""

BINARY_TEXT = re.compile(r"[A-Za-z0-9+/=\\]{4000,}")
"""A long run without a space: an encoded binary."""
