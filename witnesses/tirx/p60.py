"""p60, product of two NVFP4 operands, in TIRx. The product stays with eager PyTorch.

An E2M1 code times its E4M3 block scale has at most six significant bits, so it is exact in bfloat16. A kernel turns the
codes of either operand into such products, torch.mm sums theirs in float32, and another kernel applies both global
scales in place. CUDA: a thread has 8 codes, or 4 results. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8  # bfloat16 values in 16 bytes, and codes in 4
QUAD = 4  # float32 values in 16 bytes
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time


def e4m3_value(byte):
    """What the byte of a scale, which is not negative, stands for."""
    digits = T.cast(byte, "uint32")
    normal = T.reinterpret("float32", (digits << T.uint32(20)) + T.uint32(120 << 23))
    return T.Select(digits < T.uint32(8), T.cast(digits, "float32") * T.float32(2**-9), normal)


def e2m1_value(word, place: int):
    """What the code at a place of a word stands for: from 1 on, its digits are those of a float32."""
    code = T.reinterpret("uint32", word) >> T.uint32(4 * place)
    digits = code & T.uint32(7)
    large = (digits << T.uint32(22)) + T.uint32(126 << 23)
    small = digits * T.uint32(126 << 23)  # 0 or 0.5
    value = T.Select(digits < T.uint32(2), small, large)
    return T.reinterpret("float32", value | ((code & T.uint32(8)) << T.uint32(28)))


@T.jit
def dequantise_cuda(c: T.handle, s: T.handle, o: T.handle):
    """Codes come 8 in a word, two words for a scale."""
    words = T.int32()
    blocks = T.int32()
    codes = T.match_buffer(c, (words,), "int32")
    scales = T.match_buffer(s, (blocks,), "uint8")
    out = T.match_buffer(o, (words, VECTOR), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(words, THREADS * UNROLL)])
    thread = T.thread_id([THREADS])
    word = T.alloc_local((UNROLL,), "int32")
    byte = T.alloc_local((UNROLL,), "uint8")
    scale = T.alloc_local((1,), "float32")
    values = T.alloc_local((VECTOR,), "bfloat16")
    first = T.alloc_local((1,), "int32")
    first[0] = group * (THREADS * UNROLL) + thread
    for u in T.unroll(UNROLL):
        if first[0] + u * THREADS < words:
            word[u] = codes[first[0] + u * THREADS]
            byte[u] = scales[(first[0] + u * THREADS) // 2]
    for u in T.unroll(UNROLL):
        if first[0] + u * THREADS < words:
            scale[0] = e4m3_value(byte[u])
            for e in T.unroll(VECTOR):
                values[e] = T.cast(e2m1_value(word[u], e) * scale[0], "bfloat16")
            for e in T.vectorized(VECTOR):
                out[first[0] + u * THREADS, e] = values[e]


@T.jit
def dequantise_cpu(c: T.handle, s: T.handle, o: T.handle):
    words = T.int32()
    blocks = T.int32()
    codes = T.match_buffer(c, (words,), "int32")
    scales = T.match_buffer(s, (blocks,), "uint8")
    out = T.match_buffer(o, (words, VECTOR), "bfloat16")
    for i in T.serial(words):
        for e in T.unroll(VECTOR):
            out[i, e] = T.cast(e2m1_value(codes[i], e) * e4m3_value(scales[i // 2]), "bfloat16")


@T.jit
def finish_cuda(p: T.handle, a: T.handle, b: T.handle):
    """In place; 4 values (16 bytes) a thread at a time."""
    quads = T.int32()
    product = T.match_buffer(p, (quads, QUAD), "float32")
    a_global = T.match_buffer(a, (1,), "float32")
    b_global = T.match_buffer(b, (1,), "float32")
    T.device_entry()
    group = T.cta_id([T.ceildiv(quads, THREADS * UNROLL)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, QUAD), "float32")
    first = T.alloc_local((1,), "int32")
    first[0] = group * (THREADS * UNROLL) + thread
    for u in T.unroll(UNROLL):
        if first[0] + u * THREADS < quads:
            for e in T.vectorized(QUAD):
                values[u, e] = product[first[0] + u * THREADS, e]
    for u in T.unroll(UNROLL):
        if first[0] + u * THREADS < quads:
            for e in T.unroll(QUAD):
                values[u, e] = values[u, e] * (a_global[0] * b_global[0])
            for e in T.vectorized(QUAD):
                product[first[0] + u * THREADS, e] = values[u, e]


@T.jit
def finish_cpu(p: T.handle, a: T.handle, b: T.handle):
    quads = T.int32()
    product = T.match_buffer(p, (quads, QUAD), "float32")
    a_global = T.match_buffer(a, (1,), "float32")
    b_global = T.match_buffer(b, (1,), "float32")
    for i, e in T.grid(quads, QUAD):
        product[i, e] = product[i, e] * (a_global[0] * b_global[0])


def compile_for(arch: str) -> list[tvm.runtime.Executable]:
    """For an operand and for the result, for `arch` (`llvm`, `sm_90a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = [dequantise_cpu.specialize(), finish_cpu.specialize()]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [dequantise_cuda.specialize(), finish_cuda.specialize()]
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch)]


def solve(
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    global_decode_scale_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_decode_scale_weight: torch.Tensor,
) -> torch.Tensor:
    dequantise, finish = kernels_for(weight.device)
    values = []
    for codes, scales in ((hidden_states, hidden_states_scale), (weight, weight_scale)):
        target = torch.empty(codes.shape[1], 2 * codes.shape[2], dtype=torch.bfloat16, device=codes.device)
        words = codes.view(torch.uint8).view(-1).view(torch.int32)
        dequantise(words, scales.view(torch.uint8).view(-1), target.view(-1, VECTOR))
        values.append(target)
    a, b = values
    product = torch.mm(a, b.t(), out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float().t())
    finish(product.view(-1, QUAD), global_decode_scale_input.view(1), global_decode_scale_weight.view(1))
    return product.unsqueeze(0)
