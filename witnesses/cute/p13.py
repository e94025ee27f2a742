"""p13, joint attention of image and text tokens, in CuTe DSL. All products stay with eager PyTorch.

1. Layer norm, with or without modulation: a thread block has a row, 4 values a thread.
2. Heads: queries and keys of the image are rotated, the text's keys and values are put before the image's, and all of
   them are laid out head by head, as the batched products want them.
3. Softmax in place: a warp has a row in registers.
4. Gate and residual.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear, silu

HEAD_SIZE = 128
AXIS = HEAD_SIZE // 3
EPS = 1e-6
VECTOR = 4  # float32 values in 16 bytes
THREADS = 256
LOWEST = -3.0e38
LOG2_E = 1.4426950408889634


@cute.jit
def block_sum(value: cutlass.Float32, partial: cute.Tensor):
    """The sum over the thread block, for every thread of it."""
    thread, _, _ = cute.arch.thread_idx()
    value = cute.arch.warp_reduction_sum(value)
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = value
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for w in cutlass.range_constexpr(cute.size(partial)):
        total += partial[w]
    return total


@cute.jit
def normalized_row(row: cute.Tensor, values: cute.Tensor):
    """A thread's values of the row, less its mean and divided by its deviation."""
    thread, _, _ = cute.arch.thread_idx()
    width = cutlass.const_expr(row.shape[0])
    warps = cutlass.const_expr(width // VECTOR // cute.arch.WARP_SIZE)
    shared = cutlass.utils.SmemAllocator()
    sums = shared.allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    squares = shared.allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    cute.autovec_copy(cute.local_tile(row, (VECTOR,), (thread,)), values)
    x = values.load()
    centred = x - block_sum(x.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0), sums) / width
    square = block_sum((centred * centred).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0), squares) / width
    values.store(centred * cute.math.rsqrt(square + EPS))


@cute.kernel
def modulate_kernel(source: cute.Tensor, modulation: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    token, member, _ = cute.arch.block_idx()
    values = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    shift = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    scale = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(modulation[member, 0, None], (VECTOR,), (thread,)), shift)
    cute.autovec_copy(cute.local_tile(modulation[member, 1, None], (VECTOR,), (thread,)), scale)
    normalized_row(source[member, token, None], values)
    values.store(values.load() * (1.0 + scale.load()) + shift.load())
    cute.autovec_copy(values, cute.local_tile(out[member, token, None], (VECTOR,), (thread,)))


