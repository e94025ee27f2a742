"""p43, backward pass of embedding lookup and RMSNorm, in CuTe DSL.

1. Tokens of one id become a linked list: each token is put in front of what stood there, with an atomic operation.
2. A thread block takes tokens in turn; a thread has twice 8 columns (16 bytes of the gradient). The token at the front
   of its list adds up the whole list in float32 and writes the row of the table once. Beside each token the thread
   block looks at a few rows of the table and writes zeros to those without tokens. As every token is met once, the
   weight's gradient is summed up along the way, in registers.
3. The blocks' parts of the weight's gradient are added up, 32 columns a thread block.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VOCABULARY = 65536
VECTOR = 8  # bfloat16 values in 16 bytes
LANES = 32
ROWS = 8  # of the parts, that a thread block of the last kernel reads at a time
LOOKED_AT = 4  # rows of the table that are looked at together
THREADS = 256
BLOCKS = 2  # on a multiprocessor
LINKERS = 128
NOWHERE = -1


@cute.kernel
def link_kernel(ids: cute.Tensor, heads: cute.Tensor, following: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = block * LINKERS + thread
    if token < ids.shape[0]:
        place = heads.iterator + ids[token].to(cutlass.Int32)
        following[token] = cute.arch.atomic_exch(place, cutlass.Int32(token))


@cute.jit
def load_token(
    token: cutlass.Int32,
    grad: cute.Tensor,
    hidden: cute.Tensor,
    g: cute.Tensor,
    x: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    for c in cutlass.range_constexpr(g.shape[1]):
        cute.autovec_copy(cute.local_tile(grad[token, None], (VECTOR,), (c * threads + thread,)), g[None, c])
        cute.autovec_copy(cute.local_tile(hidden[token, None], (VECTOR,), (c * threads + thread,)), x[None, c])


@cute.jit
def clear_rows(
    first: cutlass.Int32, share: cutlass.Int32, heads: cute.Tensor, out: cute.Tensor, threads: cutlass.Constexpr[int]
):
    """Zeros to those of the `share` rows from `first` on that have no tokens."""
    thread, _, _ = cute.arch.thread_idx()
    chunks = cutlass.const_expr(out.shape[1] // VECTOR // threads)
    row_heads = cute.make_rmem_tensor(LOOKED_AT, cutlass.Int32)
    zeros = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    zeros.fill(0.0)
    for start in cutlass.range(0, share, LOOKED_AT):
        row_heads.fill(0)
        for d in cutlass.range_constexpr(LOOKED_AT):
            if start + d < share and first + start + d < VOCABULARY:
                row_heads[d] = heads[first + start + d]
        for d in cutlass.range_constexpr(LOOKED_AT):
            if row_heads[d] < 0:
                for c in cutlass.range_constexpr(chunks):
                    place = (c * threads + thread,)
                    cute.autovec_copy(zeros, cute.local_tile(out[first + start + d, None], (VECTOR,), place))


@cute.kernel
def rows_kernel(
    grad: cute.Tensor,
    ids: cute.Tensor,
    hidden: cute.Tensor,
    rstd: cute.Tensor,
    weight: cute.Tensor,
    heads: cute.Tensor,
    following: cute.Tensor,
    out: cute.Tensor,
    parts: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tokens, blocks = grad.shape[0], parts.shape[0]
    width = cutlass.const_expr(grad.shape[1])
    chunks = cutlass.const_expr(width // VECTOR // threads)
    lanes = cutlass.const_expr(min(threads, LANES))
    warps = cutlass.const_expr(threads // lanes)
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((warps, 2)), 16)
    g = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    w = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    x = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    total = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    part = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    part.fill(0.0)
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (c * threads + thread,)), w[None, c])
    share = (VOCABULARY + tokens - 1) // tokens
    half = cutlass.Int32(0)
    # The id of a token is read two turns ahead, the front of its list one turn ahead.
    next_id, next_head = cutlass.Int32(0), cutlass.Int32(NOWHERE)
    if block < tokens:
        next_id = ids[block].to(cutlass.Int32)
        next_head = heads[next_id]
    for token in cutlass.range(block, tokens, blocks):
        id, head = next_id, next_head
        if token + blocks < tokens:
            next_id = ids[token + blocks].to(cutlass.Int32)
        current, after, scale = cutlass.Int32(NOWHERE), cutlass.Int32(NOWHERE), cutlass.Float32(0.0)
        if head == token:
            current = token
            load_token(token, grad, hidden, g, x, threads)
            scale = rstd[token]
            after = following[token]
        clear_rows(token * share, share, heads, out, threads)
        if token + blocks < tokens:
            next_head = heads[next_id]
        total.fill(0.0)
        length = cutlass.Int32(0)
        while current >= 0 and length < tokens:
            values = g.load().to(cutlass.Float32)
            weighted = values * w.load().to(cutlass.Float32)
            x.store(x.load() * scale)
            part.store(part.load() + values * x.load())
            # What does not need the projection is added before it is known.
            total.store(total.load() + weighted * scale)
            projection = (weighted * x.load()).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
            projection = cute.arch.warp_reduction_sum(projection, threads_in_group=lanes)
            if thread % lanes == 0:
                sums[thread // lanes, half] = projection
            cute.arch.sync_threads()  # one is enough: the next token writes the other half of the sums
            projection = cutlass.Float32(0.0)
            for k in cutlass.range_constexpr(warps):
                projection += sums[k, half]
            total.store(total.load() - x.load() * (projection * scale * (1.0 / width)))
            half = 1 - half
            length += 1
            current = after
            if current >= 0:
                load_token(current, grad, hidden, g, x, threads)
                scale = rstd[current]
                after = following[current]
        if length > 0:
            g.store(total.load().to(cutlass.BFloat16))
            for c in cutlass.range_constexpr(chunks):
                cute.autovec_copy(g[None, c], cute.local_tile(out[id, None], (VECTOR,), (c * threads + thread,)))
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(part[None, c], cute.local_tile(parts[block, None], (VECTOR,), (c * threads + thread,)))


@cute.kernel
def weight_kernel(parts: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    lane, first = thread % LANES, thread // LANES
    column = tile * LANES + lane
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((LANES, ROWS)), 16)
    total = cutlass.Float32(0.0)
    if column < out.shape[0]:
        for row in cutlass.range(first, parts.shape[0], ROWS):
            total += parts[row, column]
    sums[lane, first] = total
    cute.arch.sync_threads()
    if first == 0 and column < out.shape[0]:
        total = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(ROWS):
            total += sums[lane, k]
        out[column] = total.to(cutlass.BFloat16)


@cute.jit
def backward(
    grad: cute.Tensor,
    ids: cute.Tensor,
    hidden: cute.Tensor,
    rstd: cute.Tensor,
    weight: cute.Tensor,
    heads: cute.Tensor,
    following: cute.Tensor,
    out: cute.Tensor,
    parts: cute.Tensor,
    grad_weight: cute.Tensor,
    stream,
):
    width = cutlass.const_expr(grad.shape[1])
    threads = cutlass.const_expr(min(width // VECTOR, THREADS))
    link_kernel(ids, heads, following).launch(
        grid=(cute.ceil_div(ids.shape[0], LINKERS), 1, 1), block=(LINKERS, 1, 1), stream=stream
    )
    rows_kernel(grad, ids, hidden, rstd, weight, heads, following, out, parts, threads).launch(
        grid=(parts.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )
    weight_kernel(parts, grad_weight).launch(
        grid=((width + LANES - 1) // LANES, 1, 1), block=(LANES * ROWS, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 4096):
    """The three kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    threads = min(width // VECTOR, THREADS)
    assert width % (VECTOR * threads) == 0, "a row must fill whole thread blocks"
    assert threads % LANES == 0 or threads in (1, 2, 4, 8, 16), "a row must fill whole warps"
    tokens, blocks = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        backward,
        fake(cutlass.BFloat16, tokens, width),
        fake(cutlass.Int64, tokens),
        fake(cutlass.Float32, tokens, width),
        fake(cutlass.Float32, tokens),
        fake(cutlass.BFloat16, width),
        fake(cutlass.Int32, VOCABULARY),
        fake(cutlass.Int32, tokens),
        fake(cutlass.BFloat16, VOCABULARY, width),
        fake(cutlass.Float32, blocks, width),
        fake(cutlass.BFloat16, width),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, width: int):
    """How many thread blocks share the tokens, and the kernels."""
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}a"
    return BLOCKS * properties.multi_processor_count, compile_for(arch, width)


def solve(
    grad_output: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states_fp32: torch.Tensor,
    rstd: torch.Tensor,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    width, device = len(norm_weight), norm_weight.device
    blocks, kernel = kernel_for(device, width)
    ids = input_ids.view(-1)
    heads = torch.full((VOCABULARY,), NOWHERE, dtype=torch.int32, device=device)
    following = torch.empty(ids.shape, dtype=torch.int32, device=device)
    parts = torch.empty(blocks, width, dtype=torch.float32, device=device)
    grad_embedding, grad_norm_weight = norm_weight.new_empty(VOCABULARY, width), torch.empty_like(norm_weight)
    rows = grad_output.view(-1, width), ids, hidden_states_fp32.view(-1, width), rstd.view(-1)
    kernel(*rows, norm_weight, heads, following, grad_embedding, parts, grad_norm_weight)
    return grad_embedding, grad_norm_weight
