"""p69, gated linear attention, in TIRx: its quadratic form, as in flash attention, but with decays and no softmax.

CUDA, two kernels. The time is cut into four stretches; the score of a query and a key is a plain product once queries
carry the decay since the start of their stretch, and keys its inverse, up to the start of the query's stretch.
1. Decay: a thread block has 32 key channels of a head for the whole time, a thread 8 of them for a few tokens. The sums
   of the log-decays cross the threads through shared memory. Queries come out once, keys once for every stretch from
   their own on: all factors of other stretches are below one, and nothing overflows.
2. Attention: a thread block has 64 queries and 256 value channels, a warp 16 of the queries. 64 keys and their values
   at a time are on their way to shared memory while the tensor cores work on what came before; late queries come first.

CPU: the rule as it is stated, in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8  # bfloat16 values in 16 bytes, and the padding of a row in shared memory: no bank conflicts
TOKENS = 64  # queries of a thread block, and keys that it takes at a time
VALUES = 256  # value channels of a thread block
THREADS = 128
LANES = 4  # threads of the first kernel that share a token
SEGMENTS = 128  # of the time, one for every four of its threads
WARPS = SEGMENTS * LANES // 32
CHANNELS = LANES * VECTOR
STRETCHES = 4


def float32(x):
    return T.cast(x, "float32")


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
def decay_cuda(
    qh: T.handle,
    kh: T.handle,
    gh: T.handle,
    dq: T.handle,
    dk: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    steps: T.constexpr,
):
    """A segment of the time has `steps` tokens."""
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, length, heads, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, length, heads, key_size), "bfloat16")
    log_decay = T.match_buffer(gh, (batch, length, heads, key_size), "bfloat16")
    new_query = T.match_buffer(dq, (batch, heads, length, key_size), "bfloat16")
    new_key = T.match_buffer(dk, (STRETCHES, batch, heads, length, key_size), "bfloat16")
    T.device_entry()
    part, head, prompt = T.cta_id([key_size // CHANNELS, heads, batch])
    thread = T.thread_id([SEGMENTS * LANES])
    before = T.alloc_shared((SEGMENTS, CHANNELS), "float32")  # sums of the segments, then of those before in the warp
    warp_sums = T.alloc_shared((WARPS, CHANNELS), "float32")
    segment = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    warp = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    g = T.alloc_local((steps, VECTOR), "bfloat16")
    q = T.alloc_local((VECTOR,), "bfloat16")
    k = T.alloc_local((VECTOR,), "bfloat16")
    x = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((VECTOR,), "float32")  # the log-decay since the start of the own stretch
    start = T.alloc_local((STRETCHES, VECTOR), "float32")  # the log-decay up to a stretch, then its factor
    own_start = T.alloc_local((VECTOR,), "float32")
    running = T.alloc_local((2,), "float32")
    segment[0] = thread // LANES
    lane[0] = thread % LANES
    warp[0] = thread // 32
    for t in T.unroll(steps):
        token[0] = T.min(segment[0] * steps + t, length - 1)
        for e in T.vectorized(VECTOR):
            g[t, e] = log_decay[prompt, token[0], head, (part * LANES + lane[0]) * VECTOR + e]
    for e in T.unroll(VECTOR):
        x[e] = T.float32(0)
        for t in T.unroll(steps):
            x[e] = x[e] + float32(g[t, e])
    for e in T.unroll(VECTOR):
        before[segment[0], lane[0] * VECTOR + e] = x[e]
    T.cuda.cta_sync()
    running[0] = T.float32(0)
    for s in T.unroll(SEGMENTS // WARPS):
        running[1] = before[warp[0] * (SEGMENTS // WARPS) + s, thread % 32]
        before[warp[0] * (SEGMENTS // WARPS) + s, thread % 32] = running[0]
        running[0] = running[0] + running[1]
    warp_sums[warp[0], thread % 32] = running[0]
    T.cuda.cta_sync()
    for e in T.unroll(VECTOR):
        x[e] = T.float32(0)
    for w in T.unroll(WARPS):
        for e in T.unroll(VECTOR):
            if w % (WARPS // STRETCHES) == 0:
                start[w // (WARPS // STRETCHES), e] = x[e]
                if w // (WARPS // STRETCHES) == warp[0] // (WARPS // STRETCHES):
                    own_start[e] = x[e]
            if w == warp[0]:
                total[e] = x[e]
            x[e] = x[e] + warp_sums[w, lane[0] * VECTOR + e]
    for e in T.unroll(VECTOR):
        total[e] = total[e] + before[segment[0], lane[0] * VECTOR + e] - own_start[e]
        for i in T.unroll(STRETCHES):
            start[i, e] = T.exp(T.min(start[i, e] - own_start[e], T.float32(0)))
    for t in T.unroll(steps):
        token[0] = segment[0] * steps + t
        if token[0] < length:
            for e in T.vectorized(VECTOR):
                q[e] = query[prompt, token[0], head, (part * LANES + lane[0]) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                k[e] = key[prompt, token[0], head, (part * LANES + lane[0]) * VECTOR + e]
            for e in T.unroll(VECTOR):
                total[e] = total[e] + float32(g[t, e])
                q[e] = T.cast(float32(q[e]) * T.exp(total[e]) * T.float32(key_size**-0.5), "bfloat16")
                x[e] = float32(k[e]) * T.exp(-total[e])
            for e in T.vectorized(VECTOR):
                new_query[prompt, head, token[0], (part * LANES + lane[0]) * VECTOR + e] = q[e]
            for i in T.unroll(STRETCHES):
                if i >= warp[0] // (WARPS // STRETCHES):
                    for e in T.unroll(VECTOR):
                        k[e] = T.cast(x[e] * start[i, e], "bfloat16")
                    for e in T.vectorized(VECTOR):
                        new_key[i, prompt, head, token[0], (part * LANES + lane[0]) * VECTOR + e] = k[e]


@T.jit
def attend_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
    stretch: T.constexpr,
    key_vectors: T.constexpr,
    value_vectors: T.constexpr,
):
    """`key_vectors` and `value_vectors` are the vectors of a row in shared memory."""
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, heads, length, key_size), "bfloat16")
    key = T.match_buffer(kh, (STRETCHES, batch, heads, length, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, length, heads, value_size), "bfloat16")
    out = T.match_buffer(o, (batch, length, heads, value_size), "bfloat16")
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
    place = T.alloc_local((1,), "int32")  # of the keys for the stretch of these queries
    own[0] = T.ceildiv(length, TOKENS) - 1 - block // (value_size // VALUES)
    part[0] = block % (value_size // VALUES)
    lane[0] = thread % 32
    first_row[0] = thread // 32 * 16
    place[0] = own[0] * TOKENS // stretch
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
            T.address_of(key[place[0], prompt, head, T.min(token[0], length - 1), thread % key_vectors * VECTOR]),
            16,
        )
    T.ptx.cp_async.commit_group()
    for i in T.unroll(TOKENS * value_vectors // THREADS):
        token[0] = i * (THREADS // value_vectors) + thread // value_vectors
        T.ptx.cp_async(
            T.address_of(values[token[0], thread % value_vectors * VECTOR]),
            T.address_of(
                value[prompt, T.min(token[0], length - 1), head, part[0] * VALUES + thread % value_vectors * VECTOR]
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
                    T.address_of(
                        key[place[0], prompt, head, T.min(token[0], length - 1), thread % key_vectors * VECTOR]
                    ),
                    16,
                )
        T.ptx.cp_async.commit_group()
        distance[0] = (own[0] - tile) * TOKENS + first_row[0] + lane[0] // 4 - lane[0] % 4 * 2
        for n in T.unroll(TOKENS // 8):
            for i in T.unroll(4):
                if distance[0] - n * 8 + (i // 2 * 8 - i % 2) < 0:
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
                            T.min(token[0], length - 1),
                            head,
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
                    out[prompt, token[0], head, (part[0] * (VALUES // 2) + n * 4 + lane[0] % 4) * 2 + e] = left[e]


@T.jit
def attention_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    gh: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, length, heads, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, length, heads, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, length, heads, value_size), "bfloat16")
    log_decay = T.match_buffer(gh, (batch, length, heads, key_size), "bfloat16")
    out = T.match_buffer(o, (batch, length, heads, value_size), "bfloat16")
    state = T.alloc_buffer((value_size, key_size), "float32", scope="local")
    answer = T.alloc_buffer((1,), "float32", scope="local")
    for prompt, head in T.grid(batch, heads):
        for column, c in T.grid(value_size, key_size):
            state[column, c] = T.float32(0)
        for token, column in T.grid(length, value_size):
            answer[0] = T.float32(0)
            for c in T.serial(key_size):
                state[column, c] = state[column, c] * T.exp(float32(log_decay[prompt, token, head, c])) + float32(
                    key[prompt, token, head, c]
                ) * float32(value[prompt, token, head, column])
                answer[0] = answer[0] + state[column, c] * float32(query[prompt, token, head, c])
            out[prompt, token, head, column] = T.cast(answer[0] * T.float32(key_size**-0.5), "bfloat16")


def steps_of(length: int) -> int:
    """Tokens of a segment: as few as cover the time, and whole tiles in a stretch."""
    return -(-length // (2 * SEGMENTS)) * 2


def compile_for(
    arch: str, heads: int = 4, key_size: int = 256, value_size: int = 512, steps: int = 8
) -> list[tvm.runtime.Executable]:
    """The kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "key_size": key_size}
    if arch == "llvm":
        kernel = attention_cpu.specialize(**sizes, value_size=value_size)
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")]
    assert key_size in {64, 128, 256} and value_size % VALUES == 0
    kernels = [
        decay_cuda.specialize(**sizes, steps=steps),
        attend_cuda.specialize(
            **sizes,
            value_size=value_size,
            stretch=SEGMENTS // STRETCHES * steps,
            key_vectors=key_size // VECTOR,
            value_vectors=VALUES // VECTOR,
        ),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, heads: int, key_size: int, value_size: int, steps: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, heads, key_size, value_size, steps)]


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    batch, length, heads, key_size = q.shape
    output = torch.empty_like(v)
    kernels = kernels_for(q.device, heads, key_size, v.shape[3], steps_of(length))
    if len(kernels) == 1:
        kernels[0](q, k, v, gk, output)
        return output
    decay, attend = kernels
    queries = q.new_empty(batch, heads, length, key_size)
    keys = q.new_empty(STRETCHES, batch, heads, length, key_size)
    decay(q, k, gk, queries, keys)
    attend(queries, keys, v, output)
    return output
