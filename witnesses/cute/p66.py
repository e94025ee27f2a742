"""p66, RWKV-4's WKV recurrence, in CuTe DSL: one kernel that goes through a sequence token by token.

A thread has two neighbouring channels of a sequence, with their state in registers from the first token to the last.
The next 8 tokens are on their way while 8 are worked on. Of the two weights that a maximum makes, one is 1, so a step
takes two exponentials.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 2  # channels of a thread
THREADS = 64
TOKENS = 8  # that are loaded together
LOG2_E = 1.4426950408889634


@cute.jit
def load_tokens(key: cute.Tensor, value: cute.Tensor, first: cutlass.Int32, place: cutlass.Int32, k, v):
    """From token `first` on; what would lie beyond the end is the last token again."""
    for t in cutlass.range_constexpr(TOKENS):
        token = cutlass.min(first + t, key.shape[0] - 1)
        cute.autovec_copy(cute.local_tile(key[token, None], (VECTOR,), (place,)), k[None, t])
        cute.autovec_copy(cute.local_tile(value[token, None], (VECTOR,), (place,)), v[None, t])


@cute.jit
def load_vector(row: cute.Tensor, place: cutlass.Int32):
    vector = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(row, (VECTOR,), (place,)), vector)
    return vector


@cute.jit
def weights(x, y):
    """What e^x and e^y are relative to the larger of them."""
    difference = x - y
    smaller = cute.math.exp2(cute.where(difference > 0.0, -difference, difference) * LOG2_E, fastmath=True)
    return cute.where(difference >= 0.0, 1.0, smaller), cute.where(difference > 0.0, smaller, 1.0)


@cute.kernel
def recurrence_kernel(
    time_decay: cute.Tensor,
    key: cute.Tensor,
    time_first: cute.Tensor,
    value: cute.Tensor,
    num_before: cute.Tensor,
    max_before: cute.Tensor,
    den_before: cute.Tensor,
    out: cute.Tensor,
    num_after: cute.Tensor,
    den_after: cute.Tensor,
    max_after: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    part, sequence, _ = cute.arch.block_idx()
    place = part * THREADS + thread
    length = key.shape[1]
    if place < cutlass.const_expr(key.shape[2] // VECTOR):
        keys, values = key[sequence, None, None], value[sequence, None, None]
        n = load_vector(num_before[sequence, None], place)
        d = load_vector(den_before[sequence, None], place)
        m = load_vector(max_before[sequence, None], place)
        decay = -cute.math.exp(load_vector(time_decay, place).load())
        bonus = load_vector(time_first, place).load()
        next_k = cute.make_rmem_tensor((VECTOR, TOKENS), cutlass.Float32)
        next_v = cute.make_rmem_tensor((VECTOR, TOKENS), cutlass.Float32)
        k = cute.make_rmem_tensor((VECTOR, TOKENS), cutlass.Float32)
        v = cute.make_rmem_tensor((VECTOR, TOKENS), cutlass.Float32)
        y = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        load_tokens(keys, values, 0, place, next_k, next_v)
        for stretch in cutlass.range((length + TOKENS - 1) // TOKENS):
            k.store(next_k.load())
            v.store(next_v.load())
            load_tokens(keys, values, (stretch + 1) * TOKENS, place, next_k, next_v)
            for t in cutlass.range_constexpr(TOKENS):
                token = stretch * TOKENS + t
                if token < length:
                    kt, vt = k[None, t].load(), v[None, t].load()
                    old, new = weights(m.load(), kt + bonus)
                    numerator, denominator = old * n.load() + new * vt, old * d.load() + new
                    for e in cutlass.range_constexpr(VECTOR):
                        y[e] = numerator[e] * cute.arch.rcp_approx(denominator[e])
                    cute.autovec_copy(y, cute.local_tile(out[sequence, token, None], (VECTOR,), (place,)))
                    decayed = m.load() + decay
                    old, new = weights(decayed, kt)
                    n.store(old * n.load() + new * vt)
                    d.store(old * d.load() + new)
                    m.store(cute.where(decayed > kt, decayed, kt))
        cute.autovec_copy(n, cute.local_tile(num_after[sequence, None], (VECTOR,), (place,)))
        cute.autovec_copy(d, cute.local_tile(den_after[sequence, None], (VECTOR,), (place,)))
        cute.autovec_copy(m, cute.local_tile(max_after[sequence, None], (VECTOR,), (place,)))


@cute.jit
def go_through_sequences(
    time_decay: cute.Tensor,
    key: cute.Tensor,
    time_first: cute.Tensor,
    value: cute.Tensor,
    num_before: cute.Tensor,
    max_before: cute.Tensor,
    den_before: cute.Tensor,
    out: cute.Tensor,
    num_after: cute.Tensor,
    den_after: cute.Tensor,
    max_after: cute.Tensor,
    stream,
):
    parts = cutlass.const_expr(-(-key.shape[2] // (VECTOR * THREADS)))
    recurrence_kernel(
        *(time_decay, key, time_first, value, num_before, max_before, den_before),
        *(out, num_after, den_after, max_after),
    ).launch(grid=(parts, key.shape[0], 1), block=(THREADS, 1, 1), stream=stream)


def compile_for(arch: str, channels: int = 2048):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert channels % VECTOR == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    tokens, state, vector = (batch, length, channels), (batch, channels), (channels,)
    shapes = (vector, tokens, vector, tokens, state, state, state, tokens, state, state, state)
    return cute.compile(
        go_through_sequences,
        *(fake(*shape) for shape in shapes),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, channels: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", channels)


def solve(
    time_decay: torch.Tensor,
    key: torch.Tensor,
    time_first: torch.Tensor,
    value: torch.Tensor,
    num_state: torch.Tensor,
    max_state: torch.Tensor,
    den_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    output = torch.empty_like(value)
    num_after, den_after, max_after = (torch.empty_like(num_state) for _ in range(3))
    kernel = kernel_for(key.device, key.shape[2])
    kernel(
        *(time_decay, key, time_first, value, num_state, max_state, den_state),
        *(output, num_after, den_after, max_after),
    )
    return output, num_after, den_after, max_after
