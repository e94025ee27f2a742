"""p35, gradients of a post-norm feed-forward block, in TIRx. The four products stay with eager PyTorch, in float32.

1. LayerNorm's gradient: a warp has a row, walks over many, and keeps sums over its rows of the three terms that become
   the gradients at ln_weight, beta and the second bias.
2. The gradient through the tanh GELU, in place, with sums over rows for the first bias. A thread has 4 columns and some
   rows under way.
3. The sums of all thread blocks are added up, in float64.

The residual's part of the gradient at hidden_states is where the last product adds to. CUDA: accesses of 16 bytes. CPU:
plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4  # float32 values in 16 bytes
WARPS = 4
NORM_BLOCKS = 528
THREADS = 128
ROWS = 4  # rows whose loads a thread has under way
ROW_BLOCKS = 264
GROUPS = 8  # threads that share a column of partial sums
SLOPE = 1.5957691216057308  # 2 · √(2/π)
CUBIC = 0.044715


def decay(x):
    """exp(-2 y), where GELU is x / 2 · (1 + tanh(y)), that is x · sigmoid(2 y)."""
    exponent = T.float32(-SLOPE) * x * (T.float32(1) + T.float32(CUBIC) * x * x)
    return T.exp(T.min(exponent, T.float32(80)))


def derivative(x, e, s):
    """With s = 1 / (1 + e) the sigmoid: 1 - s is e s, without the digits that a difference would lose."""
    return s + x * (e * s) * s * (T.float32(SLOPE) * (T.float32(1) + T.float32(3 * CUBIC) * x * x))


@T.jit
def norm_cuda(
    g: T.handle,
    n: T.handle,
    v: T.handle,
    w: T.handle,
    eps: T.float32,
    d: T.handle,
    p: T.handle,
    *,
    width: T.constexpr,
    chunks: T.constexpr,
):
    """`chunks` vectors of a row to a lane. The sums of a block: grad · n, grad and the result, a row each."""
    rows = T.int32()
    grad = T.match_buffer(g, (rows, width), "float32")
    normalized = T.match_buffer(n, (rows, width), "float32")
    variance = T.match_buffer(v, (rows,), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    result = T.match_buffer(d, (rows, width), "float32")
    partial = T.match_buffer(p, (NORM_BLOCKS, 3 * width), "float32")
    T.device_entry()
    block = T.cta_id([NORM_BLOCKS])
    thread = T.thread_id([WARPS * 32])
    warp = thread // 32
    lane = thread % 32
    ws = T.alloc_local((chunks, VECTOR), "float32")
    gs = T.alloc_local((chunks, VECTOR), "float32")
    ns = T.alloc_local((chunks, VECTOR), "float32")
    sums = T.alloc_local((3, chunks, VECTOR), "float32")
    total = T.alloc_local((2,), "float32")
    scale = T.alloc_local((3,), "float32")
    row = T.alloc_local((1,), "int32")
    shared = T.alloc_shared((WARPS, 3 * width), "float32")
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            ws[c, e] = T.float32(0)
            gs[c, e] = T.float32(0)
            ns[c, e] = T.float32(0)
            for k in T.unroll(3):
                sums[k, c, e] = T.float32(0)
        if (c * 32 + lane) * VECTOR < width:
            for e in T.vectorized(VECTOR):
                ws[c, e] = weight[(c * 32 + lane) * VECTOR + e]
    for step in T.serial((rows + NORM_BLOCKS * WARPS - 1) // (NORM_BLOCKS * WARPS)):
        row[0] = (step * NORM_BLOCKS + block) * WARPS + warp
        scale[2] = T.float32(1)
        if row[0] < rows:
            for c in T.unroll(chunks):
                if (c * 32 + lane) * VECTOR < width:
                    for e in T.vectorized(VECTOR):
                        gs[c, e] = grad[row[0], (c * 32 + lane) * VECTOR + e]
                    for e in T.vectorized(VECTOR):
                        ns[c, e] = normalized[row[0], (c * 32 + lane) * VECTOR + e]
            scale[2] = variance[row[0]]
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                total[0] = total[0] + gs[c, e] * ws[c, e]
                total[1] = total[1] + gs[c, e] * ws[c, e] * ns[c, e]
        total[0] = T.cuda.warp_sum(total[0]) * T.float32(1 / width)
        total[1] = T.cuda.warp_sum(total[1]) * T.float32(1 / width)
        # The hardware's reciprocal root, made as good as float32 by one step of Newton's.
        scale[2] = scale[2] + eps
        scale[0] = T.rsqrt(scale[2])
        scale[1] = scale[2] * scale[0]
        T.ptx.fma_f32(T.address_of(scale[1]), -scale[1], scale[0], T.float32(1))
        scale[1] = scale[1] * T.float32(0.5)
        T.ptx.fma_f32(T.address_of(scale[0]), scale[0], scale[1], scale[0])
        if row[0] < rows:
            for c in T.unroll(chunks):
                for e in T.unroll(VECTOR):
                    sums[0, c, e] = sums[0, c, e] + gs[c, e] * ns[c, e]
                    sums[1, c, e] = sums[1, c, e] + gs[c, e]
                    gs[c, e] = scale[0] * (gs[c, e] * ws[c, e] - total[0] - ns[c, e] * total[1])
                    sums[2, c, e] = sums[2, c, e] + gs[c, e]
                if (c * 32 + lane) * VECTOR < width:
                    for e in T.vectorized(VECTOR):
                        result[row[0], (c * 32 + lane) * VECTOR + e] = gs[c, e]
    for k in T.unroll(3):
        for c in T.unroll(chunks):
            if (c * 32 + lane) * VECTOR < width:
                for e in T.vectorized(VECTOR):
                    shared[warp, k * width + (c * 32 + lane) * VECTOR + e] = sums[k, c, e]
    T.cuda.cta_sync()
    for c in T.unroll((3 * width + WARPS * 32 - 1) // (WARPS * 32)):
        if c * (WARPS * 32) + thread < 3 * width:
            total[0] = T.float32(0)
            for k in T.unroll(WARPS):
                total[0] = total[0] + shared[k, c * (WARPS * 32) + thread]
            partial[block, c * (WARPS * 32) + thread] = total[0]


@T.jit
def activation_cuda(g: T.handle, x: T.handle, p: T.handle, *, inner: T.constexpr, bands: T.constexpr):
    """Thread block: a stretch of rows of one band of 512 columns. `grad` becomes the gradient before the activation."""
    rows = T.int32()
    grad = T.match_buffer(g, (rows, inner), "float32")
    before = T.match_buffer(x, (rows, inner), "float32")
    partial = T.match_buffer(p, (ROW_BLOCKS, inner), "float32")
    T.device_entry()
    band, block = T.cta_id([bands, ROW_BLOCKS])
    thread = T.thread_id([THREADS])
    share = (rows + ROW_BLOCKS - 1) // ROW_BLOCKS
    stop = T.min(block * share + share, rows)
    gs = T.alloc_local((ROWS, VECTOR), "float32")
    xs = T.alloc_local((ROWS, VECTOR), "float32")
    total = T.alloc_local((VECTOR,), "float32")
    e_s = T.alloc_local((2,), "float32")
    if (band * THREADS + thread) * VECTOR < inner:
        for e in T.unroll(VECTOR):
            total[e] = T.float32(0)
        for step in T.serial((share + ROWS - 1) // ROWS):
            for r in T.unroll(ROWS):
                for e in T.unroll(VECTOR):
                    gs[r, e] = T.float32(0)
                    xs[r, e] = T.float32(0)
                if block * share + step * ROWS + r < stop:
                    for e in T.vectorized(VECTOR):
                        gs[r, e] = grad[block * share + step * ROWS + r, (band * THREADS + thread) * VECTOR + e]
                    for e in T.vectorized(VECTOR):
                        xs[r, e] = before[block * share + step * ROWS + r, (band * THREADS + thread) * VECTOR + e]
            for r in T.unroll(ROWS):
                for e in T.unroll(VECTOR):
                    e_s[0] = decay(xs[r, e])
                    e_s[1] = T.float32(1) / (T.float32(1) + e_s[0])
                    gs[r, e] = gs[r, e] * derivative(xs[r, e], e_s[0], e_s[1])
            for e in T.unroll(VECTOR):
                total[e] = total[e] + ((gs[0, e] + gs[1, e]) + (gs[2, e] + gs[3, e]))
            for r in T.unroll(ROWS):
                if block * share + step * ROWS + r < stop:
                    for e in T.vectorized(VECTOR):
                        grad[block * share + step * ROWS + r, (band * THREADS + thread) * VECTOR + e] = gs[r, e]
        for e in T.vectorized(VECTOR):
            partial[block, (band * THREADS + thread) * VECTOR + e] = total[e]


@T.jit
def add_up_cuda(p: T.handle, s: T.handle, *, columns: T.constexpr):
    """The sums of all blocks, in float64; 32 columns a thread block, whose warps share the rows."""
    blocks = T.int32()
    partial = T.match_buffer(p, (blocks, columns), "float32")
    sums = T.match_buffer(s, (columns,), "float32")
    T.device_entry()
    band = T.cta_id([columns // 32])
    thread = T.thread_id([GROUPS * 32])
    total = T.alloc_local((1,), "float64")
    shared = T.alloc_shared((GROUPS, 32), "float64")
    total[0] = T.float64(0)
    for step in T.serial((blocks + GROUPS - 1) // GROUPS):
        if step * GROUPS + thread // 32 < blocks:
            total[0] = total[0] + T.cast(partial[step * GROUPS + thread // 32, band * 32 + thread % 32], "float64")
    shared[thread // 32, thread % 32] = total[0]
    T.cuda.cta_sync()
    if thread < 32:
        for k in T.unroll(1, GROUPS):
            total[0] = total[0] + shared[k, thread]
        sums[band * 32 + thread] = T.cast(total[0], "float32")


@T.jit
def norm_cpu(
    g: T.handle,
    n: T.handle,
    v: T.handle,
    w: T.handle,
    eps: T.float32,
    d: T.handle,
    p: T.handle,
    *,
    width: T.constexpr,
):
    rows = T.int32()
    grad = T.match_buffer(g, (rows, width), "float32")
    normalized = T.match_buffer(n, (rows, width), "float32")
    variance = T.match_buffer(v, (rows,), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    result = T.match_buffer(d, (rows, width), "float32")
    partial = T.match_buffer(p, (1, 3 * width), "float32")
    total = T.alloc_buffer((2,), "float32", scope="local")
    for c in T.serial(3 * width):
        partial[0, c] = T.float32(0)
    for row in T.serial(rows):
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for c in T.serial(width):
            total[0] = total[0] + grad[row, c] * weight[c]
            total[1] = total[1] + grad[row, c] * weight[c] * normalized[row, c]
        for c in T.serial(width):
            result[row, c] = (
                grad[row, c] * weight[c]
                - total[0] * T.float32(1 / width)
                - normalized[row, c] * (total[1] * T.float32(1 / width))
            ) / T.sqrt(variance[row] + eps)
            partial[0, c] = partial[0, c] + grad[row, c] * normalized[row, c]
            partial[0, width + c] = partial[0, width + c] + grad[row, c]
            partial[0, 2 * width + c] = partial[0, 2 * width + c] + result[row, c]


@T.jit
def activation_cpu(g: T.handle, x: T.handle, p: T.handle, *, inner: T.constexpr):
    rows = T.int32()
    grad = T.match_buffer(g, (rows, inner), "float32")
    before = T.match_buffer(x, (rows, inner), "float32")
    partial = T.match_buffer(p, (1, inner), "float32")
    e_s = T.alloc_buffer((2,), "float32", scope="local")
    for c in T.serial(inner):
        partial[0, c] = T.float32(0)
    for row, c in T.grid(rows, inner):
        e_s[0] = decay(before[row, c])
        e_s[1] = T.float32(1) / (T.float32(1) + e_s[0])
        grad[row, c] = grad[row, c] * derivative(before[row, c], e_s[0], e_s[1])
        partial[0, c] = partial[0, c] + grad[row, c]


@T.jit
def add_up_cpu(p: T.handle, s: T.handle, *, columns: T.constexpr):
    blocks = T.int32()
    partial = T.match_buffer(p, (blocks, columns), "float32")
    sums = T.match_buffer(s, (columns,), "float32")
    for c in T.serial(columns):
        sums[c] = T.float32(0)
        for block in T.serial(blocks):
            sums[c] = sums[c] + partial[block, c]


def compile_for(arch: str, width: int = 512, inner: int = 2048) -> tvm.runtime.Executable:
    """The kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = {
            "norm": norm_cpu.specialize(width=width),
            "activation": activation_cpu.specialize(inner=inner),
            "add_up_norm": add_up_cpu.specialize(columns=3 * width),
            "add_up_activation": add_up_cpu.specialize(columns=inner),
        }
        target, pipeline = "llvm", None
    else:
        assert width % 32 == 0, "sums are added up for 32 columns at a time"
        assert inner % 32 == 0, "sums are added up for 32 columns at a time"
        assert WARPS * 3 * width * 4 <= 48 * 1024, "a block's sums must fit in shared memory"
        kernels = {
            "norm": norm_cuda.specialize(width=width, chunks=-(-width // (32 * VECTOR))),
            "activation": activation_cuda.specialize(inner=inner, bands=-(-inner // (THREADS * VECTOR))),
            "add_up_norm": add_up_cuda.specialize(columns=3 * width),
            "add_up_activation": add_up_cuda.specialize(columns=inner),
        }
        target, pipeline = tvm.target.Target({"kind": "cuda", "arch": arch}), "tirx"
    kernels = {name: kernel.with_attr("global_symbol", name) for name, kernel in kernels.items()}
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline=pipeline)


@cache
def kernels_for(device: torch.device, width: int, inner: int):
    arch, norm_blocks, row_blocks = "llvm", 1, 1
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch, norm_blocks, row_blocks = f"sm_{major}{minor}a", NORM_BLOCKS, ROW_BLOCKS
    executable = compile_for(arch, width, inner)
    kernels = [executable[name] for name in ("norm", "activation", "add_up_norm", "add_up_activation")]
    return *kernels, norm_blocks, row_blocks


def solve(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    gelu_output: torch.Tensor,
    fc2_weight: torch.Tensor,
    normalized: torch.Tensor,
    var: torch.Tensor,
    ln_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    width, inner = fc2_weight.shape
    grad, h, n = (x.view(-1, width) for x in (grad_output, hidden_states, normalized))
    a, g = fc1_output.view(-1, inner), gelu_output.view(-1, inner)
    norm, activation, add_up_norm, add_up_activation, norm_blocks, row_blocks = kernels_for(grad.device, width, inner)
    grad_y, partial = torch.empty_like(grad), grad.new_empty(norm_blocks, 3 * width)
    norm(grad, n, var.view(-1), ln_weight, eps, grad_y, partial)
    norm_sums = grad.new_empty(3, width)
    add_up_norm(partial, norm_sums.view(-1))
    grad_fc2_weight = grad_y.T @ g
    grad_a, partial = grad_y @ fc2_weight, grad.new_empty(row_blocks, inner)  # after the kernel
    activation(grad_a, a, partial)
    grad_fc1_bias = grad.new_empty(inner)
    add_up_activation(partial, grad_fc1_bias)
    grad_fc1_weight = grad_a.T @ h
    grad_hidden = grad_y.addmm_(grad_a, fc1_weight).view(hidden_states.shape)
    grad_ln_weight, grad_ln_bias, grad_fc2_bias = norm_sums.unbind()
    return (
        grad_hidden,
        grad_fc1_weight,
        grad_fc1_bias,
        grad_fc2_weight,
        grad_fc2_bias,
        grad_ln_weight,
        grad_ln_bias,
    )
