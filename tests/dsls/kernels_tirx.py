"""A TIRx kernel for the tests of its plugin; it must live in a file, since TIRx reads a kernel's source from there."""

import tvm
from tvm.script import tirx as T  # noqa: N812  the name everyone gives it


@T.prim_func
def double(source: T.handle, target: T.handle):
    n = T.int32()
    A = T.match_buffer(source, (n,), "float32")
    B = T.match_buffer(target, (n,), "float32")
    for i in T.serial(n):
        B[i] = A[i] * T.float32(2)


executable = tvm.compile(tvm.IRModule({"main": double}), target="llvm")