@cute.kernel
def normalize_kernel(source: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    token, member, _ = cute.arch.block_idx()
    values = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    normalized_row(source[member, token, None], values)
    cute.autovec_copy(values, cute.local_tile(out[member, token, None], (VECTOR,), (thread,)))


@cute.jit
def turned(x: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor):
    """Rotates the two pairs of a thread."""
    for pair in cutlass.range_constexpr(VECTOR // 2):
        even, odd = x[pair * 2], x[pair * 2 + 1]
        x[pair * 2] = even * cos[pair] - odd * sin[pair]
        x[pair * 2 + 1] = odd * cos[pair] + even * sin[pair]


@cute.kernel
def heads_kernel(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    k_text: cute.Tensor,
    v_text: cute.Tensor,
    position_0: cute.Tensor,
    position_1: cute.Tensor,
    position_2: cute.Tensor,
    cos_0: cute.Tensor,
    sin_0: cute.Tensor,
    cos_1: cute.Tensor,
    sin_1: cute.Tensor,
    cos_2: cute.Tensor,
    sin_2: cute.Tensor,
    q_out: cute.Tensor,
    k_out: cute.Tensor,
    v_out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    place, member, _ = cute.arch.block_idx()
    head, lane = thread // 32, thread % 32
    text = k_text.shape[1]
    x = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    y = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    if place < text:
        cute.autovec_copy(cute.local_tile(k_text[member, place, head, None], (VECTOR,), (lane,)), x)
        cute.autovec_copy(cute.local_tile(v_text[member, place, head, None], (VECTOR,), (lane,)), y)
    else:
        token = place - text
        query = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        cos = cute.make_rmem_tensor(VECTOR // 2, cutlass.Float32)
        sin = cute.make_rmem_tensor(VECTOR // 2, cutlass.Float32)
        cute.autovec_copy(cute.local_tile(k[member, token, head, None], (VECTOR,), (lane,)), x)
        cute.autovec_copy(cute.local_tile(q[member, token, head, None], (VECTOR,), (lane,)), query)
        cute.autovec_copy(cute.local_tile(v[member, token, head, None], (VECTOR,), (lane,)), y)
        for pair in cutlass.range_constexpr(VECTOR // 2):
            channel = lane * VECTOR + pair * 2
            cosine, sine = cutlass.Float32(1.0), cutlass.Float32(0.0)  # the last channels stay as they are
            if channel < AXIS:
                row = position_0[token].to(cutlass.Int32)
                cosine, sine = cos_0[row, channel], sin_0[row, channel]
            elif channel < 2 * AXIS:
                row = position_1[token].to(cutlass.Int32)
                cosine, sine = cos_1[row, channel - AXIS], sin_1[row, channel - AXIS]
            elif channel < 3 * AXIS:
                row = position_2[token].to(cutlass.Int32)
                cosine, sine = cos_2[row, channel - 2 * AXIS], sin_2[row, channel - 2 * AXIS]
            cos[pair] = cosine
            sin[pair] = sine
        turned(x, cos, sin)
        turned(query, cos, sin)
        cute.autovec_copy(query, cute.local_tile(q_out[member, head, token, None], (VECTOR,), (lane,)))
    cute.autovec_copy(x, cute.local_tile(k_out[member, head, place, None], (VECTOR,), (lane,)))
    cute.autovec_copy(y, cute.local_tile(v_out[member, head, place, None], (VECTOR,), (lane,)))


@cute.kernel
def softmax_kernel(logits: cute.Tensor, scale: cutlass.Float32):
    """`scale` takes a logit to a power of two."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row, lane = block * (THREADS // 32) + thread // 32, thread % 32
    chunks = cutlass.const_expr(logits.shape[1] // (32 * VECTOR))
    if row < logits.shape[0]:
        values = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(cute.local_tile(logits[row, None], (VECTOR,), (c * 32 + lane,)), values[None, c])
        x = values.load()
        top = cute.arch.warp_reduction_max(x.reduce(cute.ReductionOp.MAX, cutlass.Float32(LOWEST), 0))
        values.store(cute.math.exp2((x - top) * scale))
        total = values.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        inverse = 1.0 / cute.arch.warp_reduction_sum(total)
        values.store(values.load() * inverse)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(values[None, c], cute.local_tile(logits[row, None], (VECTOR,), (c * 32 + lane,)))


@cute.kernel
def gate_kernel(hidden: cute.Tensor, update: cute.Tensor, modulation: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    token, member, _ = cute.arch.block_idx()
    a = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    b = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    gate = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(hidden[member, token, None], (VECTOR,), (thread,)), a)
    cute.autovec_copy(cute.local_tile(update[member, token, None], (VECTOR,), (thread,)), b)
    cute.autovec_copy(cute.local_tile(modulation[member, 2, None], (VECTOR,), (thread,)), gate)
    a.store(a.load() + gate.load() * b.load())
    cute.autovec_copy(a, cute.local_tile(out[member, token, None], (VECTOR,), (thread,)))


@cute.jit
def modulate(source: cute.Tensor, modulation: cute.Tensor, out: cute.Tensor, stream):
    batch, tokens, width = source.shape
    modulate_kernel(source, modulation, out).launch(
        grid=(tokens, batch, 1), block=(width // VECTOR, 1, 1), stream=stream
    )


@cute.jit
def normalize(source: cute.Tensor, out: cute.Tensor, stream):
    batch, tokens, width = source.shape
    normalize_kernel(source, out).launch(grid=(tokens, batch, 1), block=(width // VECTOR, 1, 1), stream=stream)


@cute.jit
def lay_out(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    k_text: cute.Tensor,
    v_text: cute.Tensor,
    position_0: cute.Tensor,
    position_1: cute.Tensor,
    position_2: cute.Tensor,
    cos_0: cute.Tensor,
    sin_0: cute.Tensor,
    cos_1: cute.Tensor,
    sin_1: cute.Tensor,
    cos_2: cute.Tensor,
    sin_2: cute.Tensor,
    q_out: cute.Tensor,
    k_out: cute.Tensor,
    v_out: cute.Tensor,
    stream,
):
    batch, heads, keys, _ = k_out.shape
    heads_kernel(
        *(q, k, v, k_text, v_text, position_0, position_1, position_2),
        *(cos_0, sin_0, cos_1, sin_1, cos_2, sin_2, q_out, k_out, v_out),
    ).launch(grid=(keys, batch, 1), block=(heads * 32, 1, 1), stream=stream)


@cute.jit
def softmax(logits: cute.Tensor, scale: cutlass.Float32, stream):
    softmax_kernel(logits, scale).launch(
        grid=(cute.ceil_div(logits.shape[0], THREADS // 32), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def gate_and_add(hidden: cute.Tensor, update: cute.Tensor, modulation: cute.Tensor, out: cute.Tensor, stream):
    batch, tokens, width = out.shape
    gate_kernel(hidden, update, modulation, out).launch(
        grid=(tokens, batch, 1), block=(width // VECTOR, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 24, text_width: int = 4096, keys: int = 1280):
    """Norm of the image and of the text, heads, softmax and gate for `arch` (`sm_90a`, ...); needs no GPU."""
    width = heads * HEAD_SIZE
    assert text_width % (32 * VECTOR) == 0 and keys % (32 * VECTOR) == 0 and max(width, text_width) <= 1024 * VECTOR
    batch, image, text, all_keys, rows = (cute.sym_int() for _ in range(5))
    table_rows = [cute.sym_int() for _ in range(3)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape: int, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def values(*shape: int):
        return fake(cutlass.Float32, *shape)

    modulation = values(batch, 3, width)
    by_token, by_head = (batch, image, heads, HEAD_SIZE), (batch, heads, image, HEAD_SIZE)
    return (
        cute.compile(
            modulate, values(batch, image, width), modulation, values(batch, image, width), stream, options=options
        ),
        cute.compile(
            normalize, values(batch, text, text_width), values(batch, text, text_width), stream, options=options
        ),
        cute.compile(
            lay_out,
            *(values(*by_token) for _ in "qkv"),
            *(values(batch, text, heads, HEAD_SIZE) for _ in "kv"),
            *(fake(cutlass.Int64, image) for _ in range(3)),
            *(fake(cutlass.Float32, table_rows[i // 2], AXIS, align=4) for i in range(6)),
            values(*by_head),
            *(values(batch, heads, all_keys, HEAD_SIZE) for _ in "kv"),
            stream,
            options=options,
        ),
        cute.compile(softmax, values(rows, keys), cutlass.Float32(0.0), stream, options=options),
        cute.compile(
            gate_and_add,
            *(values(batch, image, width) for _ in "hu"),
            modulation,
            values(batch, image, width),
            stream,
            options=options,
        ),
    )


@cache
def kernels_for(device: torch.device, heads: int, text_width: int, keys: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, text_width, keys)


def solve(
    hidden_states: torch.Tensor,
    timestep_embedding: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    adaln_linear_weight: torch.Tensor,
    adaln_linear_bias: torch.Tensor,
    to_q_weight: torch.Tensor,
    to_q_bias: torch.Tensor,
    to_k_weight: torch.Tensor,
    to_k_bias: torch.Tensor,
    to_v_weight: torch.Tensor,
    to_v_bias: torch.Tensor,
    to_k_context_weight: torch.Tensor,
    to_k_context_bias: torch.Tensor,
    to_v_context_weight: torch.Tensor,
    to_v_context_bias: torch.Tensor,
    to_out_weight: torch.Tensor,
    to_out_bias: torch.Tensor,
    pos_idx_axis0: torch.Tensor,
    pos_idx_axis1: torch.Tensor,
    pos_idx_axis2: torch.Tensor,
    cos_axis0: torch.Tensor,
    sin_axis0: torch.Tensor,
    cos_axis1: torch.Tensor,
    sin_axis1: torch.Tensor,
    cos_axis2: torch.Tensor,
    sin_axis2: torch.Tensor,
    is_joint_block: int,
) -> torch.Tensor:
    (batch, image, width), text_width = hidden_states.shape, encoder_hidden_states.shape[2]
    heads, text = width // HEAD_SIZE, encoder_hidden_states.shape[1] if is_joint_block else 0
    keys = text + image
    run_modulate, run_normalize, run_layout, run_softmax, run_gate = kernels_for(
        hidden_states.device, heads, text_width, keys
    )
    half = 3 * width  # the other half of the modulation is for the block's other half
    modulation = linear(silu(timestep_embedding), adaln_linear_weight[:half], adaln_linear_bias[:half])
    modulation = modulation.view(batch, 3, width)
    x = torch.empty_like(hidden_states)
    run_modulate(hidden_states, modulation, x)
    by_head = (batch, -1, heads, HEAD_SIZE)
    q, k, v = (
        linear(x, weight, bias).view(by_head)
        for weight, bias in ((to_q_weight, to_q_bias), (to_k_weight, to_k_bias), (to_v_weight, to_v_bias))
    )
    if is_joint_block:
        words = torch.empty_like(encoder_hidden_states)
        run_normalize(encoder_hidden_states, words)
        k_text = linear(words, to_k_context_weight, to_k_context_bias).view(by_head)
        v_text = linear(words, to_v_context_weight, to_v_context_bias).view(by_head)
    else:
        k_text = v_text = k[:, :0]
    q_heads = x.new_empty(batch, heads, image, HEAD_SIZE)
    k_heads, v_heads = (x.new_empty(batch, heads, keys, HEAD_SIZE) for _ in "kv")
    run_layout(
        *(q, k, v, k_text, v_text, pos_idx_axis0, pos_idx_axis1, pos_idx_axis2),
        *(cos_axis0, sin_axis0, cos_axis1, sin_axis1, cos_axis2, sin_axis2, q_heads, k_heads, v_heads),
    )
    logits = torch.bmm(q_heads.flatten(0, 1), k_heads.flatten(0, 1).mT)
    run_softmax(logits.view(-1, keys), HEAD_SIZE**-0.5 * LOG2_E)
    attended = torch.bmm(logits, v_heads.flatten(0, 1)).view(batch, heads, image, HEAD_SIZE)
    update = linear(attended.transpose(1, 2).reshape(batch, image, width), to_out_weight, to_out_bias)
    output = torch.empty_like(hidden_states)
    run_gate(hidden_states, update, modulation, output)
    return output
