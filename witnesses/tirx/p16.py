"""p16, causal latent prefill in expanded form, in TIRx.

CUDA: one flash attention kernel. A thread block has 64 queries of a head, a warp 16 of them, and goes through the keys
that they see, 64 at a time: the products run on the tensor cores (m16n8k16, float32 sums), the softmax runs along in
float32, and the next keys and values are copied to shared memory meanwhile. Which sequence a block belongs to is found
on the device: a sequence's blocks begin at a number that follows from its offset alone. CPU: plain loops.
"""

import math
from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

WARPS = 4
THREADS = 32 * WARPS
ROWS = 16 * WARPS
KEYS = 64
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
GROUP = 4  # steps of a product that add up on the tensor cores, which round coarsely
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@T.jit
def prefill_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    qo: T.handle,
    ko: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
    key_row: T.constexpr,
    value_row: T.constexpr,
    key_chunks: T.constexpr,
    value_chunks: T.constexpr,
    values_at: T.constexpr,
):
    """In shared memory rows are `key_row` and `value_row` long, and the values begin at `values_at`; `key_chunks` and
    `value_chunks` are 16 bytes. `scale` takes a product to a power of two."""
    all_queries = T.int32()
    all_keys = T.int32()
    offsets = T.int32()
    q = T.match_buffer(qh, (all_queries, heads, key_size), "bfloat16")
    k = T.match_buffer(kh, (all_keys, heads, key_size), "bfloat16")
    v = T.match_buffer(vh, (all_keys, heads, value_size), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    key_offsets = T.match_buffer(ko, (offsets,), "int32")
    out = T.match_buffer(o, (all_queries, heads, value_size), "bfloat16")
    lse = T.match_buffer(l, (all_queries, heads), "float32")
    T.device_entry()
    block, head = T.cta_id([all_queries // ROWS + offsets - 1, heads])
    thread = T.thread_id([THREADS])
    # The rows of the queries (later of the output), then twice the keys, then twice the values.
    shared = T.alloc_buffer((values_at + 2 * KEYS * value_row,), "bfloat16", scope="shared.dyn")
    found = T.alloc_shared((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    warp = T.alloc_local((1,), "int32")
    first_query = T.alloc_local((1,), "int32")
    first_key = T.alloc_local((1,), "int32")
    keys = T.alloc_local((1,), "int32")
    prefix = T.alloc_local((1,), "int32")
    rows = T.alloc_local((1,), "int32")
    first_row = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    tiles = T.alloc_local((1,), "int32")
    stage = T.alloc_local((1,), "int32")
    last_seen = T.alloc_local((2,), "int32")  # the last key that a row sees
    # Four values an atom: two neighbouring columns of a row, then the same of the row eight further down.
    sums = T.alloc_local((KEYS // 8, 4), "float32")
    logits = T.alloc_local((KEYS // 8, 4), "float32")
    total = T.alloc_local((value_size // 8, 4), "float32")
    left = T.alloc_local((4,), "uint32")
    right = T.alloc_local((4,), "uint32")
    top = T.alloc_local((2,), "float32")
    weight = T.alloc_local((2,), "float32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    part = T.alloc_local((VECTOR,), "bfloat16")
    digits = T.alloc_local((1,), "int32")
    lane[0] = thread % 32
    warp[0] = thread // 32
    for turn in T.serial((offsets + THREADS - 2) // THREADS):
        if turn * THREADS + thread < offsets - 1:
            first_query[0] = query_offsets[turn * THREADS + thread] // ROWS + turn * THREADS + thread
            row[0] = query_offsets[turn * THREADS + thread + 1] // ROWS + turn * THREADS + thread + 1
            if first_query[0] <= block and row[0] > block:
                found[0] = turn * THREADS + thread
    T.cuda.cta_sync()
    first_query[0] = query_offsets[found[0]]
    first_key[0] = key_offsets[found[0]]
    rows[0] = query_offsets[found[0] + 1] - first_query[0]
    keys[0] = key_offsets[found[0] + 1] - first_key[0]
    prefix[0] = keys[0] - rows[0]
    first_row[0] = (block - (first_query[0] // ROWS + found[0])) * ROWS
    if first_row[0] < rows[0]:
        for step in T.unroll(ROWS * key_chunks // THREADS):
            row[0] = first_query[0] + T.min(first_row[0] + (step * THREADS + thread) // key_chunks, rows[0] - 1)
            T.ptx.cp_async(
                T.address_of(
                    shared[
                        (step * THREADS + thread) // key_chunks * key_row
                        + (step * THREADS + thread) % key_chunks * VECTOR
                    ]
                ),
                T.address_of(q[row[0], head, (step * THREADS + thread) % key_chunks * VECTOR]),
                16,
            )
        T.ptx.cp_async.commit_group()
        for half in T.unroll(2):
            top[half] = T.float32(LOWEST)
            weight[half] = T.float32(0)
            last_seen[half] = first_row[0] + warp[0] * 16 + lane[0] // 4 + 8 * half + prefix[0]
        for column in T.unroll(value_size // 8):
            for e in T.unroll(4):
                total[column, e] = T.float32(0)
        tiles[0] = (T.min(first_row[0] + ROWS, rows[0]) - 1 + prefix[0] + KEYS) // KEYS
        for tile in T.serial(tiles[0] + 1):
            # The first turn only starts the first copies; every other one starts the next copies, then computes.
            stage[0] = tile % 2
            T.ptx.cp_async.wait_group(0)
            T.cuda.cta_sync()
            if tile < tiles[0]:
                # Copies past the last key repeat it.
                for step in T.unroll(KEYS * key_chunks // THREADS):
                    row[0] = first_key[0] + T.min(tile * KEYS + (step * THREADS + thread) // key_chunks, keys[0] - 1)
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                (ROWS + stage[0] * KEYS + (step * THREADS + thread) // key_chunks) * key_row
                                + (step * THREADS + thread) % key_chunks * VECTOR
                            ]
                        ),
                        T.address_of(k[row[0], head, (step * THREADS + thread) % key_chunks * VECTOR]),
                        16,
                    )
                for step in T.unroll(KEYS * value_chunks // THREADS):
                    row[0] = first_key[0] + T.min(tile * KEYS + (step * THREADS + thread) // value_chunks, keys[0] - 1)
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                values_at
                                + (stage[0] * KEYS + (step * THREADS + thread) // value_chunks) * value_row
                                + (step * THREADS + thread) % value_chunks * VECTOR
                            ]
                        ),
                        T.address_of(v[row[0], head, (step * THREADS + thread) % value_chunks * VECTOR]),
                        16,
                    )
            T.ptx.cp_async.commit_group()
            if tile > 0:
                stage[0] = 1 - stage[0]
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        logits[column, e] = T.float32(0)
                for group in T.unroll(key_size // (16 * GROUP)):
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            sums[column, e] = T.float32(0)
                    for step in T.unroll(GROUP):
                        T.ptx.ldmatrix(
                            *(False, 4, ".b16"),
                            T.address_of(
                                shared[
                                    (warp[0] * 16 + lane[0] % 16) * key_row
                                    + (group * GROUP + step) * 16
                                    + lane[0] // 16 * 8
                                ]
                            ),
                            *[T.address_of(left[i]) for i in range(4)],
                        )
                        for pair in T.unroll(KEYS // 16):
                            T.ptx.ldmatrix(
                                *(False, 4, ".b16"),
                                T.address_of(
                                    shared[
                                        (ROWS + stage[0] * KEYS + pair * 16 + lane[0] // 16 * 8 + lane[0] % 8) * key_row
                                        + (group * GROUP + step) * 16
                                        + lane[0] // 8 % 2 * 8
                                    ]
                                ),
                                *[T.address_of(right[i]) for i in range(4)],
                            )
                            for side in T.unroll(2):
                                T.ptx.mma(
                                    *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                    [T.address_of(sums[pair * 2 + side, i]) for i in range(4)],
                                    [T.address_of(left[i]) for i in range(4)],
                                    [T.address_of(right[side * 2 + i]) for i in range(2)],
                                    [T.address_of(sums[pair * 2 + side, i]) for i in range(4)],
                                )
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            logits[column, e] = logits[column, e] + sums[column, e]
                if tile * KEYS > first_row[0] + prefix[0] + 1:
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            if (tile - 1) * KEYS + column * 8 + lane[0] % 4 * 2 + e % 2 > last_seen[e // 2]:
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
                    for column in T.unroll(value_size // 8):
                        for side in T.unroll(2):
                            total[column, 2 * half + side] = total[column, 2 * half + side] * shrink[0]
                # The first product's sums are, rounded, the second's left operand: two atoms of 8 keys make one of 16.
                for step in T.unroll(KEYS // 16):
                    for i in T.unroll(4):
                        left[i] = T.cuda.float22bfloat162_rn(
                            logits[step * 2 + i // 2, i % 2 * 2], logits[step * 2 + i // 2, i % 2 * 2 + 1]
                        )
                    for pair in T.unroll(value_size // 16):
                        T.ptx.ldmatrix(
                            *(True, 4, ".b16"),
                            T.address_of(
                                shared[
                                    values_at
                                    + (stage[0] * KEYS + step * 16 + lane[0] % 16) * value_row
                                    + pair * 16
                                    + lane[0] // 16 * 8
                                ]
                            ),
                            *[T.address_of(right[i]) for i in range(4)],
                        )
                        for side in T.unroll(2):
                            T.ptx.mma(
                                *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                [T.address_of(total[pair * 2 + side, i]) for i in range(4)],
                                [T.address_of(left[i]) for i in range(4)],
                                [T.address_of(right[side * 2 + i]) for i in range(2)],
                                [T.address_of(total[pair * 2 + side, i]) for i in range(4)],
                            )

        # A warp's rows of the queries are its own, and are not needed any more: the output takes their place.
        for half in T.unroll(2):
            row[0] = first_row[0] + warp[0] * 16 + lane[0] // 4 + 8 * half
            weight[half] = T.cuda.warp_sum(weight[half], 4)
            shrink[0] = T.float32(1) / weight[half]
            for column in T.unroll(value_size // 8):
                for side in T.unroll(2):
                    shared[(warp[0] * 16 + lane[0] // 4 + 8 * half) * key_row + column * 8 + lane[0] % 4 * 2 + side] = (
                        T.cast(total[column, 2 * half + side] * shrink[0], "bfloat16")
                    )
            if lane[0] % 4 == 0 and row[0] < rows[0]:
                # The logarithm of a number near 1 and its power of two: the fast logarithm is accurate only there.
                digits[0] = (T.reinterpret("int32", weight[half]) - 0x3F400000) >> 23
                shrink[0] = T.log2(T.reinterpret("float32", T.reinterpret("int32", weight[half]) - (digits[0] << 23)))
                lse[first_query[0] + row[0], head] = top[half] * scale + (T.cast(digits[0], "float32") + shrink[0])
        T.cuda.cta_sync()
        for step in T.unroll(ROWS * value_chunks // THREADS):
            row[0] = first_row[0] + (step * THREADS + thread) // value_chunks
            if row[0] < rows[0]:
                for e in T.vectorized(VECTOR):
                    part[e] = shared[
                        (step * THREADS + thread) // value_chunks * key_row
                        + (step * THREADS + thread) % value_chunks * VECTOR
                        + e
                    ]
                for e in T.vectorized(VECTOR):
                    out[first_query[0] + row[0], head, (step * THREADS + thread) % value_chunks * VECTOR + e] = part[e]


@T.jit
def prefill_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    qo: T.handle,
    ko: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
):
    all_queries = T.int32()
    all_keys = T.int32()
    offsets = T.int32()
    q = T.match_buffer(qh, (all_queries, heads, key_size), "bfloat16")
    k = T.match_buffer(kh, (all_keys, heads, key_size), "bfloat16")
    v = T.match_buffer(vh, (all_keys, heads, value_size), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    key_offsets = T.match_buffer(ko, (offsets,), "int32")
    out = T.match_buffer(o, (all_queries, heads, value_size), "bfloat16")
    lse = T.match_buffer(l, (all_queries, heads), "float32")
    total = T.alloc_buffer((value_size,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    top = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    queries = T.alloc_buffer((1,), "int32", scope="local")
    keys = T.alloc_buffer((1,), "int32", scope="local")
    for b in T.serial(offsets - 1):
        queries[0] = query_offsets[b + 1] - query_offsets[b]
        keys[0] = key_offsets[b + 1] - key_offsets[b]
        for i, h in T.grid(queries[0], heads):
            top[0] = T.float32(LOWEST)
            weight[0] = T.float32(0)
            for c in T.serial(value_size):
                total[c] = T.float32(0)
            for t in T.serial(i + keys[0] - queries[0] + 1):
                logit[0] = T.float32(0)
                for c in T.serial(key_size):
                    logit[0] = logit[0] + T.cast(q[query_offsets[b] + i, h, c], "float32") * T.cast(
                        k[key_offsets[b] + t, h, c], "float32"
                    )
                logit[0] = logit[0] * scale
                shrink[0] = T.exp2(top[0] - T.max(top[0], logit[0]))
                top[0] = T.max(top[0], logit[0])
                logit[0] = T.exp2(logit[0] - top[0])
                weight[0] = weight[0] * shrink[0] + logit[0]
                for c in T.serial(value_size):
                    total[c] = total[c] * shrink[0] + logit[0] * T.cast(v[key_offsets[b] + t, h, c], "float32")
            for c in T.serial(value_size):
                out[query_offsets[b] + i, h, c] = T.cast(total[c] / weight[0], "bfloat16")
            lse[query_offsets[b] + i, h] = top[0] + T.log2(weight[0])


def compile_for(arch: str, heads: int = 16, key_size: int = 192, value_size: int = 128) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "key_size": key_size, "value_size": value_size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": prefill_cpu.specialize(**sizes)}), target="llvm")
    assert key_size % (16 * GROUP) == 0 and value_size % 16 == 0 and value_size <= key_size
    key_row, value_row = key_size + PADDING, value_size + PADDING
    kernel = prefill_cuda.specialize(
        **sizes,
        key_row=key_row,
        value_row=value_row,
        key_chunks=key_size // VECTOR,
        value_chunks=value_size // VECTOR,
        values_at=(ROWS + 2 * KEYS) * key_row,
    )
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, heads: int, key_size: int, value_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, heads, key_size, value_size)["main"]


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, key_size = q.shape
    output = torch.empty(queries, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernel = kernel_for(q.device, heads, key_size, v.shape[2])
    kernel(q, k, v, qo_indptr, kv_indptr, sm_scale / math.log(2), output, lse)
    return output, lse
