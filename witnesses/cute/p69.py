"""p69, gated linear attention, in CuTe DSL: its quadratic form, as in flash attention, but with decays and no softmax.

The time is cut into four stretches; the score of a query and a key is a plain product once queries carry the decay
since the start of their stretch, and keys its inverse, up to the start of the query's stretch. Two kernels:
1. Decay: a thread block has 32 key channels of a head for the whole time, a thread 8 of them for a few tokens. The sums
   of the log-decays cross the threads through shared memory. Queries come out once, keys once for every stretch from
   their own on: all factors of other stretches are below one, and nothing overflows.
2. Attention: a thread block has 64 queries and 256 value channels, a warp 16 of the queries. 64 keys and their values
   at a time are on their way to shared memory while the tensor cores work on what came before; late queries come first.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes, and the padding of a row in shared memory: no bank conflicts
TOKENS = 64  # queries of a thread block, and keys that it takes at a time
VALUES = 256  # value channels of a thread block
THREADS = 128
LANES = 4  # threads of the first kernel that share a token
SEGMENTS = 128  # of the time, one for every four of its threads
WARPS = SEGMENTS * LANES // 32
CHANNELS = LANES * VECTOR
STRETCHES = 4


@cute.kernel
def decay_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    log_decay: cute.Tensor,
    new_query: cute.Tensor,
    new_key: cute.Tensor,
    steps: cutlass.Constexpr[int],
):
    """A segment of the time has `steps` tokens."""
    thread, _, _ = cute.arch.thread_idx()
    part, head, prompt = cute.arch.block_idx()
    segment, lane, own_warp = thread // LANES, thread % LANES, thread // 32
    length, key_size = query.shape[1], cutlass.const_expr(query.shape[3])
    place = (part * LANES + lane,)
    share = cutlass.const_expr(SEGMENTS // WARPS)  # segments of a warp
    long = cutlass.const_expr(WARPS // STRETCHES)  # warps of a stretch

    shared = cutlass.utils.SmemAllocator()
    # Sums of the segments, then of those before in the warp.
    before = shared.allocate_tensor(cutlass.Float32, cute.make_layout((SEGMENTS, CHANNELS), stride=(CHANNELS, 1)), 16)
    warp_sums = shared.allocate_tensor(cutlass.Float32, cute.make_layout((WARPS, CHANNELS), stride=(CHANNELS, 1)), 16)
    g = cute.make_rmem_tensor((VECTOR, steps), cutlass.BFloat16)
    q = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    k = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    x = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)  # the log-decay since the start of the own stretch
    start = cute.make_rmem_tensor((VECTOR, STRETCHES), cutlass.Float32)  # up to a stretch, then its factor
    own_start = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    part_sum = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    for t in cutlass.range_constexpr(steps):
        token = cutlass.min(segment * steps + t, length - 1)
        cute.autovec_copy(cute.local_tile(log_decay[prompt, token, head, None], (VECTOR,), place), g[None, t])
    x.fill(0.0)
    for t in cutlass.range_constexpr(steps):
        x.store(x.load() + g[None, t].load().to(cutlass.Float32))
    cute.autovec_copy(x, cute.local_tile(before[segment, None], (VECTOR,), (lane,)))
    cute.arch.sync_threads()
    running = cutlass.Float32(0.0)
    for s in cutlass.range_constexpr(share):
        following = running + before[own_warp * share + s, thread % 32]
        before[own_warp * share + s, thread % 32] = running
        running = following
    warp_sums[own_warp, thread % 32] = running
    cute.arch.sync_threads()
    x.fill(0.0)
    total.fill(0.0)
    own_start.fill(0.0)
    for w in cutlass.range_constexpr(WARPS):
        if cutlass.const_expr(w % long == 0):
            start[None, w // long].store(x.load())
            if w // long == own_warp // long:
                own_start.store(x.load())
        if w == own_warp:
            total.store(x.load())
        cute.autovec_copy(cute.local_tile(warp_sums[w, None], (VECTOR,), (lane,)), part_sum)
        x.store(x.load() + part_sum.load())
    cute.autovec_copy(cute.local_tile(before[segment, None], (VECTOR,), (lane,)), part_sum)
    total.store(total.load() + part_sum.load() - own_start.load())
    for i in cutlass.range_constexpr(STRETCHES):
        for e in cutlass.range_constexpr(VECTOR):
            exponent = cute.arch.fmin(start[e, i] - own_start[e], cutlass.Float32(0.0))
            start[e, i] = cute.math.exp(exponent, fastmath=True)

    for t in cutlass.range_constexpr(steps):
        token = segment * steps + t
        if token < length:
            cute.autovec_copy(cute.local_tile(query[prompt, token, head, None], (VECTOR,), place), q)
            cute.autovec_copy(cute.local_tile(key[prompt, token, head, None], (VECTOR,), place), k)
            since = total.load() + g[None, t].load().to(cutlass.Float32)
            total.store(since)
            q.store(
                (q.load().to(cutlass.Float32) * cute.math.exp(since, fastmath=True) * key_size**-0.5).to(
                    cutlass.BFloat16
                )
            )
            x.store(k.load().to(cutlass.Float32) * cute.math.exp(-since, fastmath=True))
            cute.autovec_copy(q, cute.local_tile(new_query[prompt, head, token, None], (VECTOR,), place))
            for i in cutlass.range_constexpr(STRETCHES):
                if i >= own_warp // long:
                    k.store((x.load() * start[None, i].load()).to(cutlass.BFloat16))
                    cute.autovec_copy(k, cute.local_tile(new_key[i, prompt, head, token, None], (VECTOR,), place))


@cute.jit
def load_tile(source: cute.Tensor, tile: cutlass.Int32, part: cutlass.Int32, target: cute.Tensor):
    """Starts the copy of 64 rows to shared memory; rows beyond the end are copies of the last one."""
    thread, _, _ = cute.arch.thread_idx()
    vectors = cutlass.const_expr(target.shape[1] // VECTOR)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.BFloat16, num_bits_per_copy=128)
    for i in cutlass.range_constexpr(TOKENS * vectors // THREADS):
        row = i * (THREADS // vectors) + thread // vectors
        token = cutlass.min(tile * TOKENS + row, source.shape[0] - 1)
        cute.copy(
            atom,
            cute.local_tile(source[token, None], (VECTOR,), (part * vectors + thread % vectors,)),
            cute.local_tile(target[row, None], (VECTOR,), (thread % vectors,)),
        )


@cute.kernel
def attend_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    out: cute.Tensor,
    stretch: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    block, head, prompt = cute.arch.block_idx()
    parts = cutlass.const_expr(value.shape[3] // VALUES)
    key_size = cutlass.const_expr(key.shape[4])
    length = key.shape[3]
    own, part = (length + TOKENS - 1) // TOKENS - 1 - block // parts, block % parts
    queries, keys = query[prompt, head, None, None], key[own * TOKENS // stretch, prompt, head, None, None]
    values = value[prompt, None, head, None]

    shared = cutlass.utils.SmemAllocator()
    key_rows = cute.make_layout((TOKENS, key_size), stride=(key_size + VECTOR, 1))
    value_rows = cute.make_layout((TOKENS, VALUES), stride=(VALUES + VECTOR, 1))
    shared_q = shared.allocate_tensor(cutlass.BFloat16, key_rows, 128)
    shared_k = shared.allocate_tensor(cutlass.BFloat16, key_rows, 128)
    shared_v = shared.allocate_tensor(cutlass.BFloat16, value_rows, 128)
    columns = cute.make_layout((VALUES, TOKENS), stride=(1, VALUES + VECTOR))
    shared_v_columns = cute.make_tensor(shared_v.iterator, columns)

    product = cute.make_tiled_mma(
        warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)), (THREADS // 32, 1, 1), (TOKENS, 16, 16)
    )
    own_product = product.get_slice(thread)
    rows_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), cutlass.BFloat16)
    columns_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), cutlass.BFloat16)
    copy_q, copy_k = cute.make_tiled_copy_A(rows_atom, product), cute.make_tiled_copy_B(rows_atom, product)
    copy_v = cute.make_tiled_copy_B(columns_atom, product)
    q = own_product.make_fragment_A(own_product.partition_A(shared_q))
    k = own_product.make_fragment_B(own_product.partition_B(shared_k))
    v = own_product.make_fragment_B(own_product.partition_B(shared_v_columns))
    q_from, q_to = copy_q.get_slice(thread).partition_S(shared_q), copy_q.get_slice(thread).retile(q)
    k_from, k_to = copy_k.get_slice(thread).partition_S(shared_k), copy_k.get_slice(thread).retile(k)
    v_from, v_to = copy_v.get_slice(thread).partition_S(shared_v_columns), copy_v.get_slice(thread).retile(v)

    scores = cute.make_rmem_tensor(own_product.partition_shape_C((TOKENS, TOKENS)), cutlass.Float32)
    places = own_product.partition_C(cute.make_identity_tensor((TOKENS, TOKENS)))
    weights = cute.make_rmem_tensor(scores.layout, cutlass.BFloat16)
    # The two tiles of 8 columns of a left operand lie one behind the other in the scores.
    pairs = cute.logical_divide(weights.layout, (None, None, 2))
    operand = cute.make_layout(
        ((pairs.shape[0], pairs.shape[2][0]), pairs.shape[1], pairs.shape[2][1]),
        stride=((pairs.stride[0], pairs.stride[2][0]), pairs.stride[1], pairs.stride[2][1]),
    )
    left = cute.make_tensor(weights.iterator, operand)
    total = cute.make_rmem_tensor(own_product.partition_shape_C((TOKENS, VALUES)), cutlass.Float32)
    total.fill(0.0)

    load_tile(queries, own, 0, shared_q)
    load_tile(keys, 0, 0, shared_k)
    cute.arch.cp_async_commit_group()
    load_tile(values, 0, part, shared_v)
    cute.arch.cp_async_commit_group()
    for tile in cutlass.range(own + 1):
        cute.arch.cp_async_wait_group(1)  # the keys are there, the values may still be on their way
        cute.arch.sync_threads()
        scores.fill(0.0)
        for c in cutlass.range_constexpr(key_size // 16):
            cute.copy(copy_q, q_from[None, None, c], q_to[None, None, c])
            cute.copy(copy_k, k_from[None, None, c], k_to[None, None, c])
            cute.gemm(product, scores, q[None, None, c], k[None, None, c], scores)
        cute.arch.sync_threads()
        if tile < own:
            load_tile(keys, tile + 1, 0, shared_k)
        cute.arch.cp_async_commit_group()
        for i in cutlass.range_constexpr(cute.size(scores)):
            row, column = places[i]
            score = scores[i]
            if (own - tile) * TOKENS + row < column:
                score = cutlass.Float32(0.0)
            weights[i] = score.to(cutlass.BFloat16)
        cute.arch.cp_async_wait_group(1)  # the values are there, the next keys may still be on their way
        cute.arch.sync_threads()
        for c in cutlass.range_constexpr(TOKENS // 16):
            cute.copy(copy_v, v_from[None, None, c], v_to[None, None, c])
            cute.gemm(product, total, left[None, None, c], v[None, None, c], total)
        cute.arch.sync_threads()
        if tile < own:
            load_tile(values, tile + 1, part, shared_v)
        cute.arch.cp_async_commit_group()

    # A thread has pairs of neighbouring columns of two rows.
    outs = own_product.partition_C(cute.local_tile(out[prompt, None, head, None], (TOKENS, VALUES), (own, part)))
    own_rows = own_product.partition_C(cute.make_identity_tensor((TOKENS, VALUES)))
    pair = cute.make_rmem_tensor(2, cutlass.BFloat16)
    for upper in cutlass.range_constexpr(2):
        if own * TOKENS + own_rows[(0, upper), 0, 0][0] < length:
            for n in cutlass.range_constexpr(VALUES // 8):
                pair.store(total[(None, upper), 0, n].load().to(cutlass.BFloat16))
                cute.autovec_copy(pair, outs[(None, upper), 0, n])


@cute.jit
def attention(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    log_decay: cute.Tensor,
    new_query: cute.Tensor,
    new_key: cute.Tensor,
    out: cute.Tensor,
    stream,
    steps: cutlass.Constexpr[int],
):
    batch, length, heads, value_size = value.shape
    decay_kernel(query, key, log_decay, new_query, new_key, steps).launch(
        grid=(query.shape[3] // CHANNELS, heads, batch), block=(SEGMENTS * LANES, 1, 1), stream=stream
    )
    attend_kernel(new_query, new_key, value, out, SEGMENTS // STRETCHES * steps).launch(
        grid=((length + TOKENS - 1) // TOKENS * (value_size // VALUES), heads, batch),
        block=(THREADS, 1, 1),
        stream=stream,
    )


def steps_of(length: int) -> int:
    """Tokens of a segment: as few as cover the time, and whole tiles in a stretch."""
    return -(-length // (2 * SEGMENTS)) * 2


def compile_for(arch: str, heads: int = 4, key_size: int = 256, value_size: int = 512, steps: int = 8):
    """The two kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert key_size in {64, 128, 256} and value_size % VALUES == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        attention,
        fake(batch, length, heads, key_size),
        fake(batch, length, heads, key_size),
        fake(batch, length, heads, value_size),
        fake(batch, length, heads, key_size),
        fake(batch, heads, length, key_size),
        fake(STRETCHES, batch, heads, length, key_size),
        fake(batch, length, heads, value_size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        steps,
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, key_size: int, value_size: int, steps: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, key_size, value_size, steps)


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    batch, length, heads, key_size = q.shape
    queries = q.new_empty(batch, heads, length, key_size)
    keys = q.new_empty(STRETCHES, batch, heads, length, key_size)
    output = torch.empty_like(v)
    kernel = kernel_for(q.device, heads, key_size, v.shape[3], steps_of(length))
    kernel(q, k, v, gk, queries, keys, output)
    return output
