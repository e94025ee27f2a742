"""p42, front of a multi-token-prediction head, in CuTe DSL. The projection stays with eager PyTorch.

One kernel takes the embedding of the next token and the hidden state, normalises each, and writes them side by side, as
the projection reads them: a thread block has one half of one row, a thread several times 8 values (16 bytes).
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear

VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256


@cute.jit
def norm_row(
    source: cute.Tensor,
    weight: cute.Tensor,
    eps: cutlass.Float32,
    target: cute.Tensor,
    half: cutlass.Constexpr[int],
    partial: cute.Tensor,
):
    """Normalise a row into one half of a row twice as long."""
    thread, _, _ = cute.arch.thread_idx()
    width = cutlass.const_expr(source.shape[0])
    chunks = cutlass.const_expr(width // VECTOR // THREADS)
    x = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    w = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(source, (VECTOR,), (c * THREADS + thread,)), x[None, c])
        cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (c * THREADS + thread,)), w[None, c])
    values = x.load().to(cutlass.Float32)
    total = cute.arch.warp_reduction_sum((values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0))
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = total
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for k in cutlass.range_constexpr(THREADS // cute.arch.WARP_SIZE):
        total += partial[k]
    x.store((values * cute.math.rsqrt(total / width + eps) * w.load().to(cutlass.Float32)).to(cutlass.BFloat16))
    for c in cutlass.range_constexpr(chunks):
        place = half * width // VECTOR + c * THREADS + thread
        cute.autovec_copy(x[None, c], cute.local_tile(target, (VECTOR,), (place,)))


@cute.kernel
def front_kernel(
    ids: cute.Tensor,
    hidden: cute.Tensor,
    embeddings: cute.Tensor,
    embedding_weight: cute.Tensor,
    hidden_weight: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
):
    row, which, _ = cute.arch.block_idx()
    warps = cutlass.const_expr(THREADS // cute.arch.WARP_SIZE)
    partial = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    if which == 0:
        length = ids.shape[1]
        position = row % length
        id = cutlass.Int64(0)
        if position + 1 < length:
            id = ids[row // length, position + 1]
        norm_row(embeddings[id, None], embedding_weight, eps, out[row, None], 0, partial)
    else:
        norm_row(hidden[row, None], hidden_weight, eps, out[row, None], 1, partial)


@cute.jit
def front(
    ids: cute.Tensor,
    hidden: cute.Tensor,
    embeddings: cute.Tensor,
    embedding_weight: cute.Tensor,
    hidden_weight: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    stream,
):
    front_kernel(ids, hidden, embeddings, embedding_weight, hidden_weight, eps, out).launch(
        grid=(hidden.shape[0], 2, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 4096):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % (VECTOR * THREADS) == 0
    batch, length, rows, vocabulary = (cute.sym_int() for _ in range(4))

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        front,
        fake(cutlass.Int64, batch, length),
        fake(cutlass.BFloat16, rows, width),
        fake(cutlass.BFloat16, vocabulary, width),
        fake(cutlass.BFloat16, width),
        fake(cutlass.BFloat16, width),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, rows, 2 * width),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width)


def solve(
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    word_embeddings: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eh_proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    batch, length, width = hidden_states.shape
    both = hidden_states.new_empty(batch * length, 2 * width)
    kernel = kernel_for(both.device, width)
    kernel(input_ids, hidden_states.view(-1, width), word_embeddings, enorm_weight, hnorm_weight, eps, both)
    return linear(both, eh_proj_weight).view(batch, length, -1)
