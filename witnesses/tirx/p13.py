"""p13, joint attention of image and text tokens, in TIRx. All products stay with eager PyTorch.

CUDA:
1. Layer norm, with or without modulation: a thread block has a row, 4 values a thread.
2. Heads: queries and keys of the image are rotated, the text's keys and values are put before the image's, and all of
   them are laid out head by head, as the batched products want them.
3. Softmax in place: a warp has a row in registers.
4. Gate and residual.
CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear, silu
from tvm.script import tirx as T  # noqa: N812

HEAD_SIZE = 128
AXIS = HEAD_SIZE // 3
EPS = 1e-6
VECTOR = 4  # float32 values in 16 bytes
THREADS = 256
LOWEST = -3.0e38
LOG2_E = 1.4426950408889634


def from_axes(tables, positions, token, channel):
    """What the axis of a channel says about a token. An expression, for any target."""
    return T.if_then_else(
        channel < AXIS,
        tables[0][positions[0][token], T.min(channel, AXIS - 1)],
        T.if_then_else(
            channel < 2 * AXIS,
            tables[1][positions[1][token], T.min(T.max(channel - AXIS, 0), AXIS - 1)],
            tables[2][positions[2][token], T.min(T.max(channel - 2 * AXIS, 0), AXIS - 1)],
        ),
    )


@T.jit
def norm_cuda(x: T.handle, m: T.handle, o: T.handle, *, width: T.constexpr, parts: T.constexpr, modulated: T.constexpr):
    """`parts` modulations of a batch member: shift, scale and another one."""
    batch = T.int32()
    tokens = T.int32()
    members = T.int32()
    source = T.match_buffer(x, (batch, tokens, width), "float32")
    modulation = T.match_buffer(m, (members, parts, width), "float32")
    out = T.match_buffer(o, (batch, tokens, width), "float32")
    T.device_entry()
    token, member = T.cta_id([tokens, batch])
    thread = T.thread_id([width // VECTOR])
    sums = T.alloc_shared((2, width // (32 * VECTOR)), "float32")
    values = T.alloc_local((VECTOR,), "float32")
    scale = T.alloc_local((VECTOR,), "float32")
    shift = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((1,), "float32")
    for e in T.vectorized(VECTOR):
        values[e] = source[member, token, thread * VECTOR + e]
    if modulated:
        for e in T.vectorized(VECTOR):
            shift[e] = modulation[member, 0, thread * VECTOR + e]
        for e in T.vectorized(VECTOR):
            scale[e] = modulation[member, 1, thread * VECTOR + e]
    total[0] = T.cuda.warp_sum((values[0] + values[1]) + (values[2] + values[3]))
    if thread % 32 == 0:
        sums[0, thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for w in T.unroll(width // (32 * VECTOR)):
        total[0] = total[0] + sums[0, w]
    for e in T.unroll(VECTOR):
        values[e] = values[e] - total[0] * T.float32(1 / width)
    total[0] = T.float32(0)
    for e in T.unroll(VECTOR):
        total[0] = total[0] + values[e] * values[e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        sums[1, thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for w in T.unroll(width // (32 * VECTOR)):
        total[0] = total[0] + sums[1, w]
    total[0] = T.rsqrt(total[0] * T.float32(1 / width) + T.float32(EPS))
    for e in T.unroll(VECTOR):
        values[e] = values[e] * total[0]
        if modulated:
            values[e] = values[e] * (T.float32(1) + scale[e]) + shift[e]
    for e in T.vectorized(VECTOR):
        out[member, token, thread * VECTOR + e] = values[e]


@T.jit
def heads_cuda(
    q: T.handle,
    k: T.handle,
    v: T.handle,
    kt: T.handle,
    vt: T.handle,
    p0: T.handle,
    p1: T.handle,
    p2: T.handle,
    c0: T.handle,
    s0: T.handle,
    c1: T.handle,
    s1: T.handle,
    c2: T.handle,
    s2: T.handle,
    qo: T.handle,
    ko: T.handle,
    vo: T.handle,
    *,
    heads: T.constexpr,
):
    batch = T.int32()
    image = T.int32()
    text = T.int32()
    rows_0 = T.int32()
    rows_1 = T.int32()
    rows_2 = T.int32()
    q_in = T.match_buffer(q, (batch, image, heads, HEAD_SIZE), "float32")
    k_in = T.match_buffer(k, (batch, image, heads, HEAD_SIZE), "float32")
    v_in = T.match_buffer(v, (batch, image, heads, HEAD_SIZE), "float32")
    k_text = T.match_buffer(kt, (batch, text, heads, HEAD_SIZE), "float32")
    v_text = T.match_buffer(vt, (batch, text, heads, HEAD_SIZE), "float32")
    position_0 = T.match_buffer(p0, (image,), "int64")
    position_1 = T.match_buffer(p1, (image,), "int64")
    position_2 = T.match_buffer(p2, (image,), "int64")
    cos_0 = T.match_buffer(c0, (rows_0, AXIS), "float32")
    sin_0 = T.match_buffer(s0, (rows_0, AXIS), "float32")
    cos_1 = T.match_buffer(c1, (rows_1, AXIS), "float32")
    sin_1 = T.match_buffer(s1, (rows_1, AXIS), "float32")
    cos_2 = T.match_buffer(c2, (rows_2, AXIS), "float32")
    sin_2 = T.match_buffer(s2, (rows_2, AXIS), "float32")
    q_out = T.match_buffer(qo, (batch, heads, image, HEAD_SIZE), "float32")
    k_out = T.match_buffer(ko, (batch, heads, text + image, HEAD_SIZE), "float32")
    v_out = T.match_buffer(vo, (batch, heads, text + image, HEAD_SIZE), "float32")
    T.device_entry()
    place, member = T.cta_id([text + image, batch])
    thread = T.thread_id([heads * 32])
    lane = T.alloc_local((1,), "int32")
    head = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    x = T.alloc_local((2, VECTOR), "float32")
    y = T.alloc_local((VECTOR,), "float32")
    cos = T.alloc_local((VECTOR // 2,), "float32")
    sin = T.alloc_local((VECTOR // 2,), "float32")
    even = T.alloc_local((1,), "float32")
    head[0] = thread // 32
    lane[0] = thread % 32
    if place < text:
        for e in T.vectorized(VECTOR):
            x[0, e] = k_text[member, place, head[0], lane[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            y[e] = v_text[member, place, head[0], lane[0] * VECTOR + e]
    else:
        token[0] = place - text
        for e in T.vectorized(VECTOR):
            x[0, e] = k_in[member, token[0], head[0], lane[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            x[1, e] = q_in[member, token[0], head[0], lane[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            y[e] = v_in[member, token[0], head[0], lane[0] * VECTOR + e]
        for pair in T.unroll(VECTOR // 2):
            if lane[0] * VECTOR + pair * 2 < 3 * AXIS:
                cos[pair] = from_axes(
                    (cos_0, cos_1, cos_2),
                    (position_0, position_1, position_2),
                    token[0],
                    lane[0] * VECTOR + pair * 2,
                )
                sin[pair] = from_axes(
                    (sin_0, sin_1, sin_2),
                    (position_0, position_1, position_2),
                    token[0],
                    lane[0] * VECTOR + pair * 2,
                )
                for i in T.unroll(2):
                    even[0] = x[i, pair * 2]
                    x[i, pair * 2] = even[0] * cos[pair] - x[i, pair * 2 + 1] * sin[pair]
                    x[i, pair * 2 + 1] = x[i, pair * 2 + 1] * cos[pair] + even[0] * sin[pair]
        for e in T.vectorized(VECTOR):
            q_out[member, head[0], token[0], lane[0] * VECTOR + e] = x[1, e]
    for e in T.vectorized(VECTOR):
        k_out[member, head[0], place, lane[0] * VECTOR + e] = x[0, e]
    for e in T.vectorized(VECTOR):
        v_out[member, head[0], place, lane[0] * VECTOR + e] = y[e]


@T.jit
def softmax_cuda(x: T.handle, scale: T.float32, *, keys: T.constexpr, chunks: T.constexpr):
    """`chunks` times 4 values a thread; `scale` takes a logit to a power of two."""
    rows = T.int32()
    logits = T.match_buffer(x, (rows, keys), "float32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(rows, THREADS // 32)])
    thread = T.thread_id([THREADS])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    values = T.alloc_local((chunks, VECTOR), "float32")
    top = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    row[0] = block * (THREADS // 32) + thread // 32
    lane[0] = thread % 32
    if row[0] < rows:
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                values[c, e] = logits[row[0], (c * 32 + lane[0]) * VECTOR + e]
        top[0] = T.float32(LOWEST)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                top[0] = T.max(top[0], values[c, e])
        top[0] = T.cuda.warp_max(top[0])
        total[0] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                values[c, e] = T.exp2((values[c, e] - top[0]) * scale)
                total[0] = total[0] + values[c, e]
        total[0] = T.float32(1) / T.cuda.warp_sum(total[0])
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                values[c, e] = values[c, e] * total[0]
            for e in T.vectorized(VECTOR):
                logits[row[0], (c * 32 + lane[0]) * VECTOR + e] = values[c, e]


@T.jit
def gate_cuda(x: T.handle, y: T.handle, m: T.handle, o: T.handle, *, width: T.constexpr, parts: T.constexpr):
    batch = T.int32()
    tokens = T.int32()
    hidden = T.match_buffer(x, (batch, tokens, width), "float32")
    update = T.match_buffer(y, (batch, tokens, width), "float32")
    modulation = T.match_buffer(m, (batch, parts, width), "float32")
    out = T.match_buffer(o, (batch, tokens, width), "float32")
    T.device_entry()
    token, member = T.cta_id([tokens, batch])
    thread = T.thread_id([width // VECTOR])
    a = T.alloc_local((VECTOR,), "float32")
    b = T.alloc_local((VECTOR,), "float32")
    gate = T.alloc_local((VECTOR,), "float32")
    for e in T.vectorized(VECTOR):
        a[e] = hidden[member, token, thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        b[e] = update[member, token, thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        gate[e] = modulation[member, 2, thread * VECTOR + e]
    for e in T.unroll(VECTOR):
        a[e] = a[e] + gate[e] * b[e]
    for e in T.vectorized(VECTOR):
        out[member, token, thread * VECTOR + e] = a[e]


@T.jit
def norm_cpu(x: T.handle, m: T.handle, o: T.handle, *, width: T.constexpr, parts: T.constexpr, modulated: T.constexpr):
    batch = T.int32()
    tokens = T.int32()
    members = T.int32()
    source = T.match_buffer(x, (batch, tokens, width), "float32")
    modulation = T.match_buffer(m, (members, parts, width), "float32")
    out = T.match_buffer(o, (batch, tokens, width), "float32")
    mean = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for member, token in T.grid(batch, tokens):
        mean[0] = T.float32(0)
        for c in T.serial(width):
            mean[0] = mean[0] + source[member, token, c]
        mean[0] = mean[0] / T.float32(width)
        total[0] = T.float32(0)
        for c in T.serial(width):
            total[0] = total[0] + (source[member, token, c] - mean[0]) * (source[member, token, c] - mean[0])
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(width) + T.float32(EPS))
        for c in T.serial(width):
            out[member, token, c] = (source[member, token, c] - mean[0]) * total[0]
            if modulated:
                out[member, token, c] = (
                    out[member, token, c] * (T.float32(1) + modulation[member, 1, c]) + modulation[member, 0, c]
                )


@T.jit
def heads_cpu(
    q: T.handle,
    k: T.handle,
    v: T.handle,
    kt: T.handle,
    vt: T.handle,
    p0: T.handle,
    p1: T.handle,
    p2: T.handle,
    c0: T.handle,
    s0: T.handle,
    c1: T.handle,
    s1: T.handle,
    c2: T.handle,
    s2: T.handle,
    qo: T.handle,
    ko: T.handle,
    vo: T.handle,
    *,
    heads: T.constexpr,
):
    batch = T.int32()
    image = T.int32()
    text = T.int32()
    rows_0 = T.int32()
    rows_1 = T.int32()
    rows_2 = T.int32()
    q_in = T.match_buffer(q, (batch, image, heads, HEAD_SIZE), "float32")
    k_in = T.match_buffer(k, (batch, image, heads, HEAD_SIZE), "float32")
    v_in = T.match_buffer(v, (batch, image, heads, HEAD_SIZE), "float32")
    k_text = T.match_buffer(kt, (batch, text, heads, HEAD_SIZE), "float32")
    v_text = T.match_buffer(vt, (batch, text, heads, HEAD_SIZE), "float32")
    position_0 = T.match_buffer(p0, (image,), "int64")
    position_1 = T.match_buffer(p1, (image,), "int64")
    position_2 = T.match_buffer(p2, (image,), "int64")
    cos_0 = T.match_buffer(c0, (rows_0, AXIS), "float32")
    sin_0 = T.match_buffer(s0, (rows_0, AXIS), "float32")
    cos_1 = T.match_buffer(c1, (rows_1, AXIS), "float32")
    sin_1 = T.match_buffer(s1, (rows_1, AXIS), "float32")
    cos_2 = T.match_buffer(c2, (rows_2, AXIS), "float32")
    sin_2 = T.match_buffer(s2, (rows_2, AXIS), "float32")
    q_out = T.match_buffer(qo, (batch, heads, image, HEAD_SIZE), "float32")
    k_out = T.match_buffer(ko, (batch, heads, text + image, HEAD_SIZE), "float32")
    v_out = T.match_buffer(vo, (batch, heads, text + image, HEAD_SIZE), "float32")
    cos = T.alloc_buffer((1,), "float32", scope="local")
    sin = T.alloc_buffer((1,), "float32", scope="local")
    for member, token, head, c in T.grid(batch, text, heads, HEAD_SIZE):
        k_out[member, head, token, c] = k_text[member, token, head, c]
        v_out[member, head, token, c] = v_text[member, token, head, c]
    for member, token, head, pair in T.grid(batch, image, heads, HEAD_SIZE // 2):
        cos[0] = T.float32(1)
        sin[0] = T.float32(0)
        if pair * 2 < 3 * AXIS:
            cos[0] = from_axes((cos_0, cos_1, cos_2), (position_0, position_1, position_2), token, pair * 2)
            sin[0] = from_axes((sin_0, sin_1, sin_2), (position_0, position_1, position_2), token, pair * 2)
        q_out[member, head, token, pair * 2] = (
            q_in[member, token, head, pair * 2] * cos[0] - q_in[member, token, head, pair * 2 + 1] * sin[0]
        )
        q_out[member, head, token, pair * 2 + 1] = (
            q_in[member, token, head, pair * 2 + 1] * cos[0] + q_in[member, token, head, pair * 2] * sin[0]
        )
        k_out[member, head, text + token, pair * 2] = (
            k_in[member, token, head, pair * 2] * cos[0] - k_in[member, token, head, pair * 2 + 1] * sin[0]
        )
        k_out[member, head, text + token, pair * 2 + 1] = (
            k_in[member, token, head, pair * 2 + 1] * cos[0] + k_in[member, token, head, pair * 2] * sin[0]
        )
        for side in T.serial(2):
            v_out[member, head, text + token, pair * 2 + side] = v_in[member, token, head, pair * 2 + side]


@T.jit
def softmax_cpu(x: T.handle, scale: T.float32, *, keys: T.constexpr):
    rows = T.int32()
    logits = T.match_buffer(x, (rows, keys), "float32")
    top = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        top[0] = T.float32(LOWEST)
        for c in T.serial(keys):
            top[0] = T.max(top[0], logits[row, c])
        total[0] = T.float32(0)
        for c in T.serial(keys):
            logits[row, c] = T.exp2((logits[row, c] - top[0]) * scale)
            total[0] = total[0] + logits[row, c]
        for c in T.serial(keys):
            logits[row, c] = logits[row, c] / total[0]


@T.jit
def gate_cpu(x: T.handle, y: T.handle, m: T.handle, o: T.handle, *, width: T.constexpr, parts: T.constexpr):
    batch = T.int32()
    tokens = T.int32()
    hidden = T.match_buffer(x, (batch, tokens, width), "float32")
    update = T.match_buffer(y, (batch, tokens, width), "float32")
    modulation = T.match_buffer(m, (batch, parts, width), "float32")
    out = T.match_buffer(o, (batch, tokens, width), "float32")
    for member, token, c in T.grid(batch, tokens, width):
        out[member, token, c] = hidden[member, token, c] + modulation[member, 2, c] * update[member, token, c]


def compile_for(arch: str, heads: int = 24, text_width: int = 4096, keys: int = 1280) -> list[tvm.runtime.Executable]:
    """Norm of the image and of the text, heads, softmax and gate for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs
    no GPU."""
    width = heads * HEAD_SIZE
    if arch == "llvm":
        kernels = [
            norm_cpu.specialize(width=width, parts=3, modulated=True),
            norm_cpu.specialize(width=text_width, parts=1, modulated=False),
            heads_cpu.specialize(heads=heads),
            softmax_cpu.specialize(keys=keys),
            gate_cpu.specialize(width=width, parts=3),
        ]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert text_width % (32 * VECTOR) == 0 and keys % (32 * VECTOR) == 0 and max(width, text_width) <= 1024 * VECTOR
    kernels = [
        norm_cuda.specialize(width=width, parts=3, modulated=True),
        norm_cuda.specialize(width=text_width, parts=1, modulated=False),
        heads_cuda.specialize(heads=heads),
        softmax_cuda.specialize(keys=keys, chunks=keys // (32 * VECTOR)),
        gate_cuda.specialize(width=width, parts=3),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, heads: int, text_width: int, keys: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, heads, text_width, keys)]


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
    modulate, normalize, lay_out, softmax, gate = kernels_for(hidden_states.device, heads, text_width, keys)
    half = 3 * width  # the other half of the modulation is for the block's other half
    modulation = linear(silu(timestep_embedding), adaln_linear_weight[:half], adaln_linear_bias[:half])
    modulation = modulation.view(batch, 3, width)
    x = torch.empty_like(hidden_states)
    modulate(hidden_states, modulation, x)
    by_head = (batch, -1, heads, HEAD_SIZE)
    q, k, v = (
        linear(x, weight, bias).view(by_head)
        for weight, bias in ((to_q_weight, to_q_bias), (to_k_weight, to_k_bias), (to_v_weight, to_v_bias))
    )
    if is_joint_block:
        words = torch.empty_like(encoder_hidden_states)
        normalize(encoder_hidden_states, encoder_hidden_states[:1, :1], words)
        k_text = linear(words, to_k_context_weight, to_k_context_bias).view(by_head)
        v_text = linear(words, to_v_context_weight, to_v_context_bias).view(by_head)
    else:
        k_text = v_text = k[:, :0]
    q_heads = x.new_empty(batch, heads, image, HEAD_SIZE)
    k_heads, v_heads = (x.new_empty(batch, heads, keys, HEAD_SIZE) for _ in "kv")
    lay_out(
        *(q, k, v, k_text, v_text, pos_idx_axis0, pos_idx_axis1, pos_idx_axis2),
        *(cos_axis0, sin_axis0, cos_axis1, sin_axis1, cos_axis2, sin_axis2, q_heads, k_heads, v_heads),
    )
    logits = torch.bmm(q_heads.flatten(0, 1), k_heads.flatten(0, 1).mT)
    softmax(logits.view(-1, keys), HEAD_SIZE**-0.5 * LOG2_E)
    attended = torch.bmm(logits, v_heads.flatten(0, 1)).view(batch, heads, image, HEAD_SIZE)
    update = linear(attended.transpose(1, 2).reshape(batch, image, width), to_out_weight, to_out_bias)
    output = torch.empty_like(hidden_states)
    gate(hidden_states, update, modulation, output)
    return output
