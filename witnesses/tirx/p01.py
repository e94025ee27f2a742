"""p01, paged grouped-query decode, in TIRx.

CUDA: two kernels, as in split-context flash decoding. The contexts are cut into chunks. In the first kernel a thread
block has one chunk and one KV head for all of the head's queries, so that keys and values are read once: 16 threads
share a token, 8 values (16 bytes) each, eight tokens at a time, with a running softmax for each of the eight. The
second kernel joins the chunks of a sequence. Which sequence a chunk belongs to is counted on the device: nothing waits
for the offsets to reach the host. CPU: plain loops, a query head at a time.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

CHUNK = 256  # tokens
VECTOR = 8
THREADS = 128
UNROLL = 4  # tokens in flight in each thread
LOG2_E = 1.4426950408889634
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@T.jit
def chunk_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    to: T.handle,
    hi: T.handle,
    we: T.handle,
    *,
    heads: T.constexpr,
    kv_heads: T.constexpr,
    group: T.constexpr,
    size: T.constexpr,
    lanes: T.constexpr,
    teams: T.constexpr,
):
    """`group` query heads of a KV head; `teams` of `lanes` threads, a token a team."""
    sequences = T.int32()
    pool = T.int32()
    listed = T.int32()
    chunks = T.int32()
    q = T.match_buffer(qh, (sequences, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, kv_heads, size), "bfloat16")
    offsets = T.match_buffer(po, (sequences + 1,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    totals = T.match_buffer(to, (chunks, heads, size), "float32")
    highest = T.match_buffer(hi, (chunks, heads), "float32")
    weights = T.match_buffer(we, (chunks, heads), "float32")
    T.device_entry()
    chunk, kv_head = T.cta_id([chunks, kv_heads])
    thread = T.thread_id([THREADS])
    team = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    sequence = T.alloc_local((1,), "int32")
    part = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    start = T.alloc_local((1,), "int32")
    stop = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    part_q = T.alloc_local((VECTOR,), "bfloat16")
    queries = T.alloc_local((group, VECTOR), "float32")
    k = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    v = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    total = T.alloc_local((group, VECTOR), "float32")
    top = T.alloc_local((group,), "float32")
    weight = T.alloc_local((group,), "float32")
    logit = T.alloc_local((UNROLL,), "float32")
    new_top = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    joined = T.alloc_local((2,), "float32")
    team_totals = T.alloc_shared((teams, group, size), "float32")
    team_top = T.alloc_shared((teams, group), "float32")
    team_weight = T.alloc_shared((teams, group), "float32")
    team[0] = thread // lanes
    lane[0] = thread % lanes
    sequence[0] = 0
    part[0] = 0
    first[0] = 0
    for b in T.serial(sequences):
        if chunk >= first[0]:
            sequence[0] = b
            part[0] = chunk - first[0]
        first[0] = first[0] + (offsets[b + 1] - offsets[b] + CHUNK - 1) // CHUNK
    start[0] = offsets[sequence[0]] + part[0] * CHUNK
    stop[0] = T.min(start[0] + CHUNK, offsets[sequence[0] + 1])
    for g in T.unroll(group):
        top[g] = T.float32(LOWEST)
        weight[g] = T.float32(0)
        for e in T.vectorized(VECTOR):
            part_q[e] = q[sequence[0], kv_head * group + g, lane[0] * VECTOR + e]
        for e in T.unroll(VECTOR):
            queries[g, e] = T.cast(part_q[e], "float32") * (scale * T.float32(LOG2_E))
            total[g, e] = T.float32(0)
    # Every thread of the block runs the same number of steps: threads of different teams meet in the shuffles.
    for step in T.serial(CHUNK // (teams * UNROLL)):
        if start[0] + step * (teams * UNROLL) < stop[0]:
            place[0] = start[0] + step * (teams * UNROLL) + team[0]
            for u in T.unroll(UNROLL):
                token[0] = tokens[T.min(place[0] + u * teams, stop[0] - 1)]
                for e in T.vectorized(VECTOR):
                    k[u, e] = k_cache[token[0], kv_head, lane[0] * VECTOR + e]
                for e in T.vectorized(VECTOR):
                    v[u, e] = v_cache[token[0], kv_head, lane[0] * VECTOR + e]
            for g in T.unroll(group):
                new_top[0] = top[g]
                for u in T.unroll(UNROLL):
                    logit[u] = T.float32(0)
                    for e in T.unroll(VECTOR):
                        logit[u] = logit[u] + queries[g, e] * T.cast(k[u, e], "float32")
                    logit[u] = T.cuda.warp_sum(logit[u], lanes)
                    if place[0] + u * teams >= stop[0]:
                        logit[u] = T.float32(MASKED)
                    new_top[0] = T.max(new_top[0], logit[u])
                shrink[0] = T.exp2(top[g] - new_top[0])
                top[g] = new_top[0]
                weight[g] = weight[g] * shrink[0]
                for e in T.unroll(VECTOR):
                    total[g, e] = total[g, e] * shrink[0]
                for u in T.unroll(UNROLL):
                    logit[u] = T.exp2(logit[u] - new_top[0])
                    weight[g] = weight[g] + logit[u]
                    for e in T.unroll(VECTOR):
                        total[g, e] = total[g, e] + logit[u] * T.cast(v[u, e], "float32")
    for g in T.unroll(group):
        for e in T.vectorized(VECTOR):
            team_totals[team[0], g, lane[0] * VECTOR + e] = total[g, e]
        if lane[0] == 0:
            team_top[team[0], g] = top[g]
            team_weight[team[0], g] = weight[g]
    T.cuda.cta_sync()
    if thread < size:
        for g in T.unroll(group):
            new_top[0] = T.float32(LOWEST)
            for t in T.unroll(teams):
                new_top[0] = T.max(new_top[0], team_top[t, g])
            joined[0] = T.float32(0)
            joined[1] = T.float32(0)
            for t in T.unroll(teams):
                shrink[0] = T.exp2(team_top[t, g] - new_top[0])
                joined[0] = joined[0] + team_totals[t, g, thread] * shrink[0]
                joined[1] = joined[1] + team_weight[t, g] * shrink[0]
            totals[chunk, kv_head * group + g, thread] = joined[0]
            if thread == 0:
                highest[chunk, kv_head * group + g] = new_top[0]
                weights[chunk, kv_head * group + g] = joined[1]


@T.jit
def join_cuda(
    po: T.handle,
    to: T.handle,
    hi: T.handle,
    we: T.handle,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
):
    sequences = T.int32()
    chunks = T.int32()
    offsets = T.match_buffer(po, (sequences + 1,), "int32")
    totals = T.match_buffer(to, (chunks, heads, size), "float32")
    highest = T.match_buffer(hi, (chunks, heads), "float32")
    weights = T.match_buffer(we, (chunks, heads), "float32")
    out = T.match_buffer(o, (sequences, heads, size), "bfloat16")
    lse = T.match_buffer(l, (sequences, heads), "float32")
    T.device_entry()
    head, sequence = T.cta_id([heads, sequences])
    thread = T.thread_id([size])
    first = T.alloc_local((1,), "int32")
    count = T.alloc_local((1,), "int32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    joined = T.alloc_local((2,), "float32")
    first[0] = 0
    for b in T.serial(sequence):
        first[0] = first[0] + (offsets[b + 1] - offsets[b] + CHUNK - 1) // CHUNK
    count[0] = (offsets[sequence + 1] - offsets[sequence] + CHUNK - 1) // CHUNK
    peak[0] = T.float32(LOWEST)
    for c in T.serial(count[0]):
        peak[0] = T.max(peak[0], highest[first[0] + c, head])
    joined[0] = T.float32(0)
    joined[1] = T.float32(0)
    for c in T.serial(count[0]):
        shrink[0] = T.exp2(highest[first[0] + c, head] - peak[0])
        joined[0] = joined[0] + totals[first[0] + c, head, thread] * shrink[0]
        joined[1] = joined[1] + weights[first[0] + c, head] * shrink[0]
    out[sequence, head, thread] = T.cast(joined[0] / T.max(joined[1], T.float32(1e-30)), "bfloat16")
    if thread == 0:
        lse[sequence, head] = peak[0] + T.log2(joined[1])


@T.jit
def decode_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    kv_heads: T.constexpr,
    size: T.constexpr,
):
    sequences = T.int32()
    pool = T.int32()
    listed = T.int32()
    q = T.match_buffer(qh, (sequences, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, kv_heads, size), "bfloat16")
    offsets = T.match_buffer(po, (sequences + 1,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    out = T.match_buffer(o, (sequences, heads, size), "bfloat16")
    lse = T.match_buffer(l, (sequences, heads), "float32")
    total = T.alloc_buffer((size,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    highest = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    token = T.alloc_buffer((1,), "int32", scope="local")
    for b, h in T.grid(sequences, heads):
        highest[0] = T.float32(LOWEST)
        weight[0] = T.float32(0)
        for c in T.serial(size):
            total[c] = T.float32(0)
        for t in T.serial(offsets[b + 1] - offsets[b]):
            token[0] = tokens[offsets[b] + t]
            logit[0] = T.float32(0)
            for c in T.serial(size):
                logit[0] = logit[0] + T.cast(q[b, h, c], "float32") * T.cast(
                    k_cache[token[0], h // (heads // kv_heads), c], "float32"
                )
            logit[0] = logit[0] * scale
            shrink[0] = T.exp(highest[0] - T.max(highest[0], logit[0]))
            highest[0] = T.max(highest[0], logit[0])
            logit[0] = T.exp(logit[0] - highest[0])
            weight[0] = weight[0] * shrink[0] + logit[0]
            for c in T.serial(size):
                total[c] = total[c] * shrink[0] + logit[0] * T.cast(
                    v_cache[token[0], h // (heads // kv_heads), c], "float32"
                )
        for c in T.serial(size):
            out[b, h, c] = T.cast(total[c] / weight[0], "bfloat16")
        lse[b, h] = (highest[0] + T.log(weight[0])) * T.float32(LOG2_E)


def compile_for(arch: str, heads: int = 32, kv_heads: int = 8, size: int = 128) -> tvm.runtime.Executable:
    """The kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernel = decode_cpu.specialize(heads=heads, kv_heads=kv_heads, size=size)
        return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")
    lanes = size // VECTOR
    sizes = {"heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "size": size}
    kernels = {
        "chunk_cuda": chunk_cuda.specialize(**sizes, lanes=lanes, teams=THREADS // lanes),
        "join_cuda": join_cuda.specialize(heads=heads, size=size),
    }
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline="tirx")


@cache
def kernels_for(device: torch.device, heads: int, kv_heads: int, size: int):
    """The two kernels on CUDA, the one of the CPU there."""
    if device.type == "cpu":
        return (compile_for("llvm", heads, kv_heads, size)["main"],)
    major, minor = torch.cuda.get_device_capability(device)
    executable = compile_for(f"sm_{major}{minor}a", heads, kv_heads, size)
    return executable["chunk_cuda"], executable["join_cuda"]


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, heads, size = q.shape
    keys, values = k_cache.squeeze(1), v_cache.squeeze(1)
    output = torch.empty_like(q)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=q.device)
    kernels = kernels_for(q.device, heads, keys.shape[1], size)
    if not q.is_cuda:
        kernels[0](q, keys, values, kv_indptr, kv_indices, sm_scale, output, lse)
        return output, lse
    chunks = len(kv_indices) // CHUNK + sequences  # no fewer than there can be
    totals = torch.empty(chunks, heads, size, dtype=torch.float32, device=q.device)
    highest = torch.empty(chunks, heads, dtype=torch.float32, device=q.device)
    weights = torch.empty_like(highest)
    kernels[0](q, keys, values, kv_indptr, kv_indices, sm_scale, totals, highest, weights)
    kernels[1](kv_indptr, totals, highest, weights, output, lse)
    return output, lse
