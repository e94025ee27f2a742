"""p18, the selector of sparse attention, in CuTe DSL: two kernels, of which only sequences with more tokens than are
taken need the first.

1. Scores: a thread block has a page. A thread holds one token's key in registers and meets a quarter of the heads,
   whose queries lie in shared memory as float32.
2. Selection: a thread block has a sequence and finds the last score that is taken bit by bit: how many scores are no
   lower? A sum over the threads before it then says where each token goes.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

TOP_K = 2048
QUARTERS = 4
CODES = 16
SELECTORS = 1024


@cute.kernel
def score_kernel(
    queries: cute.Tensor,
    codes: cute.Tensor,
    scales: cute.Tensor,
    weights: cute.Tensor,
    lengths: cute.Tensor,
    table: cute.Tensor,
    scores: cute.Tensor,
):
    """`codes` and `scales` are the same pages, as bytes and as float32; the scales come after the codes."""
    thread, _, _ = cute.arch.thread_idx()
    place, sequence, _ = cute.arch.block_idx()
    heads, size = cutlass.const_expr(queries.shape[1]), cutlass.const_expr(queries.shape[2])
    page_size = cutlass.const_expr(scores.shape[2])
    threads = cutlass.const_expr(QUARTERS * page_size)
    chunks = cutlass.const_expr(size // CODES)
    share = cutlass.const_expr(heads // QUARTERS)
    shared = cutlass.utils.SmemAllocator()
    shared_queries = shared.allocate_tensor(cutlass.Float32, cute.make_layout((heads, size), stride=(size, 1)), 16)
    partial = shared.allocate_tensor(cutlass.Float32, cute.make_layout((page_size, QUARTERS)), 16)
    length = lengths[sequence]
    if length > TOP_K and place * page_size < length:
        token, quarter = thread % page_size, thread // page_size
        page = table[sequence, place]
        raw = cute.make_rmem_tensor(CODES, cutlass.Uint8)
        part = cute.make_rmem_tensor(CODES, cutlass.Float32)
        key = cute.make_rmem_tensor((CODES, chunks), cutlass.Float32)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(cute.local_tile(codes[page, None], (CODES,), (token * chunks + c,)), raw)
            key[None, c].store(cute.recast_tensor(raw, cutlass.Float8E4M3FN).load().to(cutlass.Float32))
        for step in cutlass.range_constexpr((heads * chunks + threads - 1) // threads):
            chunk = step * threads + thread
            if chunk < heads * chunks:
                source = queries[sequence, chunk // chunks, None]
                cute.autovec_copy(cute.local_tile(source, (CODES,), (chunk % chunks,)), raw)
                part.store(cute.recast_tensor(raw, cutlass.Float8E4M3FN).load().to(cutlass.Float32))
                target = cute.local_tile(shared_queries[chunk // chunks, None], (CODES,), (chunk % chunks,))
                cute.autovec_copy(part, target)
        cute.arch.sync_threads()
        total = cutlass.Float32(0.0)
        for h in cutlass.range(share):
            head = quarter * share + h
            dot = cutlass.Float32(0.0)
            for c in cutlass.range_constexpr(chunks):
                cute.autovec_copy(cute.local_tile(shared_queries[head, None], (CODES,), (c,)), part)
                products = part.load() * key[None, c].load()
                dot += products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
            total += cute.arch.fmax(dot, cutlass.Float32(0.0)) * weights[sequence, head]
        partial[token, quarter] = total
        cute.arch.sync_threads()
        if thread < page_size:
            score = cutlass.Float32(0.0)
            for i in cutlass.range_constexpr(QUARTERS):
                score += partial[thread, i]
            scores[sequence, place, thread] = score * scales[page, page_size * size // 4 + thread]


@cute.kernel
def select_kernel(scores: cute.Tensor, lengths: cute.Tensor, table: cute.Tensor, indices: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    sequence, _, _ = cute.arch.block_idx()
    width, page_size = cutlass.const_expr(scores.shape[1]), cutlass.const_expr(scores.shape[2])
    share = cutlass.const_expr((width * page_size + SELECTORS - 1) // SELECTORS)  # consecutive tokens a thread
    lane, warp_number = thread % 32, thread // 32
    shared = cutlass.utils.SmemAllocator()
    sums = shared.allocate_tensor(cutlass.Int32, cute.make_layout((SELECTORS // 32, 2)), 16)
    length = lengths[sequence]
    if length <= TOP_K:
        for turn in cutlass.range_constexpr((TOP_K + SELECTORS - 1) // SELECTORS):
            place = turn * SELECTORS + thread
            if place < TOP_K:
                slot = cutlass.Int32(-1)
                if place < length:
                    slot = table[sequence, place // page_size] * page_size + place % page_size
                indices[sequence, place] = slot
    else:
        # Unsigned integers that are in the order of the scores; nothing is as low as what is not there.
        keys = cute.make_rmem_tensor(share, cutlass.Uint32)
        for i in cutlass.range_constexpr(share):
            place = thread * share + i
            key = cutlass.Uint32(0)
            if place < length:
                score = scores[sequence, place // page_size, place % page_size]
                key = score.bitcast(cutlass.Uint32)
                if key >= cutlass.Uint32(0x80000000):
                    key = key ^ cutlass.Uint32(0xFFFFFFFF)
                else:
                    key = key ^ cutlass.Uint32(0x80000000)
            keys[i] = key
        # The largest number that at least as many keys reach as are taken; its bits are found from the highest on.
        last = cutlass.Uint32(0)
        for bit in cutlass.range_constexpr(32):
            attempt = last | cutlass.Uint32(0x80000000 >> bit)
            count = cutlass.Int32(0)
            for i in cutlass.range_constexpr(share):
                count += 1 if keys[i] >= attempt else 0
            count = cute.arch.warp_reduction_sum(count)
            if lane == 0:
                sums[warp_number, bit % 2] = count
            cute.arch.sync_threads()
            count = cute.arch.warp_reduction_sum(sums[lane, bit % 2])
            if count >= TOP_K:
                last = attempt
        cute.arch.sync_threads()
        own = cutlass.Int32(0)
        for i in cutlass.range_constexpr(share):
            own += 1 if keys[i] >= last else 0
        before = own
        step = 1
        while cutlass.const_expr(step < 32):
            other = cute.arch.shuffle_sync_up(before, offset=step)
            if lane >= step:
                before += other
            step = step * 2
        if lane == 31:
            sums[warp_number, 0] = before
        cute.arch.sync_threads()
        # Of the threads before in this warp, then of the warps before.
        of_warp = cutlass.Int32(0)
        if lane < warp_number:
            of_warp = sums[lane, 0]
        target = before - own + cute.arch.warp_reduction_sum(of_warp)
        for i in cutlass.range_constexpr(share):
            place = thread * share + i
            if keys[i] >= last and target < TOP_K:
                indices[sequence, target] = table[sequence, place // page_size] * page_size + place % page_size
                target += 1


@cute.jit
def select(
    queries: cute.Tensor,
    codes: cute.Tensor,
    scales: cute.Tensor,
    weights: cute.Tensor,
    lengths: cute.Tensor,
    table: cute.Tensor,
    scores: cute.Tensor,
    indices: cute.Tensor,
    stream,
):
    batch, width, page_size = scores.shape
    score_kernel(queries, codes, scales, weights, lengths, table, scores).launch(
        grid=(width, batch, 1), block=(QUARTERS * page_size, 1, 1), stream=stream
    )
    select_kernel(scores, lengths, table, indices).launch(grid=(batch, 1, 1), block=(SELECTORS, 1, 1), stream=stream)


def compile_for(arch: str, heads: int = 64, size: int = 128, page_size: int = 64, width: int = 43):
    """Both kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert heads % QUARTERS == 0 and size % CODES == 0 and QUARTERS * page_size <= 1024
    batch, pool = cute.sym_int(), cute.sym_int()
    page_bytes = page_size * (size + 4)

    def fake(dtype, *shape: int, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    return cute.compile(
        select,
        fake(cutlass.Uint8, batch, heads, size),
        fake(cutlass.Uint8, pool, page_bytes),
        fake(cutlass.Float32, pool, page_bytes // 4),
        fake(cutlass.Float32, batch, heads),
        fake(cutlass.Int32, batch, align=4),
        fake(cutlass.Int32, batch, width, align=4),
        fake(cutlass.Float32, batch, width, page_size),
        fake(cutlass.Int32, batch, TOP_K),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, size: int, page_size: int, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, size, page_size, width)


def solve(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor]:
    (batch, heads, size), (pool, page_size) = q_index_fp8.shape, k_index_cache_fp8.shape[:2]
    width, device = block_table.shape[1], weights.device
    pages = k_index_cache_fp8.view(pool, -1)
    scores = torch.empty(batch, width, page_size, dtype=torch.float32, device=device)
    indices = torch.empty(batch, TOP_K, dtype=torch.int32, device=device)
    kernel_for(device, heads, size, page_size, width)(
        *(q_index_fp8.view(torch.uint8), pages.view(torch.uint8), pages.view(torch.float32)),
        *(weights, seq_lens, block_table, scores, indices),
    )
    return (indices,)
