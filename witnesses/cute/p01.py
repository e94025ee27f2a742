"""p01, paged grouped-query decode, in CuTe DSL: two kernels, as in split-context flash decoding.

The contexts are cut into chunks. In the first kernel a thread block has one chunk and one KV head for all of the head's
queries, so that keys and values are read once: 16 threads share a token, 8 values (16 bytes) each, eight tokens at a
time, with a running softmax for each of the eight. The second kernel joins the chunks of a sequence. Which sequence a
chunk belongs to is counted on the device: nothing waits for the offsets to reach the host.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

CHUNK = 256  # tokens
VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 128
UNROLL = 4  # tokens in flight in each thread
LOG2_E = 1.4426950408889634
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@cute.kernel
def chunk_kernel(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    offsets: cute.Tensor,
    tokens: cute.Tensor,
    scale: cutlass.Float32,
    totals: cute.Tensor,
    highest: cute.Tensor,
    weights: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    chunk, kv_head, _ = cute.arch.block_idx()
    size = cutlass.const_expr(q.shape[2])
    group = cutlass.const_expr(q.shape[1] // k_cache.shape[1])  # query heads of a KV head
    lanes = cutlass.const_expr(size // VECTOR)
    teams = cutlass.const_expr(THREADS // lanes)
    team, lane = thread // lanes, thread % lanes

    sequence, part, first = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    for b in cutlass.range(q.shape[0]):
        if chunk >= first:
            sequence = b
            part = chunk - first
        first += (offsets[b + 1] - offsets[b] + CHUNK - 1) // CHUNK
    start = offsets[sequence] + part * CHUNK
    stop = cutlass.min(start + CHUNK, offsets[sequence + 1])

    queries = cute.make_rmem_tensor((VECTOR, group), cutlass.Float32)
    part_q = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    k = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    v = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    total = cute.make_rmem_tensor((VECTOR, group), cutlass.Float32)
    top = cute.make_rmem_tensor(group, cutlass.Float32)
    weight = cute.make_rmem_tensor(group, cutlass.Float32)
    logit = cute.make_rmem_tensor(UNROLL, cutlass.Float32)
    total.fill(0.0)
    weight.fill(0.0)
    top.fill(LOWEST)
    for g in cutlass.range_constexpr(group):
        cute.autovec_copy(cute.local_tile(q[sequence, kv_head * group + g, None], (VECTOR,), (lane,)), part_q)
        queries[None, g].store(part_q.load().to(cutlass.Float32) * (scale * LOG2_E))

    # Every thread of the block runs the same number of steps: threads of different teams meet in the shuffles.
    for step in cutlass.range((stop - start + teams * UNROLL - 1) // (teams * UNROLL)):
        place = start + step * teams * UNROLL + team
        for u in cutlass.range_constexpr(UNROLL):
            token = tokens[cutlass.min(place + u * teams, stop - 1)]
            cute.autovec_copy(cute.local_tile(k_cache[token, kv_head, None], (VECTOR,), (lane,)), k[None, u])
            cute.autovec_copy(cute.local_tile(v_cache[token, kv_head, None], (VECTOR,), (lane,)), v[None, u])
        for g in cutlass.range_constexpr(group):
            new_top = top[g]
            for u in cutlass.range_constexpr(UNROLL):
                products = queries[None, g].load() * k[None, u].load().to(cutlass.Float32)
                dot = products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
                dot = cute.arch.warp_reduction_sum(dot, threads_in_group=lanes)
                if place + u * teams >= stop:
                    dot = cutlass.Float32(MASKED)
                logit[u] = dot
                new_top = cute.arch.fmax(new_top, dot)
            shrink = cute.math.exp2(top[g] - new_top)
            top[g] = new_top
            values = total[None, g].load() * shrink
            added = weight[g] * shrink
            for u in cutlass.range_constexpr(UNROLL):
                power = cute.math.exp2(logit[u] - new_top)
                added += power
                values = values + v[None, u].load().to(cutlass.Float32) * power
            weight[g] = added
            total[None, g].store(values)

    shared = cutlass.utils.SmemAllocator()
    team_totals = shared.allocate_tensor(
        cutlass.Float32, cute.make_layout((teams, group, size), stride=(group * size, size, 1)), 16
    )
    team_top = shared.allocate_tensor(cutlass.Float32, cute.make_layout((teams, group)), 16)
    team_weight = shared.allocate_tensor(cutlass.Float32, cute.make_layout((teams, group)), 16)
    for g in cutlass.range_constexpr(group):
        cute.autovec_copy(total[None, g], cute.local_tile(team_totals[team, g, None], (VECTOR,), (lane,)))
        if lane == 0:
            team_top[team, g] = top[g]
            team_weight[team, g] = weight[g]
    cute.arch.sync_threads()
    if thread < size:
        for g in cutlass.range_constexpr(group):
            peak = cutlass.Float32(LOWEST)
            for t in cutlass.range_constexpr(teams):
                peak = cute.arch.fmax(peak, team_top[t, g])
            joined, joined_weight = cutlass.Float32(0.0), cutlass.Float32(0.0)
            for t in cutlass.range_constexpr(teams):
                shrink = cute.math.exp2(team_top[t, g] - peak)
                joined += team_totals[t, g, thread] * shrink
                joined_weight += team_weight[t, g] * shrink
            totals[chunk, kv_head * group + g, thread] = joined
            if thread == 0:
                highest[chunk, kv_head * group + g] = peak
                weights[chunk, kv_head * group + g] = joined_weight


@cute.kernel
def join_kernel(
    offsets: cute.Tensor,
    totals: cute.Tensor,
    highest: cute.Tensor,
    weights: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    head, sequence, _ = cute.arch.block_idx()
    first = cutlass.Int32(0)
    for b in cutlass.range(sequence):
        first += (offsets[b + 1] - offsets[b] + CHUNK - 1) // CHUNK
    count = (offsets[sequence + 1] - offsets[sequence] + CHUNK - 1) // CHUNK
    peak = cutlass.Float32(LOWEST)
    for c in cutlass.range(count):
        peak = cute.arch.fmax(peak, highest[first + c, head])
    total, weight = cutlass.Float32(0.0), cutlass.Float32(0.0)
    for c in cutlass.range(count):
        shrink = cute.math.exp2(highest[first + c, head] - peak)
        total += totals[first + c, head, thread] * shrink
        weight += weights[first + c, head] * shrink
    out[sequence, head, thread] = (total / cute.arch.fmax(weight, cutlass.Float32(1e-30))).to(cutlass.BFloat16)
    if thread == 0:
        lse[sequence, head] = peak + cute.math.log2(weight)


@cute.jit
def decode(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    offsets: cute.Tensor,
    tokens: cute.Tensor,
    scale: cutlass.Float32,
    totals: cute.Tensor,
    highest: cute.Tensor,
    weights: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    stream,
):
    chunk_kernel(q, k_cache, v_cache, offsets, tokens, scale, totals, highest, weights).launch(
        grid=(totals.shape[0], k_cache.shape[1], 1), block=(THREADS, 1, 1), stream=stream
    )
    join_kernel(offsets, totals, highest, weights, out, lse).launch(
        grid=(q.shape[1], q.shape[0], 1), block=(q.shape[2], 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 32, kv_heads: int = 8, size: int = 128):
    """Both kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    sequences, offsets, pool, tokens, chunks = (cute.sym_int() for _ in range(5))

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        decode,
        fake(cutlass.BFloat16, sequences, heads, size),
        fake(cutlass.BFloat16, pool, kv_heads, size),
        fake(cutlass.BFloat16, pool, kv_heads, size),
        fake(cutlass.Int32, offsets),
        fake(cutlass.Int32, tokens),
        cutlass.Float32(0.0),
        fake(cutlass.Float32, chunks, heads, size),
        fake(cutlass.Float32, chunks, heads),
        fake(cutlass.Float32, chunks, heads),
        fake(cutlass.BFloat16, sequences, heads, size),
        fake(cutlass.Float32, sequences, heads),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, kv_heads: int, size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, kv_heads, size)


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, heads, size = q.shape
    chunks = len(kv_indices) // CHUNK + sequences  # no fewer than there can be
    totals = torch.empty(chunks, heads, size, dtype=torch.float32, device=q.device)
    highest = torch.empty(chunks, heads, dtype=torch.float32, device=q.device)
    weights = torch.empty_like(highest)
    output = torch.empty_like(q)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=q.device)
    kernel = kernel_for(q.device, heads, k_cache.shape[2], size)
    kernel(
        q,
        k_cache.squeeze(1),
        v_cache.squeeze(1),
        kv_indptr,
        kv_indices,
        sm_scale,
        totals,
        highest,
        weights,
        output,
        lse,
    )
    return output, lse
