"""p10, backward of an attention layer with normalised heads and soft-capped logits, in CuTe DSL. All products stay with
eager PyTorch; the query heads of a KV head are further rows of it: nothing is repeated, and sums over them come along.

A warp a row everywhere:
1. Heads: norm, weight and rotation, laid out head by head.
2. Soft cap, causal mask and softmax.
3. The gradient of the products, in the place of the gradient of the probabilities.
4. Backward through rotation and norm, laid out token by token, with the norm weight's gradient in partial sums.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

WARPS = 8
THREADS = 32 * WARPS
ROWS = 32  # rows of a warp in the backward pass through the norm
VECTOR = 4  # float32 values in 16 bytes
LOWEST = -3.0e38


@cute.jit
def capped(x: cutlass.Float32, cap: cutlass.Float32):
    """cap · tanh(x / cap): a series where the quotient is small, since 1 - 2 / (exp + 1) has no digits left there."""
    square = (x / cap) * (x / cap)
    series = square * (-17 / 315 + square * (62 / 2835))
    series = square * (-1 / 3 + square * (2 / 15 + series))
    result = x + x * series
    if square >= 0.0625:
        result = cap - 2.0 * cap / (cute.math.exp(2.0 * x / cap) + 1.0)
    return result


@cute.jit
def load_halves(source: cute.Tensor, target: cute.Tensor):
    """A lane's neighbouring values of both halves of a head; a column of the target is a half."""
    thread, _, _ = cute.arch.thread_idx()
    share = cutlass.const_expr(target.shape[0])
    for i in cutlass.range_constexpr(2):
        cute.autovec_copy(cute.local_tile(source[i, None], (share,), (thread % 32,)), target[None, i])


@cute.jit
def store_halves(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    share = cutlass.const_expr(source.shape[0])
    for i in cutlass.range_constexpr(2):
        cute.autovec_copy(source[None, i], cute.local_tile(target[i, None], (share,), (thread % 32,)))


@cute.jit
def mean_of_products(a: cute.Tensor, b: cute.Tensor):
    """Over a warp's row."""
    total = (a.load() * b.load()).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total) / (cute.size(a) * 32)


