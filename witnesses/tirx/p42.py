"""p42, front of a multi-token-prediction head, in TIRx. The projection stays with eager PyTorch.

One kernel takes the embedding of the next token and the hidden state, normalises each, and writes them side by side, as
the projection reads them. CUDA: a thread block has one half of one row, a thread several times 8 values (16 bytes).
CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
THREADS = 256


@T.jit
def front_cuda(
    i: T.handle,
    h: T.handle,
    t: T.handle,
    we: T.handle,
    wh: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    chunks: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    vocabulary = T.int32()
    ids = T.match_buffer(i, (batch, length), "int64")
    hidden = T.match_buffer(h, (batch, length, width), "bfloat16")
    embeddings = T.match_buffer(t, (vocabulary, width), "bfloat16")
    embedding_weight = T.match_buffer(we, (width,), "bfloat16")
    hidden_weight = T.match_buffer(wh, (width,), "bfloat16")
    out = T.match_buffer(o, (batch, length, 2, width), "bfloat16")
    T.device_entry()
    position, which, prompt = T.cta_id([length, 2, batch])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((chunks, VECTOR), "bfloat16")
    w = T.alloc_local((chunks, VECTOR), "bfloat16")
    y = T.alloc_local((chunks, VECTOR), "float32")
    total = T.alloc_local((1,), "float32")
    id = T.alloc_local((1,), "int64")
    partial = T.alloc_shared((THREADS // 32,), "float32")
    if which == 0:
        id[0] = T.int64(0)
        if position + 1 < length:
            id[0] = ids[prompt, position + 1]
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                x[c, e] = embeddings[id[0], (c * THREADS + thread) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                w[c, e] = embedding_weight[(c * THREADS + thread) * VECTOR + e]
    else:
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                x[c, e] = hidden[prompt, position, (c * THREADS + thread) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                w[c, e] = hidden_weight[(c * THREADS + thread) * VECTOR + e]
    total[0] = T.float32(0)
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            y[c, e] = T.cast(x[c, e], "float32")
            total[0] = total[0] + y[c, e] * y[c, e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        partial[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(THREADS // 32):
        total[0] = total[0] + partial[k]
    total[0] = T.rsqrt(total[0] / T.float32(width) + eps)
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            x[c, e] = T.cast(y[c, e] * total[0] * T.cast(w[c, e], "float32"), "bfloat16")
        for e in T.vectorized(VECTOR):
            out[prompt, position, which, (c * THREADS + thread) * VECTOR + e] = x[c, e]


@T.jit
def front_cpu(
    i: T.handle,
    h: T.handle,
    t: T.handle,
    we: T.handle,
    wh: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    vocabulary = T.int32()
    ids = T.match_buffer(i, (batch, length), "int64")
    hidden = T.match_buffer(h, (batch, length, width), "bfloat16")
    embeddings = T.match_buffer(t, (vocabulary, width), "bfloat16")
    embedding_weight = T.match_buffer(we, (width,), "bfloat16")
    hidden_weight = T.match_buffer(wh, (width,), "bfloat16")
    out = T.match_buffer(o, (batch, length, 2, width), "bfloat16")
    x = T.alloc_buffer((2, width), "float32", scope="local")
    total = T.alloc_buffer((2,), "float32", scope="local")
    id = T.alloc_buffer((1,), "int64", scope="local")
    for prompt, position in T.grid(batch, length):
        id[0] = T.int64(0)
        if position + 1 < length:
            id[0] = ids[prompt, position + 1]
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for c in T.serial(width):
            x[0, c] = T.cast(embeddings[id[0], c], "float32")
            x[1, c] = T.cast(hidden[prompt, position, c], "float32")
            total[0] = total[0] + x[0, c] * x[0, c]
            total[1] = total[1] + x[1, c] * x[1, c]
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(width) + eps)
        total[1] = T.float32(1) / T.sqrt(total[1] / T.float32(width) + eps)
        for c in T.serial(width):
            out[prompt, position, 0, c] = T.cast(
                x[0, c] * total[0] * T.cast(embedding_weight[c], "float32"), "bfloat16"
            )
            out[prompt, position, 1, c] = T.cast(x[1, c] * total[1] * T.cast(hidden_weight[c], "float32"), "bfloat16")


def compile_for(arch: str, width: int = 4096) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": front_cpu.specialize(width=width)}), target="llvm")
    assert width % (VECTOR * THREADS) == 0
    kernel = front_cuda.specialize(width=width, chunks=width // (VECTOR * THREADS))
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, width: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, width)["main"]


def solve(
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    word_embeddings: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eh_proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    batch, length, width = hidden_states.shape
    both = hidden_states.new_empty(batch, length, 2, width)
    kernel_for(both.device, width)(input_ids, hidden_states, word_embeddings, enorm_weight, hnorm_weight, eps, both)
    return linear(both.flatten(2), eh_proj_weight)
