"""p54, FP8 projections with per-head norms, in CuTe DSL. The product stays with eager PyTorch, in bfloat16.

Two kernels replace hidden states and weights by what their FP8 codes and scales stand for, rounded to bfloat16, which
is far finer than E4M3; the three weights become one matrix. Another adds the biases to the product and normalises the
heads: a thread block has a token, 16 threads with 8 values (16 bytes) each have a head.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

BLOCK = 128  # also the size of a head
VECTOR = 8  # bfloat16 values in 16 bytes
LANES = BLOCK // VECTOR
THREADS = 256
ROWS = THREADS // LANES  # rows of 128 that a thread block has at a time
PASSES = BLOCK // ROWS  # until a thread block has seen a weight block
UNROLL = 4  # rows of 128 that a thread has a share of
LARGEST = 448.0
SMALLEST_SCALE = 1e-12


@cute.jit
def largest_magnitude(x: cute.Tensor) -> cutlass.Float32:
    values = x.load().to(cutlass.Float32)
    largest = cutlass.Float32(0.0)
    for e in cutlass.range_constexpr(cute.size(x)):
        largest = cute.arch.fmax(largest, cute.arch.fmax(values[e], -values[e]))
    return largest


@cute.jit
def quantise(x: cute.Tensor, largest: cutlass.Float32):
    """Replace 8 values by what their codes stand for, given the largest magnitude of their block."""
    scale = cute.arch.fmax(largest / LARGEST, cutlass.Float32(SMALLEST_SCALE))
    codes = cute.make_rmem_tensor(VECTOR, cutlass.Float8E4M3FN)
    # The reciprocal may move a value that lies half way between two codes; the conversion saturates at 448.
    codes.store((x.load().to(cutlass.Float32) * (1.0 / scale)).to(cutlass.Float8E4M3FN))
    x.store((codes.load().to(cutlass.Float32) * scale).to(cutlass.BFloat16))


@cute.kernel
def activation_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first, lane = group * (ROWS * UNROLL) + thread // LANES, thread % LANES
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * ROWS < source.shape[0]:
            cute.autovec_copy(cute.local_tile(source[first + u * ROWS, None], (VECTOR,), (lane,)), x[None, u])
    for u in cutlass.range_constexpr(UNROLL):
        quantise(x[None, u], cute.arch.warp_reduction_max(largest_magnitude(x[None, u]), threads_in_group=LANES))
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * ROWS < source.shape[0]:
            cute.autovec_copy(x[None, u], cute.local_tile(target[first + u * ROWS, None], (VECTOR,), (lane,)))


@cute.kernel
def weight_kernel(source: cute.Tensor, target: cute.Tensor):
    """A thread block holds a block of 128 × 128 values in registers."""
    thread, _, _ = cute.arch.thread_idx()
    column, row, _ = cute.arch.block_idx()
    lane, first = column * LANES + thread % LANES, row * BLOCK + thread // LANES
    x = cute.make_rmem_tensor((VECTOR, PASSES), cutlass.BFloat16)
    for p in cutlass.range_constexpr(PASSES):
        cute.autovec_copy(cute.local_tile(source[first + p * ROWS, None], (VECTOR,), (lane,)), x[None, p])
    largest = cute.arch.warp_reduction_max(largest_magnitude(x))
    warps = cutlass.const_expr(THREADS // cute.arch.WARP_SIZE)
    partial = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = largest
    cute.arch.sync_threads()
    for w in cutlass.range_constexpr(warps):
        largest = cute.arch.fmax(largest, partial[w])
    for p in cutlass.range_constexpr(PASSES):
        quantise(x[None, p], largest)
        cute.autovec_copy(x[None, p], cute.local_tile(target[first + p * ROWS, None], (VECTOR,), (lane,)))


@cute.kernel
def head_kernel(
    product: cute.Tensor,
    q_bias: cute.Tensor,
    k_bias: cute.Tensor,
    v_bias: cute.Tensor,
    q_weight: cute.Tensor,
    k_weight: cute.Tensor,
    eps: cutlass.Float32,
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
):
    """All but the weights are [.., head, 128]; a head of the product is a query's, a key's or a value's."""
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    lane = thread % LANES
    queries = cutlass.const_expr(query.shape[1])
    keys = cutlass.const_expr(key.shape[1])
    heads = cutlass.const_expr(queries + 2 * keys)
    passes = cutlass.const_expr((heads + ROWS - 1) // ROWS)
    x = cute.make_rmem_tensor((VECTOR, passes), cutlass.BFloat16)
    bias = cute.make_rmem_tensor((VECTOR, passes), cutlass.BFloat16)
    weight = cute.make_rmem_tensor((VECTOR, passes), cutlass.BFloat16)
    x.fill(0.0)
    bias.fill(0.0)
    weight.fill(0.0)
    for p in cutlass.range_constexpr(passes):
        head = p * ROWS + thread // LANES
        if head < heads:
            cute.autovec_copy(cute.local_tile(product[token, head, None], (VECTOR,), (lane,)), x[None, p])
        if head < queries:
            cute.autovec_copy(cute.local_tile(q_bias[head, None], (VECTOR,), (lane,)), bias[None, p])
            cute.autovec_copy(cute.local_tile(q_weight, (VECTOR,), (lane,)), weight[None, p])
        elif head < queries + keys:
            cute.autovec_copy(cute.local_tile(k_bias[head - queries, None], (VECTOR,), (lane,)), bias[None, p])
            cute.autovec_copy(cute.local_tile(k_weight, (VECTOR,), (lane,)), weight[None, p])
        elif head < heads:
            cute.autovec_copy(cute.local_tile(v_bias[head - queries - keys, None], (VECTOR,), (lane,)), bias[None, p])
    for p in cutlass.range_constexpr(passes):
        head = p * ROWS + thread // LANES
        z = x[None, p].load().to(cutlass.Float32) + bias[None, p].load().to(cutlass.Float32)
        total = (z * z).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=LANES)
        normal = z * cute.math.rsqrt(total / BLOCK + eps) * weight[None, p].load().to(cutlass.Float32)
        if head < queries + keys:
            x[None, p].store(normal.to(cutlass.BFloat16))
        else:
            x[None, p].store(z.to(cutlass.BFloat16))
        if head < queries:
            cute.autovec_copy(x[None, p], cute.local_tile(query[token, head, None], (VECTOR,), (lane,)))
        elif head < queries + keys:
            cute.autovec_copy(x[None, p], cute.local_tile(key[token, head - queries, None], (VECTOR,), (lane,)))
        elif head < heads:
            place = head - queries - keys
            cute.autovec_copy(x[None, p], cute.local_tile(value[token, place, None], (VECTOR,), (lane,)))


