"""p41, query, key and value projections with an RMSNorm of every query and key head, in CuTe DSL.

The three projections stay with eager PyTorch. One kernel then normalises the heads of queries and keys in place: 32
threads share a head, 4 values (16 bytes) each, and have several heads on their way.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear

VECTOR = 4  # float32 values in 16 bytes
THREADS = 256
DEPTH = 4  # heads in flight in each thread


@cute.jit
def norm_heads(heads: cute.Tensor, weight: cute.Tensor, eps: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    size = cutlass.const_expr(heads.shape[1])
    lanes = cutlass.const_expr(size // VECTOR)
    together = cutlass.const_expr(THREADS // lanes)  # heads that a thread block has at a time
    lane, first = thread % lanes, block * together * DEPTH + thread // lanes
    values = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.Float32)
    w = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    values.fill(0.0)
    cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (lane,)), w)
    for d in cutlass.range_constexpr(DEPTH):
        if first + d * together < heads.shape[0]:
            cute.autovec_copy(cute.local_tile(heads[first + d * together, None], (VECTOR,), (lane,)), values[None, d])
    for d in cutlass.range_constexpr(DEPTH):
        # Every thread takes part in the reduction, also those beyond the last head.
        x = values[None, d].load()
        total = (x * x).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        values[None, d].store(x * (1.0 / cute.math.sqrt(total / size + eps)) * w.load())
    for d in cutlass.range_constexpr(DEPTH):
        if first + d * together < heads.shape[0]:
            cute.autovec_copy(values[None, d], cute.local_tile(heads[first + d * together, None], (VECTOR,), (lane,)))


@cute.kernel
def norm_kernel(
    query: cute.Tensor, key: cute.Tensor, query_weight: cute.Tensor, key_weight: cute.Tensor, eps: cutlass.Float32
):
    _, which, _ = cute.arch.block_idx()
    if which == 0:
        norm_heads(query, query_weight, eps)
    else:
        norm_heads(key, key_weight, eps)


@cute.jit
def norm(
    query: cute.Tensor,
    key: cute.Tensor,
    query_weight: cute.Tensor,
    key_weight: cute.Tensor,
    eps: cutlass.Float32,
    stream,
):
    heads = cutlass.const_expr(THREADS // (query.shape[1] // VECTOR) * DEPTH)
    norm_kernel(query, key, query_weight, key_weight, eps).launch(
        grid=(cute.ceil_div(query.shape[0], heads), 2, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU. A head must take a power of two of threads."""
    assert size % VECTOR == 0 and size // VECTOR in (1, 2, 4, 8, 16, 32)
    heads = cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        norm,
        fake(heads, size),
        fake(heads, size),
        fake(size),
        fake(size),
        cutlass.Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", size)


def solve(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    size = len(q_norm_weight)
    shape = (*hidden_states.shape[:2], -1, size)
    query, key, value = (linear(hidden_states, w).view(shape) for w in (q_weight, k_weight, v_weight))
    kernel = kernel_for(query.device, size)
    kernel(query.view(-1, size), key.view(-1, size), q_norm_weight, k_norm_weight, eps)
    return query, key, value
