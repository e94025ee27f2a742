"""p70, multi-scale retention, in TIRx: one kernel, as in flash attention, but with decays in place of the softmax.

CUDA: a thread block has 64 queries and 256 value channels, a warp 16 of the queries. 64 keys and their values at a time
are on their way to shared memory while the tensor cores work on what came before. Scores get their decay in registers
and are, rounded to bfloat16, the left operand of the second product; the sums stay in float32. Late queries, which have
most keys, come first. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8  # bfloat16 values in 16 bytes, and the padding of a row in shared memory: no bank conflicts
TOKENS = 64  # queries of a thread block, and keys that it takes at a time
VALUES = 256  # value channels of a thread block
THREADS = 128
LOG2_E = 1.4426950408889634


def float32(x):
    return T.cast(x, "float32")


def log2_decay(head):
    """log₂(1 - 2^(-5-head)), as a series: there is no digit lost."""
    x = T.exp2(T.float32(-5) - float32(head))
    series = T.float32(1 / 3) + x * (T.float32(1 / 4) + x * T.float32(1 / 5))
    return -x * (T.float32(1) + x * (T.float32(1 / 2) + x * series)) * T.float32(LOG2_E)


def load_matrices(first, target, transposed):
    """Four 8 x 8 matrices from shared memory; each lane has the address of one row."""
    return T.ptx.ldmatrix(transposed, 4, ".b16", first, *[T.address_of(target[2 * i]) for i in range(4)])


def multiply_add(total, tile, left, right, half):
    """16 x 16 times 16 x 8, which is one half of `right`, onto a tile of the sums."""
    sums = [T.address_of(total[tile, i]) for i in range(4)]
    a = [T.address_of(left[2 * i]) for i in range(4)]
    b = [T.address_of(right[4 * half + 2 * i]) for i in range(2)]
    types = ("float32", "bfloat16", "bfloat16", "float32")
    return T.ptx.mma("m16n8k16", "row", "col", *types, sums, a, b, sums)


@T.jit
def retention_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
    key_vectors: T.constexpr,
    value_vectors: T.constexpr,
):
    """`key_vectors` and `value_vectors` are the vectors of a row in shared memory."""
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, heads, length, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, heads, length, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, heads, length, value_size), "bfloat16")
    out = T.match_buffer(o, (batch, heads, length, value_size), "bfloat16")
    T.device_entry()
    block, head, prompt = T.cta_id([T.ceildiv(length, TOKENS) * (value_size // VALUES), heads, batch])
    thread = T.thread_id([THREADS])
    pool = T.SMEMPool()
    queries = pool.alloc((TOKENS, key_size + VECTOR), "bfloat16", align=128)
    keys = pool.alloc((TOKENS, key_size + VECTOR), "bfloat16", align=128)
    values = pool.alloc((TOKENS, VALUES + VECTOR), "bfloat16", align=128)
    pool.commit()
    own = T.alloc_local((1,), "int32")  # the tile of the queries
    part = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    first_row = T.alloc_local((1,), "int32")  # of a warp, in the tile
    token = T.alloc_local((1,), "int32")
    distance = T.alloc_local((1,), "int32")
    total = T.alloc_local((VALUES // 8, 4), "float32")
    scores = T.alloc_local((TOKENS // 8, 4), "float32")
    left = T.alloc_local((8,), "bfloat16")
    right = T.alloc_local((8,), "bfloat16")
    decay = T.alloc_local((1,), "float32")
    own[0] = T.ceildiv(length, TOKENS) - 1 - block // (value_size // VALUES)
    part[0] = block % (value_size // VALUES)
    lane[0] = thread % 32
    first_row[0] = thread // 32 * 16
    decay[0] = log2_decay(head)
    for n in T.unroll(VALUES // 8):
        for i in T.unroll(4):
            total[n, i] = T.float32(0)
    for i in T.unroll(TOKENS * key_vectors // THREADS):
        token[0] = i * (THREADS // key_vectors) + thread // key_vectors
        T.ptx.cp_async(
            T.address_of(queries[token[0], thread % key_vectors * VECTOR]),
            T.address_of(
                query[prompt, head, T.min(own[0] * TOKENS + token[0], length - 1), thread % key_vectors * VECTOR]
            ),
            16,
        )
    for i in T.unroll(TOKENS * key_vectors // THREADS):
        token[0] = i * (THREADS // key_vectors) + thread // key_vectors
        T.ptx.cp_async(
            T.address_of(keys[token[0], thread % key_vectors * VECTOR]),
            T.address_of(key[prompt, head, T.min(token[0], length - 1), thread % key_vectors * VECTOR]),
            16,
        )
    T.ptx.cp_async.commit_group()
    for i in T.unroll(TOKENS * value_vectors // THREADS):
        token[0] = i * (THREADS // value_vectors) + thread // value_vectors
        T.ptx.cp_async(
            T.address_of(values[token[0], thread % value_vectors * VECTOR]),
            T.address_of(
                value[prompt, head, T.min(token[0], length - 1), part[0] * VALUES + thread % value_vectors * VECTOR]
            ),
            16,
        )
    T.ptx.cp_async.commit_group()
    for tile in T.serial(own[0] + 1):
        T.ptx.cp_async.wait_group(1)  # the keys are there, the values may still be on their way
        T.cuda.cta_sync()
        for n in T.unroll(TOKENS // 8):
            for i in T.unroll(4):
                scores[n, i] = T.float32(0)
        for k in T.unroll(key_size // 16):
            load_matrices(T.address_of(queries[first_row[0] + lane[0] % 16, k * 16 + lane[0] // 16 * 8]), left, False)
            for n in T.unroll(TOKENS // 16):
                load_matrices(
                    T.address_of(
                        keys[n * 16 + lane[0] // 16 * 8 + lane[0] % 8, k * 16 + lane[0] // 8 % 2 * 8],
                    ),
                    right,
                    False,
                )
                for half in T.unroll(2):
                    multiply_add(scores, n * 2 + half, left, right, half)
        T.cuda.cta_sync()
        if tile < own[0]:
            for i in T.unroll(TOKENS * key_vectors // THREADS):
                token[0] = (tile + 1) * TOKENS + i * (THREADS // key_vectors) + thread // key_vectors
                T.ptx.cp_async(
                    T.address_of(
                        keys[i * (THREADS // key_vectors) + thread // key_vectors, thread % key_vectors * VECTOR]
                    ),
                    T.address_of(key[prompt, head, T.min(token[0], length - 1), thread % key_vectors * VECTOR]),
                    16,
                )
        T.ptx.cp_async.commit_group()
        distance[0] = (own[0] - tile) * TOKENS + first_row[0] + lane[0] // 4 - lane[0] % 4 * 2
        for n in T.unroll(TOKENS // 8):
            for i in T.unroll(4):
                if distance[0] - n * 8 + (i // 2 * 8 - i % 2) >= 0:
                    scores[n, i] = (
                        scores[n, i]
                        * T.exp2(float32(distance[0] - n * 8 + (i // 2 * 8 - i % 2)) * decay[0])
                        * T.float32(key_size**-0.5)
                    )
                else:
                    scores[n, i] = T.float32(0)
        T.ptx.cp_async.wait_group(1)  # the values are there, the next keys may still be on their way
        T.cuda.cta_sync()
        for k in T.unroll(TOKENS // 16):
            for i in T.unroll(4):
                left[2 * i] = T.cast(scores[k * 2 + i // 2, i % 2 * 2], "bfloat16")
                left[2 * i + 1] = T.cast(scores[k * 2 + i // 2, i % 2 * 2 + 1], "bfloat16")
            for n in T.unroll(VALUES // 16):
                load_matrices(T.address_of(values[k * 16 + lane[0] % 16, n * 16 + lane[0] // 16 * 8]), right, True)
                for half in T.unroll(2):
                    multiply_add(total, n * 2 + half, left, right, half)
        T.cuda.cta_sync()
        if tile < own[0]:
            for i in T.unroll(TOKENS * value_vectors // THREADS):
                token[0] = (tile + 1) * TOKENS + i * (THREADS // value_vectors) + thread // value_vectors
                T.ptx.cp_async(
                    T.address_of(
                        values[
                            i * (THREADS // value_vectors) + thread // value_vectors, thread % value_vectors * VECTOR
                        ]
                    ),
                    T.address_of(
                        value[
                            prompt,
                            head,
                            T.min(token[0], length - 1),
                            part[0] * VALUES + thread % value_vectors * VECTOR,
                        ]
                    ),
                    16,
                )
        T.ptx.cp_async.commit_group()
    for upper in T.unroll(2):
        token[0] = own[0] * TOKENS + first_row[0] + lane[0] // 4 + upper * 8
        if token[0] < length:
            for n in T.unroll(VALUES // 8):
                left[0] = T.cast(total[n, upper * 2], "bfloat16")
                left[1] = T.cast(total[n, upper * 2 + 1], "bfloat16")
                for e in T.vectorized(2):
                    out[prompt, head, token[0], (part[0] * (VALUES // 2) + n * 4 + lane[0] % 4) * 2 + e] = left[e]


@T.jit
def retention_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, heads, length, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, heads, length, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, heads, length, value_size), "bfloat16")
    out = T.match_buffer(o, (batch, heads, length, value_size), "bfloat16")
    total = T.alloc_buffer((value_size,), "float32", scope="local")
    score = T.alloc_buffer((1,), "float32", scope="local")
    for prompt, head, row in T.grid(batch, heads, length):
        for c in T.serial(value_size):
            total[c] = T.float32(0)
        for other in T.serial(row + 1):
            score[0] = T.float32(0)
            for c in T.serial(key_size):
                score[0] = score[0] + float32(query[prompt, head, row, c]) * float32(key[prompt, head, other, c])
            score[0] = score[0] * T.exp2(float32(row - other) * log2_decay(head)) * T.float32(key_size**-0.5)
            for c in T.serial(value_size):
                total[c] = total[c] + score[0] * float32(value[prompt, head, other, c])
        for c in T.serial(value_size):
            out[prompt, head, row, c] = T.cast(total[c], "bfloat16")


def compile_for(arch: str, heads: int = 8, key_size: int = 256, value_size: int = 512) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "key_size": key_size, "value_size": value_size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": retention_cpu.specialize(**sizes)}), target="llvm")
    assert key_size in {64, 128, 256} and value_size % VALUES == 0
    kernel = retention_cuda.specialize(**sizes, key_vectors=key_size // VECTOR, value_vectors=VALUES // VECTOR)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, heads: int, key_size: int, value_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, heads, key_size, value_size)["main"]


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(v)
    kernel_for(v.device, v.shape[1], k.shape[3], v.shape[3])(q, k, v, output)
    return output
