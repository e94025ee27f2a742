"""p65, the diagonal blocks of Mamba-2's scan, in TIRx: one kernel, a thread block for one chunk of one head.

CUDA: products of 16 x 8 x 16 on tensor cores. A warp takes 16 rows of tokens at a time, early and late ones alike, and
goes along the columns up to the diagonal: C times B, the decays, and the result, rounded to bfloat16, is at once the
left operand of the product with the inputs. B and C come from global memory, where the L1 cache holds them; the inputs
lie in shared memory with two tokens of a channel side by side. CPU: the rule as it is stated, in plain loops.

The order in which a product runs through its states, and which channel is which column, is free: a thread's share of
them is consecutive in memory.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
THREADS = 128
WARPS = 4
LENGTH = 128  # of a chunk, a token a thread
SEGMENT = 8  # tokens whose log-decays are summed up first
PADDING = 2  # in words: neighbouring rows lie in different banks of shared memory


def float32(x):
    return T.cast(x, "float32")


@T.jit
def diagonal_cuda(
    xh: T.handle,
    ah: T.handle,
    bh: T.handle,
    ch: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    groups: T.constexpr,
    head_size: T.constexpr,
    state_size: T.constexpr,
):
    batch = T.int32()
    chunks = T.int32()
    inputs = T.match_buffer(xh, (batch, chunks, LENGTH, heads, head_size), "bfloat16")
    log_decay = T.match_buffer(ah, (batch, heads, chunks, LENGTH), "bfloat16")
    keys = T.match_buffer(bh, (batch, chunks, LENGTH, groups, state_size), "bfloat16")
    queries = T.match_buffer(ch, (batch, chunks, LENGTH, groups, state_size), "bfloat16")
    out = T.match_buffer(o, (batch, chunks, LENGTH, heads, head_size), "bfloat16")
    T.device_entry()
    head, chunk, sequence = T.cta_id([heads, chunks, batch])
    thread = T.thread_id([THREADS])
    place = T.alloc_local((2,), "int32")
    lane = T.alloc_local((2,), "int32")  # row and column of this thread in a fragment
    group = T.alloc_local((1,), "int32")
    tile = T.alloc_local((1,), "int32")
    even = T.alloc_local((VECTOR,), "bfloat16")
    odd = T.alloc_local((VECTOR,), "bfloat16")
    pairs = T.alloc_local((VECTOR // 2, 4), "bfloat16")
    total = T.alloc_local((1,), "float32")
    query = T.alloc_local((2, state_size // 32, VECTOR), "bfloat16")
    key = T.alloc_local((2, state_size // 32, VECTOR), "bfloat16")
    score = T.alloc_local((2, 4), "float32")
    weight = T.alloc_local((4,), "uint32")
    y = T.alloc_local((head_size // 32, 4, 4), "float32")
    rounded = T.alloc_local((VECTOR,), "bfloat16")
    step = T.alloc_shared((LENGTH,), "float32")
    segment = T.alloc_shared((LENGTH // SEGMENT,), "float32")
    sums = T.alloc_shared((LENGTH,), "float32")  # of all log-decays up to a token
    shared = T.alloc_shared((LENGTH // 2, 2 * (head_size + PADDING)), "bfloat16")

    step[thread] = float32(log_decay[sequence, head, chunk, thread])
    for turn in T.unroll(2 * head_size // 32):
        place[0] = thread // 4 + turn % 2 * 32
        place[1] = thread % 4 + turn // 2 * 4
        for e in T.vectorized(VECTOR):
            even[e] = inputs[sequence, chunk, 2 * place[0], head, place[1] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            odd[e] = inputs[sequence, chunk, 2 * place[0] + 1, head, place[1] * VECTOR + e]
        for v in T.unroll(VECTOR // 2):
            for e in T.unroll(2):
                pairs[v, 2 * e] = even[2 * v + e]
                pairs[v, 2 * e + 1] = odd[2 * v + e]
        for v in T.unroll(VECTOR // 2):
            for e in T.vectorized(4):
                shared[place[0], (place[1] * 4 + v) * 4 + e] = pairs[v, e]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for s in T.unroll(SEGMENT):
        if s <= thread % SEGMENT:
            total[0] = total[0] + step[thread // SEGMENT * SEGMENT + s]
    if thread % SEGMENT == SEGMENT - 1:
        segment[thread // SEGMENT] = total[0]
    T.cuda.cta_sync()
    for s in T.unroll(LENGTH // SEGMENT):
        if s < thread // SEGMENT:
            total[0] = total[0] + segment[s]
    sums[thread] = total[0]
    T.cuda.cta_sync()

    lane[0] = thread % 32 // 4
    lane[1] = thread % 4
    group[0] = head // (heads // groups)
    for turn in T.unroll(LENGTH // (16 * WARPS)):
        if turn % 2 == 0:
            tile[0] = turn * WARPS + thread // 32
        else:
            tile[0] = turn * WARPS + WARPS - 1 - thread // 32
        for half in T.unroll(2):
            for k in T.unroll(state_size // 32):
                for e in T.vectorized(VECTOR):
                    query[half, k, e] = queries[
                        sequence, chunk, tile[0] * 16 + half * 8 + lane[0], group[0], (k * 4 + lane[1]) * VECTOR + e
                    ]
        for q in T.unroll(head_size // 32):
            for s in T.unroll(4):
                for i in T.unroll(4):
                    y[q, s, i] = T.float32(0)
        for column in T.serial(tile[0] + 1):
            for u in T.unroll(2):
                for k in T.unroll(state_size // 32):
                    for e in T.vectorized(VECTOR):
                        key[u, k, e] = keys[
                            sequence, chunk, column * 16 + u * 8 + lane[0], group[0], (k * 4 + lane[1]) * VECTOR + e
                        ]
            for u in T.unroll(2):
                for i in T.unroll(4):
                    score[u, i] = T.float32(0)
                for k in T.unroll(state_size // 32):
                    for s in T.unroll(2):
                        T.ptx.mma(
                            *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                            [T.address_of(score[u, i]) for i in range(4)],
                            [T.address_of(query[i % 2, k, 4 * s + i // 2 * 2]) for i in range(4)],
                            [T.address_of(key[u, k, 4 * s + i * 2]) for i in range(2)],
                            [T.address_of(score[u, i]) for i in range(4)],
                        )
            for u in T.unroll(2):
                for i in T.unroll(4):
                    place[0] = tile[0] * 16 + i // 2 * 8 + lane[0]
                    place[1] = column * 16 + u * 8 + lane[1] * 2 + i % 2
                    score[u, i] = T.if_then_else(
                        place[0] >= place[1],
                        score[u, i] * T.exp(sums[place[0]] - sums[place[1]]),
                        T.float32(0),
                    )
            for u in T.unroll(2):
                for half in T.unroll(2):
                    weight[2 * u + half] = T.cuda.float22bfloat162_rn(score[u, 2 * half], score[u, 2 * half + 1])
            for q in T.unroll(head_size // 32):
                for s in T.unroll(4):
                    T.ptx.mma(
                        *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                        [T.address_of(y[q, s, i]) for i in range(4)],
                        [T.address_of(weight[i]) for i in range(4)],
                        [
                            T.address_of(
                                shared[
                                    column * 8 + i * 4 + lane[1],
                                    2 * (q * 32 + lane[0] // 2 * 8 + s * 2 + lane[0] % 2),
                                ]
                            )
                            for i in range(2)
                        ],
                        [T.address_of(y[q, s, i]) for i in range(4)],
                    )
        for half in T.unroll(2):
            for q in T.unroll(head_size // 32):
                for s in T.unroll(4):
                    for e in T.unroll(2):
                        rounded[2 * s + e] = T.cast(y[q, s, 2 * half + e], "bfloat16")
                for e in T.vectorized(VECTOR):
                    out[sequence, chunk, tile[0] * 16 + half * 8 + lane[0], head, (q * 4 + lane[1]) * VECTOR + e] = (
                        rounded[e]
                    )


@T.jit
def diagonal_cpu(
    xh: T.handle,
    ah: T.handle,
    bh: T.handle,
    ch: T.handle,
    o: T.handle,
    *,
    length: T.constexpr,
    heads: T.constexpr,
    groups: T.constexpr,
    head_size: T.constexpr,
    state_size: T.constexpr,
):
    batch = T.int32()
    chunks = T.int32()
    inputs = T.match_buffer(xh, (batch, chunks, length, heads, head_size), "bfloat16")
    log_decay = T.match_buffer(ah, (batch, heads, chunks, length), "bfloat16")
    keys = T.match_buffer(bh, (batch, chunks, length, groups, state_size), "bfloat16")
    queries = T.match_buffer(ch, (batch, chunks, length, groups, state_size), "bfloat16")
    out = T.match_buffer(o, (batch, chunks, length, heads, head_size), "bfloat16")
    sums = T.alloc_buffer((length,), "float32", scope="local")
    y = T.alloc_buffer((head_size,), "float32", scope="local")
    score = T.alloc_buffer((1,), "float32", scope="local")
    for sequence, chunk, head in T.grid(batch, chunks, heads):
        score[0] = T.float32(0)
        for token in T.serial(length):
            score[0] = score[0] + float32(log_decay[sequence, head, chunk, token])
            sums[token] = score[0]
        for row in T.serial(length):
            for channel in T.serial(head_size):
                y[channel] = T.float32(0)
            for column in T.serial(row + 1):
                score[0] = T.float32(0)
                for n in T.serial(state_size):
                    score[0] = score[0] + float32(
                        queries[sequence, chunk, row, head // (heads // groups), n]
                    ) * float32(keys[sequence, chunk, column, head // (heads // groups), n])
                score[0] = score[0] * T.exp(sums[row] - sums[column])
                for channel in T.serial(head_size):
                    y[channel] = y[channel] + score[0] * float32(inputs[sequence, chunk, column, head, channel])
            for channel in T.serial(head_size):
                out[sequence, chunk, row, head, channel] = T.cast(y[channel], "bfloat16")


def compile_for(
    arch: str, length: int = 128, heads: int = 128, groups: int = 8, head_size: int = 128, state_size: int = 128
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "groups": groups, "head_size": head_size, "state_size": state_size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": diagonal_cpu.specialize(length=length, **sizes)}), target="llvm")
    assert length == LENGTH and head_size % 32 == 0 and state_size % 32 == 0
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": diagonal_cuda.specialize(**sizes)}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, length: int, heads: int, groups: int, head_size: int, state_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, length, heads, groups, head_size, state_size)["main"]


def solve(hidden_states: torch.Tensor, a_cumsum: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden_states)
    length, heads, head_size = hidden_states.shape[2:]
    kernel = kernel_for(out.device, length, heads, *B.shape[3:4], head_size, B.shape[4])
    kernel(hidden_states, a_cumsum, B, C, out)
    return out
