"""p15, causal latent prefill over single-token pages, in TIRx.

CUDA: a thread block has one query and goes through the tokens that it sees, 32 at a time: both products run on the
tensor cores (m16n8k16, the 16 heads being the rows). For the logits each of four warps has a quarter of the channels,
and the quarters are added up in shared memory; then every warp has the same softmax and a quarter of the latents. The
next tokens are copied to shared memory meanwhile. Which sequence a query belongs to is found on the device. CPU: plain
loops, a head at a time.
"""

import math
from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

KEYS = 32  # tokens at a time
HEADS = 16
WARPS = 4
THREADS = 32 * WARPS
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
GROUP = 3  # steps of a product that add up on the tensor cores, which round coarsely
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@T.jit
def prefill_cuda(
    qn: T.handle,
    qp: T.handle,
    ck: T.handle,
    kp: T.handle,
    qo: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    latent: T.constexpr,
    rotary: T.constexpr,
    steps: T.constexpr,
    columns: T.constexpr,
):
    """`steps` of 16 channels and `columns` of 8 latents a warp; `scale` takes a product to a power of two."""
    queries = T.int32()
    pool = T.int32()
    offsets = T.int32()
    listed = T.int32()
    q_nope = T.match_buffer(qn, (queries, HEADS, latent), "bfloat16")
    q_pe = T.match_buffer(qp, (queries, HEADS, rotary), "bfloat16")
    ckv_cache = T.match_buffer(ck, (pool, latent), "bfloat16")
    kpe_cache = T.match_buffer(kp, (pool, rotary), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    token_offsets = T.match_buffer(po, (offsets,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    out = T.match_buffer(o, (queries, HEADS, latent), "bfloat16")
    lse = T.match_buffer(l, (queries, HEADS), "float32")
    T.device_entry()
    query = T.cta_id([queries])
    thread = T.thread_id([THREADS])
    # The queries, then twice the keys.
    shared = T.alloc_buffer((HEADS + 2 * KEYS, latent + rotary + PADDING), "bfloat16", scope="shared.dyn")
    partial = T.alloc_shared((WARPS, KEYS // 8, 4, 32), "float32")
    found = T.alloc_shared((1,), "int32")
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
    sums = T.alloc_local((KEYS // 8, 4), "float32")
    logits = T.alloc_local((KEYS // 8, 4), "float32")
    total = T.alloc_local((columns, 4), "float32")
    top = T.alloc_local((2,), "float32")
    weight = T.alloc_local((2,), "float32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    digits = T.alloc_local((1,), "int32")
    rounded = T.alloc_local((2,), "bfloat16")
    lane[0] = thread % 32
    warp[0] = thread // 32
    for turn in T.serial((offsets + THREADS - 2) // THREADS):
        if (
            turn * THREADS + thread < offsets - 1
            and query_offsets[turn * THREADS + thread] <= query
            and query_offsets[turn * THREADS + thread + 1] > query
        ):
            found[0] = turn * THREADS + thread
    T.cuda.cta_sync()
    sequence[0] = found[0]
    start[0] = token_offsets[sequence[0]]
    # The last query sees all tokens, each query before it one less.
    count[0] = token_offsets[sequence[0] + 1] - start[0] - (query_offsets[sequence[0] + 1] - 1 - query)
    if count[0] > 0:
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
                        query,
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
                        query,
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
                    token[0] = tokens[
                        start[0] + T.min(tile * KEYS + (step * THREADS + thread) // (latent // VECTOR), count[0] - 1)
                    ]
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                HEADS + stage[0] * KEYS + (step * THREADS + thread) // (latent // VECTOR),
                                (step * THREADS + thread) % (latent // VECTOR) * VECTOR,
                            ]
                        ),
                        T.address_of(ckv_cache[token[0], (step * THREADS + thread) % (latent // VECTOR) * VECTOR]),
                        16,
                    )
                for step in T.unroll(KEYS * rotary // (VECTOR * THREADS)):
                    token[0] = tokens[
                        start[0] + T.min(tile * KEYS + (step * THREADS + thread) // (rotary // VECTOR), count[0] - 1)
                    ]
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                HEADS + stage[0] * KEYS + (step * THREADS + thread) // (rotary // VECTOR),
                                latent + (step * THREADS + thread) % (rotary // VECTOR) * VECTOR,
                            ]
                        ),
                        T.address_of(kpe_cache[token[0], (step * THREADS + thread) % (rotary // VECTOR) * VECTOR]),
                        16,
                    )
            T.ptx.cp_async.commit_group()
            if tile == 0:
                for step in T.unroll(steps):
                    T.ptx.ldmatrix(
                        *(False, 4, ".b16"),
                        T.address_of(shared[lane[0] % 16, (warp[0] * steps + step) * 16 + lane[0] // 16 * 8]),
                        *[T.address_of(left[step, i]) for i in range(4)],
                    )
            else:
                stage[0] = 1 - stage[0]
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        logits[column, e] = T.float32(0)
                for part in T.unroll(steps // GROUP):
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            sums[column, e] = T.float32(0)
                    for step in T.unroll(GROUP):
                        for pair in T.unroll(KEYS // 16):
                            T.ptx.ldmatrix(
                                *(False, 4, ".b16"),
                                T.address_of(
                                    shared[
                                        HEADS + stage[0] * KEYS + pair * 16 + lane[0] // 16 * 8 + lane[0] % 8,
                                        (warp[0] * steps + part * GROUP + step) * 16 + lane[0] // 8 % 2 * 8,
                                    ]
                                ),
                                *[T.address_of(right[i]) for i in range(4)],
                            )
                            for side in T.unroll(2):
                                T.ptx.mma(
                                    *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                    [T.address_of(sums[pair * 2 + side, i]) for i in range(4)],
                                    [T.address_of(left[part * GROUP + step, i]) for i in range(4)],
                                    [T.address_of(right[side * 2 + i]) for i in range(2)],
                                    [T.address_of(sums[pair * 2 + side, i]) for i in range(4)],
                                )
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            logits[column, e] = logits[column, e] + sums[column, e]
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        partial[warp[0], column, e, lane[0]] = logits[column, e]
                T.cuda.cta_sync()
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        logits[column, e] = partial[0, column, e, lane[0]]
                        for w in T.unroll(WARPS - 1):
                            logits[column, e] = logits[column, e] + partial[w + 1, column, e, lane[0]]
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
            shrink[0] = T.float32(1) / weight[half]
            for column in T.unroll(columns):
                for e in T.unroll(2):
                    rounded[e] = T.cast(total[column, 2 * half + e] * shrink[0], "bfloat16")
                for e in T.vectorized(2):
                    out[query, lane[0] // 4 + 8 * half, ((warp[0] * columns + column) * 4 + lane[0] % 4) * 2 + e] = (
                        rounded[e]
                    )
            if warp[0] == 0 and lane[0] % 4 == 0:
                # The logarithm of a number near 1 and its power of two: the fast logarithm is accurate only there.
                digits[0] = (T.reinterpret("int32", weight[half]) - 0x3F400000) >> 23
                shrink[0] = T.log2(T.reinterpret("float32", T.reinterpret("int32", weight[half]) - (digits[0] << 23)))
                lse[query, lane[0] // 4 + 8 * half] = top[half] * scale + (T.cast(digits[0], "float32") + shrink[0])


@T.jit
def prefill_cpu(
    qn: T.handle,
    qp: T.handle,
    ck: T.handle,
    kp: T.handle,
    qo: T.handle,
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
    queries = T.int32()
    offsets = T.int32()
    pool = T.int32()
    listed = T.int32()
    q_nope = T.match_buffer(qn, (queries, heads, latent), "bfloat16")
    q_pe = T.match_buffer(qp, (queries, heads, rotary), "bfloat16")
    ckv_cache = T.match_buffer(ck, (pool, latent), "bfloat16")
    kpe_cache = T.match_buffer(kp, (pool, rotary), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    token_offsets = T.match_buffer(po, (offsets,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    out = T.match_buffer(o, (queries, heads, latent), "bfloat16")
    lse = T.match_buffer(l, (queries, heads), "float32")
    total = T.alloc_buffer((latent,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    highest = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    token = T.alloc_buffer((1,), "int32", scope="local")
    for b, h in T.grid(offsets - 1, heads):
        for query in T.serial(query_offsets[b + 1] - query_offsets[b]):
            highest[0] = T.float32(LOWEST)
            weight[0] = T.float32(0)
            for c in T.serial(latent):
                total[c] = T.float32(0)
            for t in T.serial(
                token_offsets[b + 1] - token_offsets[b] - (query_offsets[b + 1] - query_offsets[b] - 1 - query)
            ):
                token[0] = tokens[token_offsets[b] + t]
                logit[0] = T.float32(0)
                for c in T.serial(latent):
                    logit[0] = logit[0] + T.cast(q_nope[query_offsets[b] + query, h, c], "float32") * T.cast(
                        ckv_cache[token[0], c], "float32"
                    )
                for c in T.serial(rotary):
                    logit[0] = logit[0] + T.cast(q_pe[query_offsets[b] + query, h, c], "float32") * T.cast(
                        kpe_cache[token[0], c], "float32"
                    )
                logit[0] = logit[0] * scale
                shrink[0] = T.exp2(highest[0] - T.max(highest[0], logit[0]))
                highest[0] = T.max(highest[0], logit[0])
                logit[0] = T.exp2(logit[0] - highest[0])
                weight[0] = weight[0] * shrink[0] + logit[0]
                for c in T.serial(latent):
                    total[c] = total[c] * shrink[0] + logit[0] * T.cast(ckv_cache[token[0], c], "float32")
            for c in T.serial(latent):
                out[query_offsets[b] + query, h, c] = T.cast(total[c] / weight[0], "bfloat16")
            lse[query_offsets[b] + query, h] = highest[0] + T.log(weight[0]) / T.float32(math.log(2))


def compile_for(arch: str, heads: int = HEADS, latent: int = 512, rotary: int = 64) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernel = prefill_cpu.specialize(heads=heads, latent=latent, rotary=rotary)
        return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")
    steps, columns = (latent + rotary) // (16 * WARPS), latent // (8 * WARPS)
    assert heads == HEADS and (latent + rotary) % (16 * WARPS * GROUP) == 0 and latent % (16 * WARPS) == 0
    assert HEADS * rotary % (VECTOR * THREADS) == 0
    kernel = prefill_cuda.specialize(latent=latent, rotary=rotary, steps=steps, columns=columns)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, heads: int, latent: int, rotary: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, heads, latent, rotary)["main"]


def solve(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, latent = q_nope.shape
    output = torch.empty_like(q_nope)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q_nope.device)
    kernel_for(q_nope.device, heads, latent, q_pe.shape[2])(
        *(q_nope, q_pe, ckv_cache.squeeze(1), kpe_cache.squeeze(1), qo_indptr, kv_indptr, kv_indices),
        *(sm_scale / math.log(2), output, lse),
    )
    return output, lse
