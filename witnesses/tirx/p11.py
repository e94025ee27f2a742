"""p11, vision attention over packed sequences, in TIRx. The two projections stay with eager PyTorch.

CUDA: one kernel rotates queries and keys where they lie. The other is flash attention: a thread block has 64 queries of
a head, a warp 16 of them, and goes through the sequence's keys, 64 at a time: the products run on the tensor cores
(m16n8k16, float32 sums, channels padded with zeros), the softmax runs along in float32, and the next keys and values
are copied to shared memory meanwhile. Which sequence a block belongs to is found on the device: a sequence's blocks
begin at a number that follows from its offset alone. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear
from tvm.script import tirx as T  # noqa: N812

WARPS = 4
THREADS = 32 * WARPS
ROWS = 16 * WARPS
KEYS = 64
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
PART = 4  # values that a thread rotates together
ROTATORS = 256
LOG2_E = 1.4426950408889634
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


def float32(x):
    return T.cast(x, "float32")


@T.jit
def rotate_cuda(x: T.handle, c: T.handle, s: T.handle, *, heads: T.constexpr, size: T.constexpr, parts: T.constexpr):
    """`parts` of the halves of a head."""
    tokens = T.int32()
    projected = T.match_buffer(x, (tokens, 3, heads, size), "bfloat16")
    cos = T.match_buffer(c, (tokens, heads, size), "bfloat16")
    sin = T.match_buffer(s, (tokens, heads, size), "bfloat16")
    T.device_entry()
    block = T.cta_id([T.ceildiv(tokens * heads * parts, ROTATORS)])
    thread = T.thread_id([ROTATORS])
    place = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    head = T.alloc_local((1,), "int32")
    values = T.alloc_local((2, 2, PART), "bfloat16")  # of the query and the key, the first and the second half
    cosines = T.alloc_local((2, PART), "bfloat16")
    sines = T.alloc_local((2, PART), "bfloat16")
    first = T.alloc_local((1,), "float32")
    second = T.alloc_local((1,), "float32")
    place[0] = block * ROTATORS + thread
    token[0] = place[0] // (heads * parts)
    head[0] = place[0] // parts % heads
    place[0] = place[0] % parts
    if token[0] < tokens:
        for i in T.unroll(2):
            for half in T.unroll(2):
                for e in T.vectorized(PART):
                    values[i, half, e] = projected[token[0], i, head[0], (half * parts + place[0]) * PART + e]
        for half in T.unroll(2):
            for e in T.vectorized(PART):
                cosines[half, e] = cos[token[0], head[0], (half * parts + place[0]) * PART + e]
        for half in T.unroll(2):
            for e in T.vectorized(PART):
                sines[half, e] = sin[token[0], head[0], (half * parts + place[0]) * PART + e]
        for i in T.unroll(2):
            for e in T.unroll(PART):
                first[0] = float32(values[i, 0, e])
                second[0] = float32(values[i, 1, e])
                values[i, 0, e] = T.cast(
                    first[0] * float32(cosines[0, e]) - second[0] * float32(sines[0, e]), "bfloat16"
                )
                values[i, 1, e] = T.cast(
                    second[0] * float32(cosines[1, e]) + first[0] * float32(sines[1, e]), "bfloat16"
                )
            for half in T.unroll(2):
                for e in T.vectorized(PART):
                    projected[token[0], i, head[0], (half * parts + place[0]) * PART + e] = values[i, half, e]


@T.jit
def attend_cuda(
    x: T.handle,
    cu: T.handle,
    scale: T.float32,
    o: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
    row_length: T.constexpr,
    chunks: T.constexpr,
    steps: T.constexpr,
):
    """`chunks` of 16 bytes and, with the padding, `steps` of 16 channels in a row, which is `row_length` long in shared
    memory. `scale` takes a product to a power of two."""
    tokens = T.int32()
    sequences = T.int32()
    projected = T.match_buffer(x, (tokens, 3, heads, size), "bfloat16")
    ends = T.match_buffer(cu, (sequences,), "int64")
    out = T.match_buffer(o, (tokens, heads, size), "bfloat16")
    T.device_entry()
    block, head = T.cta_id([tokens // ROWS + sequences, heads])
    thread = T.thread_id([THREADS])
    # The rows of the queries (later of the output), then twice the keys, then twice the values.
    shared = T.alloc_buffer((ROWS + 4 * KEYS, row_length), "bfloat16", scope="shared.dyn")
    found = T.alloc_shared((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    warp = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    last = T.alloc_local((1,), "int32")
    rows = T.alloc_local((1,), "int32")
    first_row = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    tiles = T.alloc_local((1,), "int32")
    stage = T.alloc_local((1,), "int32")
    # Four values an atom: two neighbouring columns of a row, then the same of the row eight further down.
    logits = T.alloc_local((KEYS // 8, 4), "float32")
    total = T.alloc_local((2 * steps, 4), "float32")
    left = T.alloc_local((4,), "uint32")
    right = T.alloc_local((4,), "uint32")
    top = T.alloc_local((2,), "float32")
    weight = T.alloc_local((2,), "float32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    part = T.alloc_local((VECTOR,), "bfloat16")
    lane[0] = thread % 32
    warp[0] = thread // 32
    for turn in T.serial((sequences + THREADS - 1) // THREADS):
        if turn * THREADS + thread < sequences:
            first[0] = 0
            if turn * THREADS + thread > 0:
                first[0] = T.cast(ends[turn * THREADS + thread - 1], "int32")
            last[0] = T.cast(ends[turn * THREADS + thread], "int32") // ROWS + turn * THREADS + thread + 1
            if first[0] // ROWS + turn * THREADS + thread <= block and last[0] > block:
                found[0] = turn * THREADS + thread
    T.cuda.cta_sync()
    first[0] = 0
    if found[0] > 0:
        first[0] = T.cast(ends[found[0] - 1], "int32")
    rows[0] = T.cast(ends[found[0]], "int32") - first[0]
    last[0] = first[0] + rows[0] - 1
    first_row[0] = (block - (first[0] // ROWS + found[0])) * ROWS
    if first_row[0] < rows[0]:
        for e in T.unroll(VECTOR):
            part[e] = T.bfloat16(0)
        for step in T.unroll((ROWS + 4 * KEYS + THREADS - 1) // THREADS):
            if step * THREADS + thread < ROWS + 4 * KEYS:
                for e in T.vectorized(VECTOR):
                    shared[step * THREADS + thread, (2 * steps - 1) * VECTOR + e] = part[e]
        # Where the channels need no padding, the copies come after these zeros.
        T.cuda.cta_sync()
        for step in T.unroll((ROWS * chunks + THREADS - 1) // THREADS):
            row[0] = T.min(first[0] + first_row[0] + (step * THREADS + thread) // chunks, last[0])
            if step * THREADS + thread < ROWS * chunks:
                T.ptx.cp_async(
                    T.address_of(
                        shared[(step * THREADS + thread) // chunks, (step * THREADS + thread) % chunks * VECTOR]
                    ),
                    T.address_of(projected[row[0], 0, head, (step * THREADS + thread) % chunks * VECTOR]),
                    16,
                )
        T.ptx.cp_async.commit_group()
        for half in T.unroll(2):
            top[half] = T.float32(LOWEST)
            weight[half] = T.float32(0)
        for column in T.unroll(2 * steps):
            for e in T.unroll(4):
                total[column, e] = T.float32(0)
        tiles[0] = (rows[0] + KEYS - 1) // KEYS
        for tile in T.serial(tiles[0] + 1):
            # The first turn only starts the first copies; every other one starts the next copies, then computes.
            stage[0] = tile % 2
            T.ptx.cp_async.wait_group(0)
            T.cuda.cta_sync()
            if tile < tiles[0]:
                # Copies past the last key repeat it.
                for step in T.unroll((KEYS * chunks + THREADS - 1) // THREADS):
                    row[0] = T.min(first[0] + tile * KEYS + (step * THREADS + thread) // chunks, last[0])
                    if step * THREADS + thread < KEYS * chunks:
                        for i in T.unroll(2):
                            T.ptx.cp_async(
                                T.address_of(
                                    shared[
                                        ROWS + (2 * i + stage[0]) * KEYS + (step * THREADS + thread) // chunks,
                                        (step * THREADS + thread) % chunks * VECTOR,
                                    ]
                                ),
                                T.address_of(
                                    projected[row[0], 1 + i, head, (step * THREADS + thread) % chunks * VECTOR]
                                ),
                                16,
                            )
            T.ptx.cp_async.commit_group()
            if tile > 0:
                stage[0] = 1 - stage[0]
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        logits[column, e] = T.float32(0)
                for step in T.unroll(steps):
                    T.ptx.ldmatrix(
                        *(False, 4, ".b16"),
                        T.address_of(shared[warp[0] * 16 + lane[0] % 16, step * 16 + lane[0] // 16 * 8]),
                        *[T.address_of(left[i]) for i in range(4)],
                    )
                    for pair in T.unroll(KEYS // 16):
                        T.ptx.ldmatrix(
                            *(False, 4, ".b16"),
                            T.address_of(
                                shared[
                                    ROWS + stage[0] * KEYS + pair * 16 + lane[0] // 16 * 8 + lane[0] % 8,
                                    step * 16 + lane[0] // 8 % 2 * 8,
                                ]
                            ),
                            *[T.address_of(right[i]) for i in range(4)],
                        )
                        for side in T.unroll(2):
                            T.ptx.mma(
                                *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                [T.address_of(logits[pair * 2 + side, i]) for i in range(4)],
                                [T.address_of(left[i]) for i in range(4)],
                                [T.address_of(right[side * 2 + i]) for i in range(2)],
                                [T.address_of(logits[pair * 2 + side, i]) for i in range(4)],
                            )
                if tile * KEYS > rows[0]:
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            if (tile - 1) * KEYS + column * 8 + lane[0] % 4 * 2 + e % 2 >= rows[0]:
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
                    for column in T.unroll(2 * steps):
                        for side in T.unroll(2):
                            total[column, 2 * half + side] = total[column, 2 * half + side] * shrink[0]
                # The first product's sums are, rounded, the second's left operand: two atoms of 8 keys make one of 16.
                for step in T.unroll(KEYS // 16):
                    for i in T.unroll(4):
                        left[i] = T.cuda.float22bfloat162_rn(
                            logits[step * 2 + i // 2, i % 2 * 2], logits[step * 2 + i // 2, i % 2 * 2 + 1]
                        )
                    for pair in T.unroll(steps):
                        T.ptx.ldmatrix(
                            *(True, 4, ".b16"),
                            T.address_of(
                                shared[
                                    ROWS + (2 + stage[0]) * KEYS + step * 16 + lane[0] % 16,
                                    pair * 16 + lane[0] // 16 * 8,
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
            shrink[0] = T.float32(1) / T.cuda.warp_sum(weight[half], 4)
            for column in T.unroll(chunks):
                for side in T.unroll(2):
                    shared[warp[0] * 16 + lane[0] // 4 + 8 * half, column * 8 + lane[0] % 4 * 2 + side] = T.cast(
                        total[column, 2 * half + side] * shrink[0], "bfloat16"
                    )
        T.cuda.cta_sync()
        for step in T.unroll((ROWS * chunks + THREADS - 1) // THREADS):
            row[0] = first_row[0] + (step * THREADS + thread) // chunks
            if step * THREADS + thread < ROWS * chunks and row[0] < rows[0]:
                for e in T.vectorized(VECTOR):
                    part[e] = shared[
                        (step * THREADS + thread) // chunks, (step * THREADS + thread) % chunks * VECTOR + e
                    ]
                for e in T.vectorized(VECTOR):
                    out[first[0] + row[0], head, (step * THREADS + thread) % chunks * VECTOR + e] = part[e]


@T.jit
def rotate_cpu(x: T.handle, c: T.handle, s: T.handle, *, heads: T.constexpr, size: T.constexpr):
    tokens = T.int32()
    projected = T.match_buffer(x, (tokens, 3, heads, size), "bfloat16")
    cos = T.match_buffer(c, (tokens, heads, size), "bfloat16")
    sin = T.match_buffer(s, (tokens, heads, size), "bfloat16")
    first = T.alloc_buffer((1,), "float32", scope="local")
    second = T.alloc_buffer((1,), "float32", scope="local")
    for token, i, head, e in T.grid(tokens, 2, heads, size // 2):
        first[0] = float32(projected[token, i, head, e])
        second[0] = float32(projected[token, i, head, size // 2 + e])
        projected[token, i, head, e] = T.cast(
            first[0] * float32(cos[token, head, e]) - second[0] * float32(sin[token, head, e]), "bfloat16"
        )
        projected[token, i, head, size // 2 + e] = T.cast(
            second[0] * float32(cos[token, head, size // 2 + e]) + first[0] * float32(sin[token, head, size // 2 + e]),
            "bfloat16",
        )


@T.jit
def attend_cpu(x: T.handle, cu: T.handle, scale: T.float32, o: T.handle, *, heads: T.constexpr, size: T.constexpr):
    tokens = T.int32()
    sequences = T.int32()
    projected = T.match_buffer(x, (tokens, 3, heads, size), "bfloat16")
    ends = T.match_buffer(cu, (sequences,), "int64")
    out = T.match_buffer(o, (tokens, heads, size), "bfloat16")
    total = T.alloc_buffer((size,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    top = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    first = T.alloc_buffer((1,), "int32", scope="local")
    count = T.alloc_buffer((1,), "int32", scope="local")
    count[0] = 0
    first[0] = 0
    for b in T.serial(sequences):
        first[0] = first[0] + count[0]
        count[0] = T.cast(ends[b], "int32") - first[0]
        for i, h in T.grid(count[0], heads):
            top[0] = T.float32(LOWEST)
            weight[0] = T.float32(0)
            for c in T.serial(size):
                total[c] = T.float32(0)
            for t in T.serial(count[0]):
                logit[0] = T.float32(0)
                for c in T.serial(size):
                    logit[0] = logit[0] + float32(projected[first[0] + i, 0, h, c]) * float32(
                        projected[first[0] + t, 1, h, c]
                    )
                logit[0] = logit[0] * scale
                shrink[0] = T.exp2(top[0] - T.max(top[0], logit[0]))
                top[0] = T.max(top[0], logit[0])
                logit[0] = T.exp2(logit[0] - top[0])
                weight[0] = weight[0] * shrink[0] + logit[0]
                for c in T.serial(size):
                    total[c] = total[c] * shrink[0] + logit[0] * float32(projected[first[0] + t, 2, h, c])
            for c in T.serial(size):
                out[first[0] + i, h, c] = T.cast(total[c] / weight[0], "bfloat16")


def compile_for(arch: str, heads: int = 16, size: int = 72) -> list[tvm.runtime.Executable]:
    """Rotation and attention for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "size": size}
    if arch == "llvm":
        kernels = [rotate_cpu.specialize(**sizes), attend_cpu.specialize(**sizes)]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert size % VECTOR == 0
    steps = -(-size // 16)
    kernels = [
        rotate_cuda.specialize(**sizes, parts=size // (2 * PART)),
        attend_cuda.specialize(**sizes, row_length=16 * steps + PADDING, chunks=size // VECTOR, steps=steps),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, heads: int, size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, heads, size)]


def solve(
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> torch.Tensor:
    tokens, heads, size = cos.shape
    rotate, attend = kernels_for(cos.device, heads, size)
    projected = linear(hidden_states, qkv_weight, qkv_bias).view(tokens, 3, heads, size)
    rotate(projected, cos, sin)
    attended = torch.empty_like(cos)
    attend(projected, cu_seqlens, size**-0.5 * LOG2_E, attended)
    return linear(attended.view(tokens, -1), proj_weight, proj_bias)
