"""p14, latent decode over single-token pages, in TIRx.

CUDA: two kernels, as in split-context flash decoding. The contexts are cut into chunks, a thread block each, which go
through 32 tokens at a time: both products run on the tensor cores (m16n8k16, the 16 heads being the rows). For the
logits each of four warps has half of the tokens and half of the channels, and the halves are added up in shared memory;
then every warp has the same softmax and a quarter of the latents. The next tokens are copied to shared memory
meanwhile. The second kernel joins the chunks of a sequence, several at a time. A sequence's chunks begin at a number
that follows from its offset alone, so nothing waits for the offsets to reach the host. CPU: plain loops, a head at a
time.
"""

import math
from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

CHUNK = 320  # tokens
KEYS = 32  # tokens at a time
HEADS = 16
WARPS = 4
THREADS = 32 * WARPS
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
GROUP = 3  # steps of a product that add up on the tensor cores, which round coarsely
EXTRA = 4  # floats behind a partial result: its highest logit and its weight, and two to keep rows at 16 bytes
JOINED = 8  # partial results that are joined at a time
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@T.jit
def chunk_cuda(
    qn: T.handle,
    qp: T.handle,
    ck: T.handle,
    kp: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    pa: T.handle,
    *,
    latent: T.constexpr,
    rotary: T.constexpr,
    steps: T.constexpr,
    columns: T.constexpr,
):
    """`steps` of 16 channels (half) and `columns` of 8 latents a warp; `scale` takes a product to a power of two."""
    sequences = T.int32()
    pool = T.int32()
    offsets = T.int32()
    listed = T.int32()
    chunks = T.int32()
    q_nope = T.match_buffer(qn, (sequences, HEADS, latent), "bfloat16")
    q_pe = T.match_buffer(qp, (sequences, HEADS, rotary), "bfloat16")
    ckv_cache = T.match_buffer(ck, (pool, 1, latent), "bfloat16")
    kpe_cache = T.match_buffer(kp, (pool, 1, rotary), "bfloat16")
    token_offsets = T.match_buffer(po, (offsets,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    partials = T.match_buffer(pa, (chunks, HEADS, latent + EXTRA), "float32")
    T.device_entry()
    chunk = T.cta_id([chunks])
    thread = T.thread_id([THREADS])
    # The queries, then twice the keys.
    shared = T.alloc_buffer((HEADS + 2 * KEYS, latent + rotary + PADDING), "bfloat16", scope="shared.dyn")
    partial = T.alloc_shared((2, KEYS // 8, 32, 4), "float32")
    chosen = T.alloc_shared((CHUNK,), "int32")
    found = T.alloc_shared((3,), "int32")
    lane = T.alloc_local((1,), "int32")
    warp = T.alloc_local((1,), "int32")
    sequence = T.alloc_local((1,), "int32")
    start = T.alloc_local((1,), "int32")
    count = T.alloc_local((1,), "int32")
    tiles = T.alloc_local((1,), "int32")
    stage = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    # Four values an atom: two neighbouring columns of a row, then the same of the row eight further down.
    left = T.alloc_local((steps, 4), "uint32")
    powers = T.alloc_local((4,), "uint32")
    right = T.alloc_local((4,), "uint32")
    sums = T.alloc_local((KEYS // 16, 4), "float32")
    halves = T.alloc_local((KEYS // 16, 4), "float32")
    others = T.alloc_local((KEYS // 8, 4), "float32")
    logits = T.alloc_local((KEYS // 8, 4), "float32")
    total = T.alloc_local((columns, 4), "float32")
    top = T.alloc_local((2,), "float32")
    weight = T.alloc_local((2,), "float32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    lane[0] = thread % 32
    warp[0] = thread // 32
    # The chunk's sequence, its first token and how many tokens are left from there on.
    for turn in T.serial((offsets + THREADS - 2) // THREADS):
        if turn * THREADS + thread < offsets - 1:
            start[0] = token_offsets[turn * THREADS + thread] // CHUNK + turn * THREADS + thread
            count[0] = token_offsets[turn * THREADS + thread + 1] // CHUNK + turn * THREADS + thread + 1
            if start[0] <= chunk and count[0] > chunk:
                found[0] = turn * THREADS + thread
                found[1] = token_offsets[turn * THREADS + thread] + (chunk - start[0]) * CHUNK
                found[2] = token_offsets[turn * THREADS + thread + 1] - found[1]
    T.cuda.cta_sync()
    sequence[0] = found[0]
    start[0] = found[1]
    count[0] = T.min(found[2], CHUNK)
    if count[0] > 0:
        # Places past the last token repeat it.
        for turn in T.unroll((CHUNK + THREADS - 1) // THREADS):
            if turn * THREADS + thread < CHUNK:
                chosen[turn * THREADS + thread] = tokens[start[0] + T.min(turn * THREADS + thread, count[0] - 1)]
        for step in T.unroll(HEADS * latent // (VECTOR * THREADS)):
            T.ptx.cp_async(
                T.address_of(
                    shared[
                        (step * THREADS + thread) // (latent // VECTOR),
                        (step * THREADS + thread) % (latent // VECTOR) * VECTOR,
                    ]
                ),
                T.address_of(
                    q_nope[
                        sequence[0],
                        (step * THREADS + thread) // (latent // VECTOR),
                        (step * THREADS + thread) % (latent // VECTOR) * VECTOR,
                    ]
                ),
                16,
            )
        for step in T.unroll(HEADS * rotary // (VECTOR * THREADS)):
            T.ptx.cp_async(
                T.address_of(
                    shared[
                        (step * THREADS + thread) // (rotary // VECTOR),
                        latent + (step * THREADS + thread) % (rotary // VECTOR) * VECTOR,
                    ]
                ),
                T.address_of(
                    q_pe[
                        sequence[0],
                        (step * THREADS + thread) // (rotary // VECTOR),
                        (step * THREADS + thread) % (rotary // VECTOR) * VECTOR,
                    ]
                ),
                16,
            )
        T.ptx.cp_async.commit_group()
        T.cuda.cta_sync()
        tiles[0] = (count[0] + KEYS - 1) // KEYS
        for half in T.unroll(2):
            top[half] = T.float32(LOWEST)
            weight[half] = T.float32(0)
        for column in T.unroll(columns):
            for e in T.unroll(4):
                total[column, e] = T.float32(0)
        for tile in T.serial(tiles[0] + 1):
            # The first turn only starts the first copies; every other one starts the next copies, then computes.
            stage[0] = tile % 2
            T.ptx.cp_async.wait_group(0)
            T.cuda.cta_sync()
            if tile < tiles[0]:
                for step in T.unroll(KEYS * latent // (VECTOR * THREADS)):
                    token[0] = chosen[tile * KEYS + (step * THREADS + thread) // (latent // VECTOR)]
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                HEADS + stage[0] * KEYS + (step * THREADS + thread) // (latent // VECTOR),
                                (step * THREADS + thread) % (latent // VECTOR) * VECTOR,
                            ]
                        ),
                        T.address_of(ckv_cache[token[0], 0, (step * THREADS + thread) % (latent // VECTOR) * VECTOR]),
                        16,
                    )
                for step in T.unroll(KEYS * rotary // (VECTOR * THREADS)):
                    token[0] = chosen[tile * KEYS + (step * THREADS + thread) // (rotary // VECTOR)]
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                HEADS + stage[0] * KEYS + (step * THREADS + thread) // (rotary // VECTOR),
                                latent + (step * THREADS + thread) % (rotary // VECTOR) * VECTOR,
                            ]
                        ),
                        T.address_of(kpe_cache[token[0], 0, (step * THREADS + thread) % (rotary // VECTOR) * VECTOR]),
                        16,
                    )
            T.ptx.cp_async.commit_group()
            if tile == 0:
                for step in T.unroll(steps):
                    T.ptx.ldmatrix(
                        *(False, 4, ".b16"),
                        T.address_of(shared[lane[0] % 16, (warp[0] // 2 * steps + step) * 16 + lane[0] // 16 * 8]),
                        *[T.address_of(left[step, i]) for i in range(4)],
                    )
            else:
                stage[0] = 1 - stage[0]
                # This warp's half of the channels, and of the tokens.
                for side in T.unroll(2):
                    for e in T.unroll(4):
                        halves[side, e] = T.float32(0)
                for part in T.unroll(steps // GROUP):
                    for side in T.unroll(2):
                        for e in T.unroll(4):
                            sums[side, e] = T.float32(0)
                    for step in T.unroll(GROUP):
                        T.ptx.ldmatrix(
                            *(False, 4, ".b16"),
                            T.address_of(
                                shared[
                                    HEADS + stage[0] * KEYS + warp[0] % 2 * 16 + lane[0] // 16 * 8 + lane[0] % 8,
                                    (warp[0] // 2 * steps + part * GROUP + step) * 16 + lane[0] // 8 % 2 * 8,
                                ]
                            ),
                            *[T.address_of(right[i]) for i in range(4)],
                        )
                        for side in T.unroll(2):
                            T.ptx.mma(
                                *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                [T.address_of(sums[side, i]) for i in range(4)],
                                [T.address_of(left[part * GROUP + step, i]) for i in range(4)],
                                [T.address_of(right[side * 2 + i]) for i in range(2)],
                                [T.address_of(sums[side, i]) for i in range(4)],
                            )
                    for side in T.unroll(2):
                        for e in T.unroll(4):
                            halves[side, e] = halves[side, e] + sums[side, e]
                for side in T.unroll(2):
                    for e in T.vectorized(4):
                        partial[warp[0] // 2, warp[0] % 2 * 2 + side, lane[0], e] = halves[side, e]
                T.cuda.cta_sync()
                for column in T.unroll(KEYS // 8):
                    for e in T.vectorized(4):
                        logits[column, e] = partial[0, column, lane[0], e]
                    for e in T.vectorized(4):
                        others[column, e] = partial[1, column, lane[0], e]
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        logits[column, e] = logits[column, e] + others[column, e]
                        if (tile - 1) * KEYS + column * 8 + lane[0] % 4 * 2 + e % 2 >= count[0]:
                            logits[column, e] = T.float32(MASKED)
                for half in T.unroll(2):
                    peak[0] = top[half]
                    for column in T.unroll(KEYS // 8):
                        peak[0] = T.max(peak[0], logits[column, 2 * half])
                        peak[0] = T.max(peak[0], logits[column, 2 * half + 1])
                    peak[0] = T.cuda.warp_max(peak[0], 4)
                    shrink[0] = T.exp2((top[half] - peak[0]) * scale)
                    top[half] = peak[0]
                    weight[half] = weight[half] * shrink[0]
                    for column in T.unroll(KEYS // 8):
                        for side in T.unroll(2):
                            logits[column, 2 * half + side] = T.exp2(
                                (logits[column, 2 * half + side] - peak[0]) * scale
                            )
                            weight[half] = weight[half] + logits[column, 2 * half + side]
                    for column in T.unroll(columns):
                        for side in T.unroll(2):
                            total[column, 2 * half + side] = total[column, 2 * half + side] * shrink[0]
                # The first product's sums are, rounded, the second's left operand: two atoms of 8 keys make one of 16.
                for step in T.unroll(KEYS // 16):
                    for i in T.unroll(4):
                        powers[i] = T.cuda.float22bfloat162_rn(
                            logits[step * 2 + i // 2, i % 2 * 2], logits[step * 2 + i // 2, i % 2 * 2 + 1]
                        )
                    for pair in T.unroll(columns // 2):
                        T.ptx.ldmatrix(
                            *(True, 4, ".b16"),
                            T.address_of(
                                shared[
                                    HEADS + stage[0] * KEYS + step * 16 + lane[0] % 16,
                                    warp[0] * (columns * 8) + pair * 16 + lane[0] // 16 * 8,
                                ]
                            ),
                            *[T.address_of(right[i]) for i in range(4)],
                        )
                        for side in T.unroll(2):
                            T.ptx.mma(
                                *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                [T.address_of(total[pair * 2 + side, i]) for i in range(4)],
                                [T.address_of(powers[i]) for i in range(4)],
                                [T.address_of(right[side * 2 + i]) for i in range(2)],
                                [T.address_of(total[pair * 2 + side, i]) for i in range(4)],
                            )
        for half in T.unroll(2):
            weight[half] = T.cuda.warp_sum(weight[half], 4)
            for column in T.unroll(columns):
                for side in T.unroll(2):
                    partials[
                        chunk, lane[0] // 4 + 8 * half, (warp[0] * columns + column) * 8 + lane[0] % 4 * 2 + side
                    ] = total[column, 2 * half + side]
            if warp[0] == 0 and lane[0] % 4 == 0:
                partials[chunk, lane[0] // 4 + 8 * half, latent] = top[half] * scale
                partials[chunk, lane[0] // 4 + 8 * half, latent + 1] = weight[half]


@T.jit
def join_cuda(po: T.handle, pa: T.handle, o: T.handle, l: T.handle, *, latent: T.constexpr):
    sequences = T.int32()
    offsets = T.int32()
    chunks = T.int32()
    token_offsets = T.match_buffer(po, (offsets,), "int32")
    partials = T.match_buffer(pa, (chunks, HEADS, latent + EXTRA), "float32")
    out = T.match_buffer(o, (sequences, HEADS, latent), "bfloat16")
    lse = T.match_buffer(l, (sequences, HEADS), "float32")
    T.device_entry()
    head, sequence = T.cta_id([HEADS, sequences])
    thread = T.thread_id([latent // 4])
    first = T.alloc_local((1,), "int32")
    count = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    weight = T.alloc_local((1,), "float32")
    part = T.alloc_local((JOINED, 4), "float32")
    tops = T.alloc_local((JOINED,), "float32")
    weights = T.alloc_local((JOINED,), "float32")
    joined = T.alloc_local((4,), "float32")
    rounded = T.alloc_local((4,), "bfloat16")
    digits = T.alloc_local((1,), "int32")
    first[0] = token_offsets[sequence] // CHUNK + sequence
    count[0] = (token_offsets[sequence + 1] - token_offsets[sequence] + CHUNK - 1) // CHUNK
    peak[0] = T.float32(LOWEST)
    weight[0] = T.float32(0)
    for e in T.unroll(4):
        joined[e] = T.float32(0)
    for turn in T.serial((count[0] + JOINED - 1) // JOINED):
        for u in T.unroll(JOINED):  # places past the last repeat it
            place[0] = first[0] + T.min(turn * JOINED + u, count[0] - 1)
            for e in T.vectorized(4):
                part[u, e] = partials[place[0], head, thread * 4 + e]
            tops[u] = partials[place[0], head, latent]
            weights[u] = partials[place[0], head, latent + 1]
        shrink[0] = peak[0]
        for u in T.unroll(JOINED):
            if turn * JOINED + u >= count[0]:
                tops[u] = T.float32(MASKED)
            peak[0] = T.max(peak[0], tops[u])
        shrink[0] = T.exp2(shrink[0] - peak[0])
        weight[0] = weight[0] * shrink[0]
        for e in T.unroll(4):
            joined[e] = joined[e] * shrink[0]
        for u in T.unroll(JOINED):
            tops[u] = T.exp2(tops[u] - peak[0])
            weight[0] = weight[0] + weights[u] * tops[u]
            for e in T.unroll(4):
                joined[e] = joined[e] + part[u, e] * tops[u]
    for e in T.unroll(4):
        rounded[e] = T.cast(joined[e] / T.max(weight[0], T.float32(1e-30)), "bfloat16")
    for e in T.vectorized(4):
        out[sequence, head, thread * 4 + e] = rounded[e]
    if thread == 0:
        if count[0] == 0:
            lse[sequence, head] = T.float32(-float("inf"))
        else:
            # The logarithm of a number near 1 and its power of two: the fast logarithm is accurate only there.
            digits[0] = (T.reinterpret("int32", weight[0]) - 0x3F400000) >> 23
            shrink[0] = T.log2(T.reinterpret("float32", T.reinterpret("int32", weight[0]) - (digits[0] << 23)))
            lse[sequence, head] = peak[0] + (T.cast(digits[0], "float32") + shrink[0])


@T.jit
def decode_cpu(
    qn: T.handle,
    qp: T.handle,
    ck: T.handle,
    kp: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    latent: T.constexpr,
    rotary: T.constexpr,
):
    sequences = T.int32()
    pool = T.int32()
    listed = T.int32()
    q_nope = T.match_buffer(qn, (sequences, heads, latent), "bfloat16")
    q_pe = T.match_buffer(qp, (sequences, heads, rotary), "bfloat16")
    ckv_cache = T.match_buffer(ck, (pool, 1, latent), "bfloat16")
    kpe_cache = T.match_buffer(kp, (pool, 1, rotary), "bfloat16")
    token_offsets = T.match_buffer(po, (sequences + 1,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    out = T.match_buffer(o, (sequences, heads, latent), "bfloat16")
    lse = T.match_buffer(l, (sequences, heads), "float32")
    total = T.alloc_buffer((latent,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    highest = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    token = T.alloc_buffer((1,), "int32", scope="local")
    for b, h in T.grid(sequences, heads):
        highest[0] = T.float32(LOWEST)
        weight[0] = T.float32(0)
        for c in T.serial(latent):
            total[c] = T.float32(0)
        for t in T.serial(token_offsets[b + 1] - token_offsets[b]):
            token[0] = tokens[token_offsets[b] + t]
            logit[0] = T.float32(0)
            for c in T.serial(latent):
                logit[0] = logit[0] + T.cast(q_nope[b, h, c], "float32") * T.cast(ckv_cache[token[0], 0, c], "float32")
            for c in T.serial(rotary):
                logit[0] = logit[0] + T.cast(q_pe[b, h, c], "float32") * T.cast(kpe_cache[token[0], 0, c], "float32")
            logit[0] = logit[0] * scale
            shrink[0] = T.exp2(highest[0] - T.max(highest[0], logit[0]))
            highest[0] = T.max(highest[0], logit[0])
            logit[0] = T.exp2(logit[0] - highest[0])
            weight[0] = weight[0] * shrink[0] + logit[0]
            for c in T.serial(latent):
                total[c] = total[c] * shrink[0] + logit[0] * T.cast(ckv_cache[token[0], 0, c], "float32")
        for c in T.serial(latent):
            out[b, h, c] = T.cast(total[c] / weight[0], "bfloat16")
        lse[b, h] = highest[0] + T.log(weight[0]) / T.float32(math.log(2))


def compile_for(arch: str, heads: int = HEADS, latent: int = 512, rotary: int = 64) -> tvm.runtime.Executable:
    """The kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernel = decode_cpu.specialize(heads=heads, latent=latent, rotary=rotary)
        return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")
    steps, columns = (latent + rotary) // 32, latent // (8 * WARPS)
    assert heads == HEADS and (latent + rotary) % (32 * GROUP) == 0 and latent % (16 * WARPS) == 0
    assert HEADS * rotary % (VECTOR * THREADS) == 0
    kernels = {
        "chunk_cuda": chunk_cuda.specialize(latent=latent, rotary=rotary, steps=steps, columns=columns),
        "join_cuda": join_cuda.specialize(latent=latent),
    }
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline="tirx")


@cache
def kernels_for(device: torch.device, heads: int, latent: int, rotary: int):
    """The two kernels on CUDA, the one of the CPU there."""
    if device.type == "cpu":
        return compile_for("llvm", heads, latent, rotary)["main"], None
    major, minor = torch.cuda.get_device_capability(device)
    executable = compile_for(f"sm_{major}{minor}a", heads, latent, rotary)
    return executable["chunk_cuda"], executable["join_cuda"]


def solve(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, heads, latent = q_nope.shape
    attend, join = kernels_for(q_nope.device, heads, latent, q_pe.shape[2])
    inputs = (q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale / math.log(2))
    if join is None:
        output = torch.empty_like(q_nope)
        lse = torch.empty(sequences, heads, dtype=torch.float32)
        attend(*inputs, output, lse)
        return output, lse
    chunks = kv_indices.shape[0] // CHUNK + sequences  # no fewer than there can be
    partials = torch.empty(chunks, heads, latent + EXTRA, dtype=torch.float32, device=q_nope.device)
    attend(*inputs, partials)
    # Made while the first kernel runs.
    output = torch.empty_like(q_nope)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=q_nope.device)
    join(kv_indptr, partials, output, lse)
    return output, lse
