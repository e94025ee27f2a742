"""p10, backward of an attention layer with normalised heads and soft-capped logits, in TIRx. All products stay with
eager PyTorch; the query heads of a KV head are further rows of it: nothing is repeated, and sums over them come along.

CUDA, a warp a row everywhere:
1. Heads: norm, weight and rotation, laid out head by head.
2. Soft cap, causal mask and softmax.
3. The gradient of the products, in the place of the gradient of the probabilities.
4. Backward through rotation and norm, laid out token by token, with the norm weight's gradient in partial sums.
CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

WARPS = 8
THREADS = 32 * WARPS
ROWS = 32  # rows of a warp in the backward pass through the norm
VECTOR = 4  # float32 values in 16 bytes
LOWEST = -3.0e38


def capped(x, cap):
    """cap · tanh(x / cap): a series where the quotient is small, since 1 - 2 / (exp + 1) has no digits left there."""
    square = (x / cap) * (x / cap)
    series = square * (T.float32(-17 / 315) + square * T.float32(62 / 2835))
    series = square * (T.float32(-1 / 3) + square * (T.float32(2 / 15) + series))
    far = cap - T.float32(2) * cap / (T.exp(T.float32(2) * x / cap) + T.float32(1))
    return T.if_then_else(square < T.float32(0.0625), x + x * series, far)


@T.jit
def heads_cuda(
    x: T.handle,
    w: T.handle,
    c: T.handle,
    s: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    heads: T.constexpr,
    half: T.constexpr,
):
    """A lane has `half` / 32 neighbouring values of each half."""
    batch = T.int32()
    length = T.int32()
    source = T.match_buffer(x, (batch, length, heads, 2, half), "float32")
    weight = T.match_buffer(w, (2, half), "float32")
    cos = T.match_buffer(c, (batch, length, 2, half), "float32")
    sin = T.match_buffer(s, (batch, length, 2, half), "float32")
    out = T.match_buffer(o, (batch, heads, length, 2, half), "float32")
    T.device_entry()
    block, member = T.cta_id([T.ceildiv(length * heads, WARPS), batch])
    thread = T.thread_id([THREADS])
    row = T.alloc_local((1,), "int32")
    head = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    a = T.alloc_local((2, half // 32), "float32")
    y = T.alloc_local((2, half // 32), "float32")
    cosines = T.alloc_local((2, half // 32), "float32")
    sines = T.alloc_local((2, half // 32), "float32")
    total = T.alloc_local((1,), "float32")
    row[0] = block * WARPS + thread // 32
    head[0] = row[0] % heads
    row[0] = row[0] // heads
    lane[0] = thread % 32
    if row[0] < length:
        for i in T.unroll(2):
            for e in T.vectorized(half // 32):
                a[i, e] = source[member, row[0], head[0], i, lane[0] * (half // 32) + e]
            for e in T.vectorized(half // 32):
                cosines[i, e] = cos[member, row[0], i, lane[0] * (half // 32) + e]
            for e in T.vectorized(half // 32):
                sines[i, e] = sin[member, row[0], i, lane[0] * (half // 32) + e]
        total[0] = T.float32(0)
        for i in T.unroll(2):
            for e in T.unroll(half // 32):
                total[0] = total[0] + a[i, e] * a[i, e]
        total[0] = T.rsqrt(T.cuda.warp_sum(total[0]) * T.float32(1 / (2 * half)) + eps)
        for i in T.unroll(2):
            for e in T.unroll(half // 32):
                a[i, e] = a[i, e] * total[0] * (T.float32(1) + weight[i, lane[0] * (half // 32) + e])
        for e in T.unroll(half // 32):
            y[0, e] = a[0, e] * cosines[0, e] - a[1, e] * sines[0, e]
            y[1, e] = a[1, e] * cosines[1, e] + a[0, e] * sines[1, e]
        for i in T.unroll(2):
            for e in T.vectorized(half // 32):
                out[member, head[0], row[0], i, lane[0] * (half // 32) + e] = y[i, e]


@T.jit
def softmax_cuda(
    x: T.handle, scale: T.float32, cap: T.float32, p: T.handle, *, length: T.constexpr, chunks: T.constexpr
):
    """A row sees the keys up to its own number, modulo `length`; `chunks` times 4 values a lane."""
    rows = T.int32()
    products = T.match_buffer(x, (rows, length), "float32")
    probabilities = T.match_buffer(p, (rows, length), "float32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(rows, WARPS)])
    thread = T.thread_id([THREADS])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    values = T.alloc_local((chunks, VECTOR), "float32")
    top = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    row[0] = block * WARPS + thread // 32
    lane[0] = thread % 32
    if row[0] < rows:
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                values[c, e] = products[row[0], (c * 32 + lane[0]) * VECTOR + e]
        top[0] = T.float32(LOWEST)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                values[c, e] = capped(values[c, e] * scale, cap)
                if (c * 32 + lane[0]) * VECTOR + e > row[0] % length:
                    values[c, e] = T.float32(LOWEST)
                top[0] = T.max(top[0], values[c, e])
        top[0] = T.cuda.warp_max(top[0])
        total[0] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                values[c, e] = T.exp(values[c, e] - top[0])
                total[0] = total[0] + values[c, e]
        total[0] = T.float32(1) / T.cuda.warp_sum(total[0])
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                values[c, e] = values[c, e] * total[0]
            for e in T.vectorized(VECTOR):
                probabilities[row[0], (c * 32 + lane[0]) * VECTOR + e] = values[c, e]


@T.jit
def products_cuda(
    x: T.handle, p: T.handle, scale: T.float32, cap: T.float32, g: T.handle, *, length: T.constexpr, chunks: T.constexpr
):
    """Replaces the gradients of the probabilities."""
    rows = T.int32()
    products = T.match_buffer(x, (rows, length), "float32")
    probabilities = T.match_buffer(p, (rows, length), "float32")
    grads = T.match_buffer(g, (rows, length), "float32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(rows, WARPS)])
    thread = T.thread_id([THREADS])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    values = T.alloc_local((chunks, VECTOR), "float32")
    shares = T.alloc_local((chunks, VECTOR), "float32")
    grad = T.alloc_local((chunks, VECTOR), "float32")
    total = T.alloc_local((1,), "float32")
    row[0] = block * WARPS + thread // 32
    lane[0] = thread % 32
    if row[0] < rows:
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                values[c, e] = products[row[0], (c * 32 + lane[0]) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                shares[c, e] = probabilities[row[0], (c * 32 + lane[0]) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                grad[c, e] = grads[row[0], (c * 32 + lane[0]) * VECTOR + e]
        total[0] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                total[0] = total[0] + shares[c, e] * grad[c, e]
        total[0] = T.cuda.warp_sum(total[0])
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                values[c, e] = capped(values[c, e] * scale, cap) / cap
                grad[c, e] = (
                    scale * shares[c, e] * (grad[c, e] - total[0]) * (T.float32(1) - values[c, e] * values[c, e])
                )
            for e in T.vectorized(VECTOR):
                grads[row[0], (c * 32 + lane[0]) * VECTOR + e] = grad[c, e]


@T.jit
def norm_cuda(
    g: T.handle,
    x: T.handle,
    w: T.handle,
    c: T.handle,
    s: T.handle,
    eps: T.float32,
    o: T.handle,
    p: T.handle,
    *,
    heads: T.constexpr,
    half: T.constexpr,
):
    """A warp has `ROWS` tokens of a head."""
    batch = T.int32()
    length = T.int32()
    blocks = T.int32()
    grads = T.match_buffer(g, (batch, heads, length, 2, half), "float32")
    source = T.match_buffer(x, (batch, length, heads, 2, half), "float32")
    weight = T.match_buffer(w, (2, half), "float32")
    cos = T.match_buffer(c, (batch, length, 2, half), "float32")
    sin = T.match_buffer(s, (batch, length, 2, half), "float32")
    out = T.match_buffer(o, (batch, length, heads, 2, half), "float32")
    partial = T.match_buffer(p, (batch, blocks, heads, 2, half), "float32")
    T.device_entry()
    block, head, member = T.cta_id([blocks, heads, batch])
    thread = T.thread_id([THREADS])
    sums = T.alloc_shared((WARPS, 2, half), "float32")
    lane = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    a = T.alloc_local((2, half // 32), "float32")
    d = T.alloc_local((2, half // 32), "float32")
    y = T.alloc_local((2, half // 32), "float32")
    cosines = T.alloc_local((2, half // 32), "float32")
    sines = T.alloc_local((2, half // 32), "float32")
    added = T.alloc_local((2, half // 32), "float32")
    inverse = T.alloc_local((1,), "float32")
    inner = T.alloc_local((1,), "float32")
    lane[0] = thread % 32
    for i in T.unroll(2):
        for e in T.unroll(half // 32):
            added[i, e] = T.float32(0)
    for step in T.serial(ROWS):
        token[0] = (block * ROWS + step) * WARPS + thread // 32
        if token[0] < length:
            for i in T.unroll(2):
                for e in T.vectorized(half // 32):
                    a[i, e] = source[member, token[0], head, i, lane[0] * (half // 32) + e]
                for e in T.vectorized(half // 32):
                    d[i, e] = grads[member, head, token[0], i, lane[0] * (half // 32) + e]
                for e in T.vectorized(half // 32):
                    cosines[i, e] = cos[member, token[0], i, lane[0] * (half // 32) + e]
                for e in T.vectorized(half // 32):
                    sines[i, e] = sin[member, token[0], i, lane[0] * (half // 32) + e]
            inverse[0] = T.float32(0)
            for i in T.unroll(2):
                for e in T.unroll(half // 32):
                    inverse[0] = inverse[0] + a[i, e] * a[i, e]
            inverse[0] = T.rsqrt(T.cuda.warp_sum(inverse[0]) * T.float32(1 / (2 * half)) + eps)
            inner[0] = T.float32(0)
            for e in T.unroll(half // 32):
                y[0, e] = d[0, e] * cosines[0, e] + d[1, e] * sines[1, e]
                y[1, e] = d[1, e] * cosines[1, e] - d[0, e] * sines[0, e]
            for i in T.unroll(2):
                for e in T.unroll(half // 32):
                    a[i, e] = a[i, e] * inverse[0]
                    added[i, e] = added[i, e] + y[i, e] * a[i, e]
                    y[i, e] = y[i, e] * (T.float32(1) + weight[i, lane[0] * (half // 32) + e])
                    inner[0] = inner[0] + y[i, e] * a[i, e]
            inner[0] = T.cuda.warp_sum(inner[0]) * T.float32(1 / (2 * half))
            for i in T.unroll(2):
                for e in T.unroll(half // 32):
                    y[i, e] = inverse[0] * (y[i, e] - a[i, e] * inner[0])
                for e in T.vectorized(half // 32):
                    out[member, token[0], head, i, lane[0] * (half // 32) + e] = y[i, e]
    for i in T.unroll(2):
        for e in T.unroll(half // 32):
            sums[thread // 32, i, lane[0] * (half // 32) + e] = added[i, e]
    T.cuda.cta_sync()
    if thread < 2 * half:
        inner[0] = T.float32(0)
        for warp in T.unroll(WARPS):
            inner[0] = inner[0] + sums[warp, thread // half, thread % half]
        partial[member, block, head, thread // half, thread % half] = inner[0]


@T.jit
def heads_cpu(
    x: T.handle,
    w: T.handle,
    c: T.handle,
    s: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    heads: T.constexpr,
    half: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    source = T.match_buffer(x, (batch, length, heads, 2, half), "float32")
    weight = T.match_buffer(w, (2, half), "float32")
    cos = T.match_buffer(c, (batch, length, 2, half), "float32")
    sin = T.match_buffer(s, (batch, length, 2, half), "float32")
    out = T.match_buffer(o, (batch, heads, length, 2, half), "float32")
    total = T.alloc_buffer((1,), "float32", scope="local")
    pair = T.alloc_buffer((2,), "float32", scope="local")
    for b, t, h in T.grid(batch, length, heads):
        total[0] = T.float32(0)
        for i, e in T.grid(2, half):
            total[0] = total[0] + source[b, t, h, i, e] * source[b, t, h, i, e]
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(2 * half) + eps)
        for e in T.serial(half):
            for i in T.serial(2):
                pair[i] = source[b, t, h, i, e] * total[0] * (T.float32(1) + weight[i, e])
            out[b, h, t, 0, e] = pair[0] * cos[b, t, 0, e] - pair[1] * sin[b, t, 0, e]
            out[b, h, t, 1, e] = pair[1] * cos[b, t, 1, e] + pair[0] * sin[b, t, 1, e]


@T.jit
def softmax_cpu(x: T.handle, scale: T.float32, cap: T.float32, p: T.handle, *, length: T.constexpr):
    rows = T.int32()
    products = T.match_buffer(x, (rows, length), "float32")
    probabilities = T.match_buffer(p, (rows, length), "float32")
    top = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        top[0] = T.float32(LOWEST)
        for c in T.serial(length):
            probabilities[row, c] = T.float32(LOWEST)
            if c <= row % length:
                probabilities[row, c] = capped(products[row, c] * scale, cap)
            top[0] = T.max(top[0], probabilities[row, c])
        total[0] = T.float32(0)
        for c in T.serial(length):
            probabilities[row, c] = T.exp(probabilities[row, c] - top[0])
            total[0] = total[0] + probabilities[row, c]
        for c in T.serial(length):
            probabilities[row, c] = probabilities[row, c] / total[0]


@T.jit
def products_cpu(x: T.handle, p: T.handle, scale: T.float32, cap: T.float32, g: T.handle, *, length: T.constexpr):
    rows = T.int32()
    products = T.match_buffer(x, (rows, length), "float32")
    probabilities = T.match_buffer(p, (rows, length), "float32")
    grads = T.match_buffer(g, (rows, length), "float32")
    total = T.alloc_buffer((1,), "float32", scope="local")
    value = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        total[0] = T.float32(0)
        for c in T.serial(length):
            total[0] = total[0] + probabilities[row, c] * grads[row, c]
        for c in T.serial(length):
            value[0] = capped(products[row, c] * scale, cap) / cap
            grads[row, c] = (
                scale * probabilities[row, c] * (grads[row, c] - total[0]) * (T.float32(1) - value[0] * value[0])
            )


@T.jit
def norm_cpu(
    g: T.handle,
    x: T.handle,
    w: T.handle,
    c: T.handle,
    s: T.handle,
    eps: T.float32,
    o: T.handle,
    p: T.handle,
    *,
    heads: T.constexpr,
    half: T.constexpr,
):
    """One partial sum for each head of a batch member."""
    batch = T.int32()
    length = T.int32()
    blocks = T.int32()
    grads = T.match_buffer(g, (batch, heads, length, 2, half), "float32")
    source = T.match_buffer(x, (batch, length, heads, 2, half), "float32")
    weight = T.match_buffer(w, (2, half), "float32")
    cos = T.match_buffer(c, (batch, length, 2, half), "float32")
    sin = T.match_buffer(s, (batch, length, 2, half), "float32")
    out = T.match_buffer(o, (batch, length, heads, 2, half), "float32")
    partial = T.match_buffer(p, (batch, blocks, heads, 2, half), "float32")
    y = T.alloc_buffer((2, half), "float32", scope="local")
    inverse = T.alloc_buffer((1,), "float32", scope="local")
    inner = T.alloc_buffer((1,), "float32", scope="local")
    for b, k, h, i, e in T.grid(batch, blocks, heads, 2, half):
        partial[b, k, h, i, e] = T.float32(0)
    for b, t, h in T.grid(batch, length, heads):
        inverse[0] = T.float32(0)
        for i, e in T.grid(2, half):
            inverse[0] = inverse[0] + source[b, t, h, i, e] * source[b, t, h, i, e]
        inverse[0] = T.float32(1) / T.sqrt(inverse[0] / T.float32(2 * half) + eps)
        inner[0] = T.float32(0)
        for e in T.serial(half):
            y[0, e] = grads[b, h, t, 0, e] * cos[b, t, 0, e] + grads[b, h, t, 1, e] * sin[b, t, 1, e]
            y[1, e] = grads[b, h, t, 1, e] * cos[b, t, 1, e] - grads[b, h, t, 0, e] * sin[b, t, 0, e]
        for i, e in T.grid(2, half):
            partial[b, 0, h, i, e] = partial[b, 0, h, i, e] + y[i, e] * source[b, t, h, i, e] * inverse[0]
            y[i, e] = y[i, e] * (T.float32(1) + weight[i, e])
            inner[0] = inner[0] + y[i, e] * source[b, t, h, i, e] * inverse[0]
        for i, e in T.grid(2, half):
            out[b, t, h, i, e] = inverse[0] * (
                y[i, e] - source[b, t, h, i, e] * inverse[0] * inner[0] / T.float32(2 * half)
            )


def compile_for(
    arch: str, query_heads: int = 24, kv_heads: int = 8, length: int = 256, size: int = 128
) -> list[tvm.runtime.Executable]:
    """Heads of queries and of keys, softmax, its backward, backward of both norms for `arch` (`llvm`, `sm_90a`,
    `sm_100a`, ...); needs no GPU."""
    half = size // 2
    if arch == "llvm":
        kernels = [
            heads_cpu.specialize(heads=query_heads, half=half),
            heads_cpu.specialize(heads=kv_heads, half=half),
            softmax_cpu.specialize(length=length),
            products_cpu.specialize(length=length),
            norm_cpu.specialize(heads=query_heads, half=half),
            norm_cpu.specialize(heads=kv_heads, half=half),
        ]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert half % 32 == 0 and size <= THREADS and length % (32 * VECTOR) == 0
    row = {"length": length, "chunks": length // (32 * VECTOR)}
    kernels = [
        heads_cuda.specialize(heads=query_heads, half=half),
        heads_cuda.specialize(heads=kv_heads, half=half),
        softmax_cuda.specialize(**row),
        products_cuda.specialize(**row),
        norm_cuda.specialize(heads=query_heads, half=half),
        norm_cuda.specialize(heads=kv_heads, half=half),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, query_heads: int, kv_heads: int, length: int, size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, query_heads, kv_heads, length, size)]


def solve(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    o_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    scaling: float,
    attn_logit_softcapping: float,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, ...]:
    (batch, length, hidden), size = hidden_states.shape, q_norm_weight.shape[0]
    query_heads, kv_heads = len(q_weight) // size, len(k_weight) // size
    q_forward, k_forward, softmax, to_products, q_backward, k_backward = kernels_for(
        cos.device, query_heads, kv_heads, length, size
    )
    halves = (2, size // 2)
    tables = (cos.view(batch, length, *halves), sin.view(batch, length, *halves))
    x, grad = hidden_states.view(-1, hidden), grad_output.view(-1, hidden)
    q_projected = torch.mm(x, q_weight.t()).view(batch, length, query_heads, *halves)
    k_projected = torch.mm(x, k_weight.t()).view(batch, length, kv_heads, *halves)
    v = torch.mm(x, v_weight.t()).view(batch, length, kv_heads, size).transpose(1, 2).flatten(0, 1)
    q = x.new_empty(batch, query_heads, length, *halves)
    k = x.new_empty(batch, kv_heads, length, *halves)
    q_forward(q_projected, q_norm_weight.view(halves), *tables, rms_norm_eps, q)
    k_forward(k_projected, k_norm_weight.view(halves), *tables, rms_norm_eps, k)
    grouped = (batch * kv_heads, -1, size)  # the rows of all query heads that share keys and values
    q_rows, k_rows = q.view(grouped), k.view(grouped)
    products = torch.bmm(q_rows, k_rows.mT)
    probabilities = torch.empty_like(products)
    softmax(products.view(-1, length), scaling, attn_logit_softcapping, probabilities.view(-1, length))
    attended = torch.bmm(probabilities, v).view(batch, query_heads, length, size).transpose(1, 2).reshape(len(x), -1)
    grad_o_weight = torch.mm(grad.t(), attended)

    grad_attended = torch.mm(grad, o_weight).view(batch, length, query_heads, size).transpose(1, 2).reshape(grouped)
    grad_v = torch.bmm(probabilities.mT, grad_attended)
    grad_products = torch.bmm(grad_attended, v.mT)
    to_products(
        *(products.view(-1, length), probabilities.view(-1, length), scaling, attn_logit_softcapping),
        grad_products.view(-1, length),
    )
    grad_q, grad_k = torch.bmm(grad_products, k_rows), torch.bmm(grad_products.mT, q_rows)
    blocks = -(-length // (ROWS * WARPS)) if x.is_cuda else 1
    q_partial = x.new_empty(batch, blocks, query_heads, *halves)
    k_partial = x.new_empty(batch, blocks, kv_heads, *halves)
    gq, gk = torch.empty_like(q_projected), torch.empty_like(k_projected)
    q_backward(grad_q.view(q.shape), q_projected, q_norm_weight.view(halves), *tables, rms_norm_eps, gq, q_partial)
    k_backward(grad_k.view(k.shape), k_projected, k_norm_weight.view(halves), *tables, rms_norm_eps, gk, k_partial)
    gv = grad_v.view(batch, kv_heads, length, size).transpose(1, 2).reshape(len(x), -1)
    gq, gk = gq.view(len(x), -1), gk.view(len(x), -1)
    grad_hidden = torch.mm(gq, q_weight).addmm_(gk, k_weight).addmm_(gv, v_weight)
    return (
        grad_hidden.view_as(hidden_states),
        torch.mm(gq.t(), x),
        torch.mm(gk.t(), x),
        torch.mm(gv.t(), x),
        grad_o_weight,
        q_partial.sum(dim=(0, 1, 2)).flatten(),
        k_partial.sum(dim=(0, 1, 2)).flatten(),
    )
