"""p32, SiLU-gated MLP, in CuTe DSL. float32 products on the tensor cores, which PyTorch runs in float16.

A kernel splits each factor in two float16 numbers of 11 bits each, high and 2048 · low. Of their products, high · high
is summed over short stretches of the long axis and added up in float32 by a kernel, since tensor cores round their sums
towards zero; high · low and low · high, 2048 times smaller, are one product over both axes in a row. What is left out
is as small as float32's rounding. The sum goes together with what follows it: silu(gate) · up and the next split,
for the first product. Values must be smaller than 65504, the largest of float16. A thread has 8 neighbours (two or
four times 16 bytes) or 4 of the output.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 256
VECTOR = 8
GATE_UP_STRETCH, DOWN_STRETCH = 256, 512  # the longest sums left to the tensor cores
SCALE = 2048


@cute.jit
def store_split(values: cute.Tensor, row: cute.Tensor, vector: cutlass.Int32, high: cutlass.Constexpr[int]):
    """The parts of 8 values into a row, one after the other; that of number `high` is the high one."""
    vectors = cutlass.const_expr(row.shape[0] // 2 // VECTOR)
    highs = cute.make_rmem_tensor(VECTOR, cutlass.Float16)
    lows = cute.make_rmem_tensor(VECTOR, cutlass.Float16)
    highs.store(values.load().to(cutlass.Float16))
    lows.store(((values.load() - highs.load().to(cutlass.Float32)) * float(SCALE)).to(cutlass.Float16))
    cute.autovec_copy(highs, cute.local_tile(row, (VECTOR,), (vector + high * vectors,)))
    cute.autovec_copy(lows, cute.local_tile(row, (VECTOR,), (vector + (1 - high) * vectors,)))


@cute.jit
def load_sum(
    products: cute.Tensor,
    correction: cute.Tensor,
    row: cutlass.Int32,
    vector: cutlass.Int32,
    total: cute.Tensor,
    parts: cutlass.Constexpr[int],
):
    """One vector of the whole product."""
    size = cutlass.const_expr(cute.size(total))
    x = cute.make_rmem_tensor((size, parts), cutlass.Float32)
    for part in cutlass.range_constexpr(parts):
        source = products[part * correction.shape[0] + row, None]
        cute.autovec_copy(cute.local_tile(source, (size,), (vector,)), x[None, part])
    cute.autovec_copy(cute.local_tile(correction[row, None], (size,), (vector,)), total)
    total.store(total.load() * (1.0 / SCALE))
    for part in cutlass.range_constexpr(parts):
        total.store(total.load() + x[None, part].load())


@cute.kernel
def split_kernel(source: cute.Tensor, target: cute.Tensor, high: cutlass.Constexpr[int]):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    vectors = cutlass.const_expr(source.shape[1] // VECTOR)
    row, vector = (block * THREADS + thread) // vectors, (block * THREADS + thread) % vectors
    if row < source.shape[0]:
        x = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        cute.autovec_copy(cute.local_tile(source[row, None], (VECTOR,), (vector,)), x)
        store_split(x, target[row, None], vector, high)


@cute.kernel
def activate_kernel(products: cute.Tensor, correction: cute.Tensor, target: cute.Tensor, parts: cutlass.Constexpr[int]):
    """Sum, gating and split; the high part comes first."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    vectors = cutlass.const_expr(correction.shape[1] // 2 // VECTOR)
    row, vector = (block * THREADS + thread) // vectors, (block * THREADS + thread) % vectors
    if row < correction.shape[0]:
        gate = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        up = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        load_sum(products, correction, row, vector, gate, parts)
        load_sum(products, correction, row, vector + vectors, up, parts)
        up.store(up.load() * gate.load())
        gate.store(1.0 + cute.math.exp(-gate.load(), fastmath=True))
        for e in cutlass.range_constexpr(VECTOR):
            up[e] = up[e] * cute.arch.rcp_approx(gate[e])
        store_split(up, target[row, None], vector, 0)


