"""Triton kernels for the tests of its plugin."""

import triton
import triton.language as tl


@triton.jit
def double(source, target, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(target + offsets, 2 * tl.load(source + offsets, mask=mask), mask=mask)