@cute.kernel
def heads_kernel(
    source: cute.Tensor, weight: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, eps: cutlass.Float32, out: cute.Tensor
):
    thread, _, _ = cute.arch.thread_idx()
    block, member, _ = cute.arch.block_idx()
    heads = cutlass.const_expr(source.shape[2])
    share = cutlass.const_expr(source.shape[4] // 32)
    row = block * WARPS + thread // 32
    token, head = row // heads, row % heads
    if token < source.shape[1]:
        a = cute.make_rmem_tensor((share, 2), cutlass.Float32)
        y = cute.make_rmem_tensor((share, 2), cutlass.Float32)
        w = cute.make_rmem_tensor((share, 2), cutlass.Float32)
        cosines = cute.make_rmem_tensor((share, 2), cutlass.Float32)
        sines = cute.make_rmem_tensor((share, 2), cutlass.Float32)
        load_halves(source[member, token, head, None, None], a)
        load_halves(cos[member, token, None, None], cosines)
        load_halves(sin[member, token, None, None], sines)
        load_halves(weight, w)
        inverse = cute.math.rsqrt(mean_of_products(a, a) + eps)
        a.store(a.load() * inverse * (1.0 + w.load()))
        first, second = a[None, 0].load(), a[None, 1].load()
        y[None, 0].store(first * cosines[None, 0].load() - second * sines[None, 0].load())
        y[None, 1].store(second * cosines[None, 1].load() + first * sines[None, 1].load())
        store_halves(y, out[member, head, token, None, None])


@cute.kernel
def softmax_kernel(products: cute.Tensor, scale: cutlass.Float32, cap: cutlass.Float32, probabilities: cute.Tensor):
    """A row sees the keys up to its own number, modulo their count."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row, lane = block * WARPS + thread // 32, thread % 32
    length = cutlass.const_expr(products.shape[1])
    chunks = cutlass.const_expr(length // (32 * VECTOR))
    if row < products.shape[0]:
        values = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(cute.local_tile(products[row, None], (VECTOR,), (c * 32 + lane,)), values[None, c])
        for c in cutlass.range_constexpr(chunks):
            for e in cutlass.range_constexpr(VECTOR):
                value = capped(values[e, c] * scale, cap)
                if (c * 32 + lane) * VECTOR + e > row % length:
                    value = cutlass.Float32(LOWEST)
                values[e, c] = value
        x = values.load()
        top = cute.arch.warp_reduction_max(x.reduce(cute.ReductionOp.MAX, cutlass.Float32(LOWEST), 0))
        values.store(cute.math.exp(x - top))
        total = values.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        inverse = 1.0 / cute.arch.warp_reduction_sum(total)
        values.store(values.load() * inverse)
        for c in cutlass.range_constexpr(chunks):
            target = cute.local_tile(probabilities[row, None], (VECTOR,), (c * 32 + lane,))
            cute.autovec_copy(values[None, c], target)


@cute.kernel
def products_kernel(
    products: cute.Tensor,
    probabilities: cute.Tensor,
    scale: cutlass.Float32,
    cap: cutlass.Float32,
    grads: cute.Tensor,
):
    """Replaces the gradients of the probabilities."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row, lane = block * WARPS + thread // 32, thread % 32
    chunks = cutlass.const_expr(products.shape[1] // (32 * VECTOR))
    if row < products.shape[0]:
        values = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
        shares = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
        grad = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(cute.local_tile(products[row, None], (VECTOR,), (c * 32 + lane,)), values[None, c])
            cute.autovec_copy(cute.local_tile(probabilities[row, None], (VECTOR,), (c * 32 + lane,)), shares[None, c])
            cute.autovec_copy(cute.local_tile(grads[row, None], (VECTOR,), (c * 32 + lane,)), grad[None, c])
        total = (shares.load() * grad.load()).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total)
        for c in cutlass.range_constexpr(chunks):
            for e in cutlass.range_constexpr(VECTOR):
                squashed = capped(values[e, c] * scale, cap) / cap
                grad[e, c] = scale * shares[e, c] * (grad[e, c] - total) * (1.0 - squashed * squashed)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(grad[None, c], cute.local_tile(grads[row, None], (VECTOR,), (c * 32 + lane,)))


@cute.kernel
def norm_kernel(
    grads: cute.Tensor,
    source: cute.Tensor,
    weight: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    partial: cute.Tensor,
):
    """A warp has `ROWS` tokens of a head."""
    thread, _, _ = cute.arch.thread_idx()
    block, head, member = cute.arch.block_idx()
    half = cutlass.const_expr(source.shape[4])
    share = cutlass.const_expr(half // 32)
    sums = cutlass.utils.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout((WARPS, 2, half), stride=(2 * half, half, 1)), 16
    )
    a = cute.make_rmem_tensor((share, 2), cutlass.Float32)
    d = cute.make_rmem_tensor((share, 2), cutlass.Float32)
    y = cute.make_rmem_tensor((share, 2), cutlass.Float32)
    w = cute.make_rmem_tensor((share, 2), cutlass.Float32)
    cosines = cute.make_rmem_tensor((share, 2), cutlass.Float32)
    sines = cute.make_rmem_tensor((share, 2), cutlass.Float32)
    added = cute.make_rmem_tensor((share, 2), cutlass.Float32)
    added.fill(0.0)
    load_halves(weight, w)
    for step in cutlass.range(ROWS):
        token = (block * ROWS + step) * WARPS + thread // 32
        if token < source.shape[1]:
            load_halves(source[member, token, head, None, None], a)
            load_halves(grads[member, head, token, None, None], d)
            load_halves(cos[member, token, None, None], cosines)
            load_halves(sin[member, token, None, None], sines)
            inverse = cute.math.rsqrt(mean_of_products(a, a) + eps)
            first, second = d[None, 0].load(), d[None, 1].load()
            y[None, 0].store(first * cosines[None, 0].load() + second * sines[None, 1].load())
            y[None, 1].store(second * cosines[None, 1].load() - first * sines[None, 0].load())
            a.store(a.load() * inverse)
            added.store(added.load() + y.load() * a.load())
            y.store(y.load() * (1.0 + w.load()))
            inner = mean_of_products(y, a)
            y.store((y.load() - a.load() * inner) * inverse)
            store_halves(y, out[member, token, head, None, None])
    store_halves(added, sums[thread // 32, None, None])
    cute.arch.sync_threads()
    if thread < 2 * half:
        total = cutlass.Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            total += sums[warp, thread // half, thread % half]
        partial[member, block, head, thread // half, thread % half] = total


@cute.jit
def forward_heads(
    source: cute.Tensor,
    weight: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    stream,
):
    batch, length, heads, _, _ = source.shape
    heads_kernel(source, weight, cos, sin, eps, out).launch(
        grid=((length * heads + WARPS - 1) // WARPS, batch, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def forward_softmax(
    products: cute.Tensor, scale: cutlass.Float32, cap: cutlass.Float32, probabilities: cute.Tensor, stream
):
    softmax_kernel(products, scale, cap, probabilities).launch(
        grid=((products.shape[0] + WARPS - 1) // WARPS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def backward_products(
    products: cute.Tensor,
    probabilities: cute.Tensor,
    scale: cutlass.Float32,
    cap: cutlass.Float32,
    grads: cute.Tensor,
    stream,
):
    products_kernel(products, probabilities, scale, cap, grads).launch(
        grid=((products.shape[0] + WARPS - 1) // WARPS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def backward_norm(
    grads: cute.Tensor,
    source: cute.Tensor,
    weight: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    partial: cute.Tensor,
    stream,
):
    batch, blocks, heads, _, _ = partial.shape
    norm_kernel(grads, source, weight, cos, sin, eps, out, partial).launch(
        grid=(blocks, heads, batch), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, query_heads: int = 24, kv_heads: int = 8, length: int = 256, size: int = 128):
    """Heads of queries and of keys, softmax, its backward, backward of both norms for `arch` (`sm_90a`, ...); needs no
    GPU."""
    half = size // 2
    assert half % 32 == 0 and size <= THREADS and length % (32 * VECTOR) == 0
    batch, tokens, rows, blocks = (cute.sym_int() for _ in range(4))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    zero = cutlass.Float32(0.0)

    def values(*shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    weight, table, row = values(2, half), values(batch, tokens, 2, half), values(rows, length)

    def forward(heads: int):
        by_token, by_head = values(batch, tokens, heads, 2, half), values(batch, heads, tokens, 2, half)
        return cute.compile(forward_heads, by_token, weight, table, table, zero, by_head, stream, options=options)

    def backward(heads: int):
        by_token, by_head = values(batch, tokens, heads, 2, half), values(batch, heads, tokens, 2, half)
        partial = values(batch, blocks, heads, 2, half)
        return cute.compile(
            backward_norm,
            *(by_head, by_token, weight, table, table, zero, by_token, partial, stream),
            options=options,
        )

    return (
        forward(query_heads),
        forward(kv_heads),
        cute.compile(forward_softmax, row, zero, zero, row, stream, options=options),
        cute.compile(backward_products, row, row, zero, zero, row, stream, options=options),
        backward(query_heads),
        backward(kv_heads),
    )


@cache
def kernels_for(device: torch.device, query_heads: int, kv_heads: int, length: int, size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", query_heads, kv_heads, length, size)


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
    q_forward, k_forward, run_softmax, run_backward, q_backward, k_backward = kernels_for(
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
    run_softmax(products.view(-1, length), scaling, attn_logit_softcapping, probabilities.view(-1, length))
    attended = torch.bmm(probabilities, v).view(batch, query_heads, length, size).transpose(1, 2).reshape(len(x), -1)
    grad_o_weight = torch.mm(grad.t(), attended)

    grad_attended = torch.mm(grad, o_weight).view(batch, length, query_heads, size).transpose(1, 2).reshape(grouped)
    grad_v = torch.bmm(probabilities.mT, grad_attended)
    grad_products = torch.bmm(grad_attended, v.mT)
    run_backward(
        *(products.view(-1, length), probabilities.view(-1, length), scaling, attn_logit_softcapping),
        grad_products.view(-1, length),
    )
    grad_q, grad_k = torch.bmm(grad_products, k_rows), torch.bmm(grad_products.mT, q_rows)
    blocks = -(-length // (ROWS * WARPS))
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
