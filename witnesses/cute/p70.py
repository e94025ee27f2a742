"""p70, multi-scale retention, in CuTe DSL: one kernel, as in flash attention, with decays in place of the softmax.

A thread block has 64 queries and 256 value channels, a warp 16 of the queries. 64 keys and their values at a time are
on their way to shared memory while the tensor cores work on what came before. Scores get their decay in registers and
are, rounded to bfloat16, the left operand of the second product; the sums stay in float32. Late queries, which have
most keys, come first.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes, and the padding of a row in shared memory: no bank conflicts
TOKENS = 64  # queries of a thread block, and keys that it takes at a time
VALUES = 256  # value channels of a thread block
THREADS = 128
LOG2_E = 1.4426950408889634


@cute.jit
def log2_decay(head: cutlass.Int32) -> cutlass.Float32:
    """log₂(1 - 2^(-5-head)), as a series: there is no digit lost."""
    x = cute.math.exp2(cutlass.Float32(-5.0) - head.to(cutlass.Float32))
    series = 1 / 3 + x * (1 / 4 + x * (1 / 5))
    return -x * (1.0 + x * (1 / 2 + x * series)) * LOG2_E


@cute.jit
def load_tile(source: cute.Tensor, tile: cutlass.Int32, part: cutlass.Int32, target: cute.Tensor):
    """Starts the copy of 64 rows to shared memory; rows beyond the end are copies of the last one."""
    thread, _, _ = cute.arch.thread_idx()
    vectors = cutlass.const_expr(target.shape[1] // VECTOR)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.BFloat16, num_bits_per_copy=128)
    for i in cutlass.range_constexpr(TOKENS * vectors // THREADS):
        row = i * (THREADS // vectors) + thread // vectors
        token = cutlass.min(tile * TOKENS + row, source.shape[0] - 1)
        cute.copy(
            atom,
            cute.local_tile(source[token, None], (VECTOR,), (part * vectors + thread % vectors,)),
            cute.local_tile(target[row, None], (VECTOR,), (thread % vectors,)),
        )


@cute.kernel
def retention_kernel(query: cute.Tensor, key: cute.Tensor, value: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, head, prompt = cute.arch.block_idx()
    parts = cutlass.const_expr(value.shape[3] // VALUES)
    key_size = cutlass.const_expr(key.shape[3])
    length = key.shape[2]
    own, part = (length + TOKENS - 1) // TOKENS - 1 - block // parts, block % parts
    queries, keys = query[prompt, head, None, None], key[prompt, head, None, None]
    values = value[prompt, head, None, None]

    shared = cutlass.utils.SmemAllocator()
    key_rows = cute.make_layout((TOKENS, key_size), stride=(key_size + VECTOR, 1))
    value_rows = cute.make_layout((TOKENS, VALUES), stride=(VALUES + VECTOR, 1))
    shared_q = shared.allocate_tensor(cutlass.BFloat16, key_rows, 128)
    shared_k = shared.allocate_tensor(cutlass.BFloat16, key_rows, 128)
    shared_v = shared.allocate_tensor(cutlass.BFloat16, value_rows, 128)
    columns = cute.make_layout((VALUES, TOKENS), stride=(1, VALUES + VECTOR))
    shared_v_columns = cute.make_tensor(shared_v.iterator, columns)

    product = cute.make_tiled_mma(
        warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)), (THREADS // 32, 1, 1), (TOKENS, 16, 16)
    )
    own_product = product.get_slice(thread)
    rows_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), cutlass.BFloat16)
    columns_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), cutlass.BFloat16)
    copy_q, copy_k = cute.make_tiled_copy_A(rows_atom, product), cute.make_tiled_copy_B(rows_atom, product)
    copy_v = cute.make_tiled_copy_B(columns_atom, product)
    q = own_product.make_fragment_A(own_product.partition_A(shared_q))
    k = own_product.make_fragment_B(own_product.partition_B(shared_k))
    v = own_product.make_fragment_B(own_product.partition_B(shared_v_columns))
    q_from, q_to = copy_q.get_slice(thread).partition_S(shared_q), copy_q.get_slice(thread).retile(q)
    k_from, k_to = copy_k.get_slice(thread).partition_S(shared_k), copy_k.get_slice(thread).retile(k)
    v_from, v_to = copy_v.get_slice(thread).partition_S(shared_v_columns), copy_v.get_slice(thread).retile(v)

    scores = cute.make_rmem_tensor(own_product.partition_shape_C((TOKENS, TOKENS)), cutlass.Float32)
    places = own_product.partition_C(cute.make_identity_tensor((TOKENS, TOKENS)))
    weights = cute.make_rmem_tensor(scores.layout, cutlass.BFloat16)
    # The two tiles of 8 columns of a left operand lie one behind the other in the scores.
    pairs = cute.logical_divide(weights.layout, (None, None, 2))
    operand = cute.make_layout(
        ((pairs.shape[0], pairs.shape[2][0]), pairs.shape[1], pairs.shape[2][1]),
        stride=((pairs.stride[0], pairs.stride[2][0]), pairs.stride[1], pairs.stride[2][1]),
    )
    left = cute.make_tensor(weights.iterator, operand)
    total = cute.make_rmem_tensor(own_product.partition_shape_C((TOKENS, VALUES)), cutlass.Float32)
    total.fill(0.0)
    decay = log2_decay(head)

    load_tile(queries, own, 0, shared_q)
    load_tile(keys, 0, 0, shared_k)
    cute.arch.cp_async_commit_group()
    load_tile(values, 0, part, shared_v)
    cute.arch.cp_async_commit_group()
    for tile in cutlass.range(own + 1):
        cute.arch.cp_async_wait_group(1)  # the keys are there, the values may still be on their way
        cute.arch.sync_threads()
        scores.fill(0.0)
        for c in cutlass.range_constexpr(key_size // 16):
            cute.copy(copy_q, q_from[None, None, c], q_to[None, None, c])
            cute.copy(copy_k, k_from[None, None, c], k_to[None, None, c])
            cute.gemm(product, scores, q[None, None, c], k[None, None, c], scores)
        cute.arch.sync_threads()
        if tile < own:
            load_tile(keys, tile + 1, 0, shared_k)
        cute.arch.cp_async_commit_group()
        for i in cutlass.range_constexpr(cute.size(scores)):
            row, column = places[i]
            distance = (own - tile) * TOKENS + row - column
            score = scores[i] * cute.math.exp2(distance.to(cutlass.Float32) * decay) * key_size**-0.5
            if distance < 0:
                score = cutlass.Float32(0.0)
            weights[i] = score.to(cutlass.BFloat16)
        cute.arch.cp_async_wait_group(1)  # the values are there, the next keys may still be on their way
        cute.arch.sync_threads()
        for c in cutlass.range_constexpr(TOKENS // 16):
            cute.copy(copy_v, v_from[None, None, c], v_to[None, None, c])
            cute.gemm(product, total, left[None, None, c], v[None, None, c], total)
        cute.arch.sync_threads()
        if tile < own:
            load_tile(values, tile + 1, part, shared_v)
        cute.arch.cp_async_commit_group()

    # A thread has pairs of neighbouring columns of two rows.
    outs = own_product.partition_C(cute.local_tile(out[prompt, head, None, None], (TOKENS, VALUES), (own, part)))
    own_rows = own_product.partition_C(cute.make_identity_tensor((TOKENS, VALUES)))
    pair = cute.make_rmem_tensor(2, cutlass.BFloat16)
    for upper in cutlass.range_constexpr(2):
        if own * TOKENS + own_rows[(0, upper), 0, 0][0] < length:
            for n in cutlass.range_constexpr(VALUES // 8):
                pair.store(total[(None, upper), 0, n].load().to(cutlass.BFloat16))
                cute.autovec_copy(pair, outs[(None, upper), 0, n])


@cute.jit
def retention(query: cute.Tensor, key: cute.Tensor, value: cute.Tensor, out: cute.Tensor, stream):
    batch, heads, length, value_size = value.shape
    retention_kernel(query, key, value, out).launch(
        grid=((length + TOKENS - 1) // TOKENS * (value_size // VALUES), heads, batch),
        block=(THREADS, 1, 1),
        stream=stream,
    )


def compile_for(arch: str, heads: int = 8, key_size: int = 256, value_size: int = 512):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert key_size in {64, 128, 256} and value_size % VALUES == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        retention,
        fake(batch, heads, length, key_size),
        fake(batch, heads, length, key_size),
        fake(batch, heads, length, value_size),
        fake(batch, heads, length, value_size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, key_size: int, value_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, key_size, value_size)


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(v)
    kernel_for(v.device, v.shape[1], k.shape[3], v.shape[3])(q, k, v, output)
    return output
