"""p54, FP8 projections with per-head norms, in TIRx. The product stays with eager PyTorch, on CUDA in bfloat16.

CUDA: two kernels replace hidden states and weights by what their FP8 codes and scales stand for, rounded to bfloat16,
which is far finer than E4M3; the three weights become one matrix. Another adds the biases to the product and normalises
the heads: a thread block has a token, 16 threads with 8 values (16 bytes) each have a head. CPU: the same for blocks of
any height, in plain loops, without rounding.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

BLOCK = 128  # also the size of a head
VECTOR = 8
LANES = BLOCK // VECTOR
THREADS = 256
ROWS = THREADS // LANES  # rows of 128 that a thread block has at a time
PASSES = BLOCK // ROWS  # until a thread block has seen a weight block
UNROLL = 4  # rows of 128 that a thread has a share of
SMALLEST_SCALE = 1e-12


def e4m3(y):
    """The E4M3 value nearest to y, as a float32; y beyond ±448 saturates. An expression, for any target."""
    bits = T.reinterpret("uint32", T.min(T.max(y, T.float32(-448)), T.float32(448)))
    magnitude = bits & T.uint32(0x7FFFFFFF)
    odd = (magnitude >> T.uint32(20)) & T.uint32(1)
    normal = T.reinterpret("float32", (magnitude + T.uint32(0x7FFFF) + odd) & T.uint32(0xFFF00000))
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    steps = T.reinterpret("uint32", T.reinterpret("float32", magnitude) + T.float32(16384)) & T.uint32(0xFF)
    subnormal = T.cast(steps, "float32") * T.float32(2**-9)
    rounded = T.if_then_else(magnitude < T.uint32(0x3C800000), subnormal, normal)
    return T.if_then_else(bits >= T.uint32(0x80000000), -rounded, rounded)


def scale_of(largest):
    return T.max(largest / T.float32(448), T.float32(SMALLEST_SCALE))


def normalised(z, total, eps, weight):
    """An element of a head, given the sum of the head's squares."""
    return z * T.rsqrt(total * T.float32(1 / BLOCK) + eps) * T.cast(weight, "float32")


@T.jit
def activation_cuda(x: T.handle, y: T.handle):
    blocks = T.int32()
    source = T.match_buffer(x, (blocks, BLOCK), "bfloat16")
    target = T.match_buffer(y, (blocks, BLOCK), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(blocks, ROWS * UNROLL)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    first[0] = group * (ROWS * UNROLL) + thread // LANES
    lane[0] = thread % LANES
    for u in T.unroll(UNROLL):
        for e in T.unroll(VECTOR):
            values[u, e] = T.bfloat16(0)
        if first[0] + u * ROWS < blocks:
            for e in T.vectorized(VECTOR):
                values[u, e] = source[first[0] + u * ROWS, lane[0] * VECTOR + e]
    for u in T.unroll(UNROLL):
        largest[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[u, e], "float32")))
        largest[0] = T.cuda.warp_max(largest[0], LANES)
        scale[0] = scale_of(largest[0])
        scale[1] = T.float32(1) / scale[0]
        for e in T.unroll(VECTOR):
            values[u, e] = T.cast(e4m3(T.cast(values[u, e], "float32") * scale[1]) * scale[0], "bfloat16")
        if first[0] + u * ROWS < blocks:
            for e in T.vectorized(VECTOR):
                target[first[0] + u * ROWS, lane[0] * VECTOR + e] = values[u, e]


