"""p53, gated projections from block-scaled FP8, in CuTe DSL. The products stay with eager PyTorch, in bfloat16.

One kernel turns codes and scales into the bfloat16 values that they stand for, gate and up weights into one matrix, so
that one product serves both; another gates the one half of the product by the other. A thread has 16 codes (16 bytes),
or 8 values of either half.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

BLOCK = 128
CODES = 16  # in 16 bytes
VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256


@cute.kernel
def dequantise_kernel(codes: cute.Tensor, scales: cute.Tensor, target: cute.Tensor, height: cutlass.Constexpr[int]):
    """A thread block has a row; `height` rows share a scale."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    scale = scales[row // height, thread * CODES // BLOCK]
    raw = cute.make_rmem_tensor(CODES, cutlass.Uint8)
    values = cute.make_rmem_tensor(CODES, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(codes[row, None], (CODES,), (thread,)), raw)
    elements = cute.recast_tensor(raw, cutlass.Float8E4M3FN).load().to(cutlass.Float32)
    values.store((elements * scale).to(cutlass.BFloat16))
    cute.autovec_copy(values, cute.local_tile(target[row, None], (CODES,), (thread,)))


@cute.kernel
def gate_kernel(both: cute.Tensor, out: cute.Tensor):
    """A row of `both` holds the gate's part, then the other."""
    thread, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    half = cutlass.const_expr(out.shape[1] // VECTOR)
    place = part * THREADS + thread
    if place < half:
        gate = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        up = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        cute.autovec_copy(cute.local_tile(both[row, None], (VECTOR,), (place,)), gate)
        cute.autovec_copy(cute.local_tile(both[row, None], (VECTOR,), (half + place,)), up)
        g = gate.load().to(cutlass.Float32)
        gated = g / (1.0 + cute.math.exp(-g)) * up.load().to(cutlass.Float32)
        gate.store(gated.to(cutlass.BFloat16))
        cute.autovec_copy(gate, cute.local_tile(out[row, None], (VECTOR,), (place,)))


@cute.jit
def dequantise(
    x: cute.Tensor,
    x_scales: cute.Tensor,
    x_values: cute.Tensor,
    gate: cute.Tensor,
    gate_scales: cute.Tensor,
    gate_values: cute.Tensor,
    up: cute.Tensor,
    up_scales: cute.Tensor,
    up_values: cute.Tensor,
    stream,
):
    block = cutlass.const_expr((x.shape[1] // CODES, 1, 1))
    dequantise_kernel(x, x_scales, x_values, 1).launch(grid=(x.shape[0], 1, 1), block=block, stream=stream)
    dequantise_kernel(gate, gate_scales, gate_values, BLOCK).launch(
        grid=(gate.shape[0], 1, 1), block=block, stream=stream
    )
    dequantise_kernel(up, up_scales, up_values, BLOCK).launch(grid=(up.shape[0], 1, 1), block=block, stream=stream)


@cute.jit
def gate_halves(both: cute.Tensor, out: cute.Tensor, stream):
    parts = cutlass.const_expr((out.shape[1] // VECTOR + THREADS - 1) // THREADS)
    gate_kernel(both, out).launch(grid=(parts, out.shape[0], 1), block=(THREADS, 1, 1), stream=stream)


def compile_for(arch: str, hidden: int = 3584, intermediate: int = 18944):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)

    def fake(dtype, *shape: int, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def operand(rows, scale_rows):
        return (
            fake(cutlass.Uint8, rows, hidden),
            fake(cutlass.Float32, scale_rows, hidden // BLOCK, align=4),
            fake(cutlass.BFloat16, rows, hidden),
        )

    tokens = cute.sym_int()
    weights = [operand(intermediate, intermediate // BLOCK) for _ in range(2)]
    first = cute.compile(dequantise, *operand(tokens, tokens), *weights[0], *weights[1], stream, options=options)
    tokens = cute.sym_int()
    both, out = fake(cutlass.BFloat16, tokens, 2 * intermediate), fake(cutlass.BFloat16, tokens, intermediate)
    return first, cute.compile(gate_halves, both, out, stream, options=options)


@cache
def kernels_for(device: torch.device, hidden: int, intermediate: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", hidden, intermediate)


def solve(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    scale_gate: torch.Tensor,
    up_proj_weight: torch.Tensor,
    scale_up: torch.Tensor,
) -> torch.Tensor:
    intermediate, hidden = gate_proj_weight.shape
    dequantise_all, gate_product = kernels_for(x.device, hidden, intermediate)
    tokens = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    weights = torch.empty(2, intermediate, hidden, dtype=torch.bfloat16, device=x.device)
    dequantise_all(
        *(x.view(torch.uint8), scale_x, tokens),
        *(gate_proj_weight.view(torch.uint8), scale_gate, weights[0]),
        *(up_proj_weight.view(torch.uint8), scale_up, weights[1]),
    )
    both = torch.mm(tokens, weights.view(-1, hidden).t())
    out = torch.empty(len(x), intermediate, dtype=torch.bfloat16, device=x.device)
    gate_product(both, out)
    return out