@cute.kernel
def finish_kernel(products: cute.Tensor, correction: cute.Tensor, out: cute.Tensor, parts: cutlass.Constexpr[int]):
    """Sum; vectors of 4."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    size = cutlass.const_expr(VECTOR // 2)
    vectors = cutlass.const_expr(out.shape[1] // size)
    row, vector = (block * THREADS + thread) // vectors, (block * THREADS + thread) % vectors
    if row < out.shape[0]:
        x = cute.make_rmem_tensor(size, cutlass.Float32)
        load_sum(products, correction, row, vector, x, parts)
        cute.autovec_copy(x, cute.local_tile(out[row, None], (size,), (vector,)))


@cute.jit
def split(source: cute.Tensor, target: cute.Tensor, stream, high: cutlass.Constexpr[int]):
    blocks = (source.shape[0] * (source.shape[1] // VECTOR) + THREADS - 1) // THREADS
    split_kernel(source, target, high).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def activate(
    products: cute.Tensor, correction: cute.Tensor, target: cute.Tensor, stream, parts: cutlass.Constexpr[int]
):
    blocks = (correction.shape[0] * (correction.shape[1] // 2 // VECTOR) + THREADS - 1) // THREADS
    activate_kernel(products, correction, target, parts).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def finish(products: cute.Tensor, correction: cute.Tensor, out: cute.Tensor, stream, parts: cutlass.Constexpr[int]):
    blocks = (out.shape[0] * (out.shape[1] // (VECTOR // 2)) + THREADS - 1) // THREADS
    finish_kernel(products, correction, out, parts).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


def parts_for(width: int, stretch: int) -> int:
    """The smallest number of even stretches that are short enough."""
    return min(parts for parts in range(1, width + 1) if width % parts == 0 and width // parts <= stretch)


def compile_for(arch: str, width: int = 1024, inner: int = 4096):
    """The kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0, "vectors must fill a row"
    assert inner % VECTOR == 0, "vectors must fill a row"
    rows, many = cute.sym_int(), cute.sym_int()
    single, half = cutlass.Float32, cutlass.Float16

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    def compiled(function, *arguments):
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        *tensors, constant = arguments
        return cute.compile(function, *tensors, stream, constant, options=f"--enable-tvm-ffi --gpu-arch {arch}")

    return (
        compiled(split, fake(single, rows, width), fake(half, rows, 2 * width), 0),
        compiled(split, fake(single, rows, width), fake(half, rows, 2 * width), 1),
        compiled(split, fake(single, rows, inner), fake(half, rows, 2 * inner), 1),
        compiled(
            activate,
            fake(single, many, 2 * inner),
            fake(single, rows, 2 * inner),
            fake(half, rows, 2 * inner),
            parts_for(width, GATE_UP_STRETCH),
        ),
        compiled(
            finish,
            fake(single, many, width),
            fake(single, rows, width),
            fake(single, rows, width),
            parts_for(inner, DOWN_STRETCH),
        ),
    )


@cache
def kernels_for(device: torch.device, width: int, inner: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width, inner)


def split_by(kernel, source: torch.Tensor) -> torch.Tensor:
    rows, width = source.shape
    target = torch.empty(rows, 2 * width, dtype=torch.float16, device=source.device)
    kernel(source, target)
    return target


def products(a: torch.Tensor, b: torch.Tensor, stretch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the high parts, which are first in `a` and last in `b`, by stretch, and the sum of the mixed ones."""
    width = a.shape[1] // 2
    parts = parts_for(width, stretch)
    high_a = a[:, :width].unflatten(1, (parts, -1)).transpose(0, 1)
    high_b = b[:, width:].unflatten(1, (parts, -1)).permute(1, 2, 0)
    by_stretch = torch.bmm(high_a, high_b, out_dtype=torch.float32)
    return by_stretch.flatten(0, 1), torch.mm(a, b.T, out_dtype=torch.float32)


def solve(hidden_states: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor) -> torch.Tensor:
    width, inner = down_weight.shape
    split_hidden, split_gate_up, split_down, activating, finishing = kernels_for(hidden_states.device, width, inner)
    x = split_by(split_hidden, hidden_states.view(-1, width))
    summands = products(x, split_by(split_gate_up, gate_up_weight), GATE_UP_STRETCH)
    activated = torch.empty(x.shape[0], 2 * inner, dtype=torch.float16, device=x.device)
    activating(*summands, activated)
    out = torch.empty_like(hidden_states)
    finishing(*products(activated, split_by(split_down, down_weight), DOWN_STRETCH), out.view(-1, width))
    return out