@T.jit
def weight_cuda(x: T.handle, y: T.handle, *, columns: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, columns), "bfloat16")
    target = T.match_buffer(y, (rows, columns), "bfloat16")
    T.device_entry()
    column, row = T.cta_id([columns // BLOCK, rows // BLOCK])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((PASSES, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    partial = T.alloc_shared((THREADS // 32,), "float32")
    first[0] = row * BLOCK + thread // LANES
    lane[0] = column * LANES + thread % LANES
    largest[0] = T.float32(0)
    for p in T.unroll(PASSES):
        for e in T.vectorized(VECTOR):
            values[p, e] = source[first[0] + p * ROWS, lane[0] * VECTOR + e]
    for p in T.unroll(PASSES):
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[p, e], "float32")))
    largest[0] = T.cuda.warp_max(largest[0])
    if thread % 32 == 0:
        partial[thread // 32] = largest[0]
    T.cuda.cta_sync()
    for k in T.unroll(THREADS // 32):
        largest[0] = T.max(largest[0], partial[k])
    scale[0] = scale_of(largest[0])
    scale[1] = T.float32(1) / scale[0]
    for p in T.unroll(PASSES):
        for e in T.unroll(VECTOR):
            values[p, e] = T.cast(e4m3(T.cast(values[p, e], "float32") * scale[1]) * scale[0], "bfloat16")
        for e in T.vectorized(VECTOR):
            target[first[0] + p * ROWS, lane[0] * VECTOR + e] = values[p, e]


@T.jit
def quantise_cpu(x: T.handle, y: T.handle, *, columns: T.constexpr, height: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, columns), "bfloat16")
    target = T.match_buffer(y, (rows, columns), "float32")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    for row, column in T.grid(rows // height, columns // BLOCK):
        largest[0] = T.float32(0)
        for r, c in T.grid(height, BLOCK):
            largest[0] = T.max(largest[0], T.abs(T.cast(source[row * height + r, column * BLOCK + c], "float32")))
        for r, c in T.grid(height, BLOCK):
            target[row * height + r, column * BLOCK + c] = e4m3(
                T.cast(source[row * height + r, column * BLOCK + c], "float32") / scale_of(largest[0])
            ) * scale_of(largest[0])


@T.jit
def heads_cuda(
    p: T.handle,
    qb: T.handle,
    kb: T.handle,
    vb: T.handle,
    qw: T.handle,
    kw: T.handle,
    eps: T.float32,
    q: T.handle,
    k: T.handle,
    v: T.handle,
    *,
    queries: T.constexpr,
    keys: T.constexpr,
    heads: T.constexpr,
    passes: T.constexpr,
):
    """A head of the product is a query's, a key's or a value's."""
    tokens = T.int32()
    product = T.match_buffer(p, (tokens, heads, BLOCK), "bfloat16")
    q_bias = T.match_buffer(qb, (queries, BLOCK), "bfloat16")
    k_bias = T.match_buffer(kb, (keys, BLOCK), "bfloat16")
    v_bias = T.match_buffer(vb, (keys, BLOCK), "bfloat16")
    q_weight = T.match_buffer(qw, (BLOCK,), "bfloat16")
    k_weight = T.match_buffer(kw, (BLOCK,), "bfloat16")
    query = T.match_buffer(q, (tokens, queries, BLOCK), "bfloat16")
    key = T.match_buffer(k, (tokens, keys, BLOCK), "bfloat16")
    value = T.match_buffer(v, (tokens, keys, BLOCK), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((passes, VECTOR), "bfloat16")
    bias = T.alloc_local((VECTOR,), "bfloat16")
    weight = T.alloc_local((VECTOR,), "bfloat16")
    z = T.alloc_local((VECTOR,), "float32")
    head = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    total = T.alloc_local((1,), "float32")
    lane[0] = thread % LANES
    for i in T.unroll(passes):
        head[0] = i * ROWS + thread // LANES
        if head[0] < heads:
            for e in T.vectorized(VECTOR):
                x[i, e] = product[token, head[0], lane[0] * VECTOR + e]
    for i in T.unroll(passes):
        head[0] = i * ROWS + thread // LANES
        total[0] = T.float32(0)
        if head[0] < heads:
            if head[0] < queries:
                for e in T.vectorized(VECTOR):
                    bias[e] = q_bias[head[0], lane[0] * VECTOR + e]
                for e in T.vectorized(VECTOR):
                    weight[e] = q_weight[lane[0] * VECTOR + e]
            elif head[0] < queries + keys:
                for e in T.vectorized(VECTOR):
                    bias[e] = k_bias[head[0] - queries, lane[0] * VECTOR + e]
                for e in T.vectorized(VECTOR):
                    weight[e] = k_weight[lane[0] * VECTOR + e]
            else:
                for e in T.vectorized(VECTOR):
                    bias[e] = v_bias[head[0] - (queries + keys), lane[0] * VECTOR + e]
            for e in T.unroll(VECTOR):
                z[e] = T.cast(x[i, e], "float32") + T.cast(bias[e], "float32")
                total[0] = total[0] + z[e] * z[e]
        total[0] = T.cuda.warp_sum(total[0], LANES)
        if head[0] < queries + keys:
            for e in T.unroll(VECTOR):
                x[i, e] = T.cast(normalised(z[e], total[0], eps, weight[e]), "bfloat16")
            if head[0] < queries:
                for e in T.vectorized(VECTOR):
                    query[token, head[0], lane[0] * VECTOR + e] = x[i, e]
            else:
                for e in T.vectorized(VECTOR):
                    key[token, head[0] - queries, lane[0] * VECTOR + e] = x[i, e]
        elif head[0] < heads:
            for e in T.unroll(VECTOR):
                x[i, e] = T.cast(z[e], "bfloat16")
            for e in T.vectorized(VECTOR):
                value[token, head[0] - (queries + keys), lane[0] * VECTOR + e] = x[i, e]


@T.jit
def heads_cpu(
    p: T.handle,
    qb: T.handle,
    kb: T.handle,
    vb: T.handle,
    qw: T.handle,
    kw: T.handle,
    eps: T.float32,
    q: T.handle,
    k: T.handle,
    v: T.handle,
    *,
    queries: T.constexpr,
    keys: T.constexpr,
    heads: T.constexpr,
):
    tokens = T.int32()
    product = T.match_buffer(p, (tokens, heads, BLOCK), "float32")
    q_bias = T.match_buffer(qb, (queries, BLOCK), "bfloat16")
    k_bias = T.match_buffer(kb, (keys, BLOCK), "bfloat16")
    v_bias = T.match_buffer(vb, (keys, BLOCK), "bfloat16")
    q_weight = T.match_buffer(qw, (BLOCK,), "bfloat16")
    k_weight = T.match_buffer(kw, (BLOCK,), "bfloat16")
    query = T.match_buffer(q, (tokens, queries, BLOCK), "bfloat16")
    key = T.match_buffer(k, (tokens, keys, BLOCK), "bfloat16")
    value = T.match_buffer(v, (tokens, keys, BLOCK), "bfloat16")
    z = T.alloc_buffer((BLOCK,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for token in T.serial(tokens):
        for head in T.serial(queries):
            total[0] = T.float32(0)
            for i in T.serial(BLOCK):
                z[i] = product[token, head, i] + T.cast(q_bias[head, i], "float32")
                total[0] = total[0] + z[i] * z[i]
            for i in T.serial(BLOCK):
                query[token, head, i] = T.cast(normalised(z[i], total[0], eps, q_weight[i]), "bfloat16")
        for head in T.serial(keys):
            total[0] = T.float32(0)
            for i in T.serial(BLOCK):
                z[i] = product[token, queries + head, i] + T.cast(k_bias[head, i], "float32")
                total[0] = total[0] + z[i] * z[i]
            for i in T.serial(BLOCK):
                key[token, head, i] = T.cast(normalised(z[i], total[0], eps, k_weight[i]), "bfloat16")
                value[token, head, i] = T.cast(
                    product[token, queries + keys + head, i] + T.cast(v_bias[head, i], "float32"), "bfloat16"
                )


def compile_for(arch: str, hidden: int = 7680, queries: int = 60, keys: int = 8) -> list[tvm.runtime.Executable]:
    """For activations, for weights, and for the heads, for `arch` (`llvm`, `sm_90a`, ...); needs no GPU."""
    heads = queries + 2 * keys
    if arch == "llvm":
        kernels = [quantise_cpu.specialize(columns=hidden, height=height) for height in (1, BLOCK)]
        kernels.append(heads_cpu.specialize(queries=queries, keys=keys, heads=heads))
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [activation_cuda.specialize(), weight_cuda.specialize(columns=hidden)]
    kernels.append(heads_cuda.specialize(queries=queries, keys=keys, heads=heads, passes=-(-heads // ROWS)))
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, hidden: int, queries: int, keys: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, hidden, queries, keys)]


def solve(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    v_bias: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    batch, sequence, hidden = hidden_states.shape
    queries, keys = len(q_weight) // BLOCK, len(k_weight) // BLOCK
    quantise_activations, quantise_weight, finish = kernels_for(hidden_states.device, hidden, queries, keys)
    dtype = torch.bfloat16 if hidden_states.is_cuda else torch.float32
    tokens = torch.empty(batch * sequence, hidden, dtype=dtype, device=hidden_states.device)
    width = BLOCK if hidden_states.is_cuda else hidden
    quantise_activations(hidden_states.view(-1, width), tokens.view(-1, width))
    weights = [q_weight, k_weight, v_weight]
    weight = torch.empty(sum(map(len, weights)), hidden, dtype=dtype, device=hidden_states.device)
    for source, target in zip(weights, weight.split([len(source) for source in weights]), strict=True):
        quantise_weight(source, target)
    product = torch.mm(tokens, weight.t())
    query = hidden_states.new_empty(batch, sequence, queries, BLOCK)
    key, value = (hidden_states.new_empty(batch, sequence, keys, BLOCK) for _ in range(2))
    finish(
        product.view(batch * sequence, -1, BLOCK),
        *(bias.view(-1, BLOCK) for bias in (q_bias, k_bias, v_bias)),
        *(q_norm_weight, k_norm_weight, eps),
        *(part.flatten(0, 1) for part in (query, key, value)),
    )
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
