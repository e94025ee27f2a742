"""p53, gated projections from block-scaled FP8, in TIRx. The products stay with eager PyTorch, on CUDA in bfloat16.

One kernel turns codes and scales into the values that they stand for, gate and up weights into one matrix, so that one
product serves both; another gates the one half of the product by the other. CUDA: a thread has 16 codes (16 bytes), or
8 values of either half. CPU: plain loops in float32.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

BLOCK = 128
CODES = 16
VECTOR = 8
THREADS = 256


def e4m3(code):
    """The float32 that an E4M3 byte stands for. An expression, for any target."""
    magnitude = T.cast(code, "uint32") & T.uint32(0x7F)
    normal = T.reinterpret("float32", (magnitude << T.uint32(20)) + T.uint32(120 << 23))
    subnormal = T.cast(magnitude, "float32") * T.float32(2**-9)
    value = T.if_then_else(magnitude < T.uint32(8), subnormal, normal)
    return T.if_then_else(code >= T.uint8(0x80), -value, value)


def gated(gate, up):
    return gate / (T.float32(1) + T.exp(-gate)) * up


@T.jit
def dequantise_cuda(c: T.handle, s: T.handle, v: T.handle, *, columns: T.constexpr, height: T.constexpr):
    """A thread block has a row; `height` rows share a scale."""
    rows = T.int32()
    scale_rows = T.int32()
    codes = T.match_buffer(c, (rows, columns), "uint8")
    scales = T.match_buffer(s, (scale_rows, columns // BLOCK), "float32")
    target = T.match_buffer(v, (rows, columns), "bfloat16")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([columns // CODES])
    raw = T.alloc_local((CODES,), "uint8")
    values = T.alloc_local((CODES,), "bfloat16")
    scale = T.alloc_local((1,), "float32")
    scale[0] = scales[row // height, thread * CODES // BLOCK]
    for e in T.vectorized(CODES):
        raw[e] = codes[row, thread * CODES + e]
    for e in T.unroll(CODES):
        values[e] = T.cast(e4m3(raw[e]) * scale[0], "bfloat16")
    for part in T.unroll(CODES // VECTOR):
        for e in T.vectorized(VECTOR):
            target[row, (thread * (CODES // VECTOR) + part) * VECTOR + e] = values[part * VECTOR + e]


@T.jit
def gate_cuda(b: T.handle, o: T.handle, *, width: T.constexpr):
    """A row of `both` holds the gate's part, then the other."""
    rows = T.int32()
    both = T.match_buffer(b, (rows, 2 * width), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    T.device_entry()
    part, row = T.cta_id([T.ceildiv(width // VECTOR, THREADS), rows])
    thread = T.thread_id([THREADS])
    gate = T.alloc_local((VECTOR,), "bfloat16")
    up = T.alloc_local((VECTOR,), "bfloat16")
    place = T.alloc_local((1,), "int32")
    place[0] = part * THREADS + thread
    if place[0] < width // VECTOR:
        for e in T.vectorized(VECTOR):
            gate[e] = both[row, place[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            up[e] = both[row, width + place[0] * VECTOR + e]
        for e in T.unroll(VECTOR):
            gate[e] = T.cast(gated(T.cast(gate[e], "float32"), T.cast(up[e], "float32")), "bfloat16")
        for e in T.vectorized(VECTOR):
            out[row, place[0] * VECTOR + e] = gate[e]


@T.jit
def dequantise_cpu(c: T.handle, s: T.handle, v: T.handle, *, columns: T.constexpr, height: T.constexpr):
    rows = T.int32()
    scale_rows = T.int32()
    codes = T.match_buffer(c, (rows, columns), "uint8")
    scales = T.match_buffer(s, (scale_rows, columns // BLOCK), "float32")
    target = T.match_buffer(v, (rows, columns), "float32")
    for row, column in T.grid(rows, columns):
        target[row, column] = e4m3(codes[row, column]) * scales[row // height, column // BLOCK]


@T.jit
def gate_cpu(b: T.handle, o: T.handle, *, width: T.constexpr):
    rows = T.int32()
    both = T.match_buffer(b, (rows, 2 * width), "float32")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    for row, column in T.grid(rows, width):
        out[row, column] = T.cast(gated(both[row, column], both[row, width + column]), "bfloat16")


def compile_for(arch: str, hidden: int = 3584, intermediate: int = 18944) -> list[tvm.runtime.Executable]:
    """For activations, for weights, and for the gating, for `arch` (`llvm`, `sm_90a`, ...); needs no GPU."""
    dequantise, gate = (dequantise_cpu, gate_cpu) if arch == "llvm" else (dequantise_cuda, gate_cuda)
    kernels = [dequantise.specialize(columns=hidden, height=height) for height in (1, BLOCK)]
    kernels.append(gate.specialize(width=intermediate))
    if arch == "llvm":
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, hidden: int, intermediate: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, hidden, intermediate)]


def solve(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    scale_gate: torch.Tensor,
    up_proj_weight: torch.Tensor,
    scale_up: torch.Tensor,
) -> torch.Tensor:
    intermediate, hidden = gate_proj_weight.shape
    dequantise_tokens, dequantise_weight, gate_product = kernels_for(x.device, hidden, intermediate)
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    tokens = torch.empty(x.shape, dtype=dtype, device=x.device)
    weights = torch.empty(2, intermediate, hidden, dtype=dtype, device=x.device)
    dequantise_tokens(x.view(torch.uint8), scale_x, tokens)
    dequantise_weight(gate_proj_weight.view(torch.uint8), scale_gate, weights[0])
    dequantise_weight(up_proj_weight.view(torch.uint8), scale_up, weights[1])
    both = torch.mm(tokens, weights.view(-1, hidden).t())
    out = torch.empty(len(x), intermediate, dtype=torch.bfloat16, device=x.device)
    gate_product(both, out)
    return out
