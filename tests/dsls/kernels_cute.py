"""CuTe DSL host functions for the tests of its plugin. They launch no kernel, and so run without a GPU."""

import cutlass
from cutlass import cute


@cute.jit
def double(source: cute.Tensor, target: cute.Tensor):
    for i in range(cute.size(source)):
        target[i] = source[i] * cutlass.Float32(2)


@cute.jit
def fill_from(pointer: cute.Pointer, value: cutlass.Float32):
    target = cute.make_tensor(pointer, cute.make_layout(8))
    for i in range(8):
        target[i] = value


@cute.jit
def double_twice(source: cute.Tensor, target: cute.Tensor):
    double(source, target)
    double(target, target)