@cute.jit
def quantise_all(
    blocks: cute.Tensor,
    new_blocks: cute.Tensor,
    q_weight: cute.Tensor,
    new_q_weight: cute.Tensor,
    k_weight: cute.Tensor,
    new_k_weight: cute.Tensor,
    v_weight: cute.Tensor,
    new_v_weight: cute.Tensor,
    stream,
):
    columns = cutlass.const_expr(q_weight.shape[1] // BLOCK)
    activation_kernel(blocks, new_blocks).launch(
        grid=(cute.ceil_div(blocks.shape[0], ROWS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    weight_kernel(q_weight, new_q_weight).launch(
        grid=(columns, q_weight.shape[0] // BLOCK, 1), block=(THREADS, 1, 1), stream=stream
    )
    weight_kernel(k_weight, new_k_weight).launch(
        grid=(columns, k_weight.shape[0] // BLOCK, 1), block=(THREADS, 1, 1), stream=stream
    )
    weight_kernel(v_weight, new_v_weight).launch(
        grid=(columns, v_weight.shape[0] // BLOCK, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def finish_heads(
    product: cute.Tensor,
    q_bias: cute.Tensor,
    k_bias: cute.Tensor,
    v_bias: cute.Tensor,
    q_weight: cute.Tensor,
    k_weight: cute.Tensor,
    eps: cutlass.Float32,
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    stream,
):
    head_kernel(product, q_bias, k_bias, v_bias, q_weight, k_weight, eps, query, key, value).launch(
        grid=(product.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, hidden: int = 7680, query_heads: int = 60, kv_heads: int = 8):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    blocks, tokens = cute.sym_int(), cute.sym_int()
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    heads = (query_heads, kv_heads, kv_heads)
    weights = [fake(count * BLOCK, hidden) for count in heads for _ in "st"]
    first = cute.compile(quantise_all, fake(blocks, BLOCK), fake(blocks, BLOCK), *weights, stream, options=options)
    second = cute.compile(
        finish_heads,
        fake(tokens, sum(heads), BLOCK),
        *(fake(count, BLOCK) for count in heads),
        fake(BLOCK),
        fake(BLOCK),
        cutlass.Float32(0.0),
        *(fake(tokens, count, BLOCK) for count in heads),
        stream,
        options=options,
    )
    return first, second


@cache
def kernels_for(device: torch.device, hidden: int, query_heads: int, kv_heads: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", hidden, query_heads, kv_heads)


def solve(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    v_bias: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    batch, sequence, hidden = hidden_states.shape
    query_heads, kv_heads = len(q_weight) // BLOCK, len(k_weight) // BLOCK
    quantise_operands, finish = kernels_for(hidden_states.device, hidden, query_heads, kv_heads)
    tokens = torch.empty_like(hidden_states)
    weight = q_weight.new_empty(len(q_weight) + 2 * len(k_weight), hidden)
    new_q, new_k, new_v = weight.split((len(q_weight), len(k_weight), len(v_weight)))
    quantise_operands(
        *(hidden_states.view(-1, BLOCK), tokens.view(-1, BLOCK)),
        *(q_weight, new_q, k_weight, new_k, v_weight, new_v),
    )
    product = torch.mm(tokens.view(-1, hidden), weight.t())
    query = hidden_states.new_empty(batch, sequence, query_heads, BLOCK)
    key, value = (hidden_states.new_empty(batch, sequence, kv_heads, BLOCK) for _ in range(2))
    finish(
        product.view(batch * sequence, -1, BLOCK),
        *(bias.view(-1, BLOCK) for bias in (q_bias, k_bias, v_bias)),
        *(q_norm_weight, k_norm_weight, eps),
        *(heads.flatten(0, 1) for heads in (query, key, value)),
    )
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
