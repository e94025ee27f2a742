"""p46, backward of a softmax top-k router, in TIRx. The two products stay with eager PyTorch.

CUDA: the kernel makes the gradient of the logits. As many threads as experts are selected share a token: each finds the
gradient of one selected probability, then all take their part of the token's experts, 4 at a time. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4  # float32 values in 16 bytes
THREADS = 128


def float32(x):
    return T.cast(x, "float32")


@T.jit
def logits_cuda(
    p: T.handle,
    s: T.handle,
    z: T.handle,
    w: T.handle,
    m: T.handle,
    d: T.handle,
    o: T.handle,
    *,
    experts: T.constexpr,
    top_k: T.constexpr,
):
    tokens = T.int32()
    probs = T.match_buffer(p, (tokens, experts), "float32")
    selected = T.match_buffer(s, (tokens, top_k), "int64")
    sums = T.match_buffer(z, (tokens,), "float32")
    grad_weights = T.match_buffer(w, (tokens, top_k), "bfloat16")
    grad_mask = T.match_buffer(m, (experts, top_k, tokens), "bfloat16")
    grad_direct = T.match_buffer(d, (tokens, experts), "bfloat16")
    out = T.match_buffer(o, (tokens, experts), "bfloat16")
    T.device_entry()
    block = T.cta_id([T.ceildiv(tokens, THREADS // top_k)])
    thread = T.thread_id([THREADS])
    own = T.alloc_local((experts // (VECTOR * top_k), VECTOR), "float32")
    grads = T.alloc_local((experts // (VECTOR * top_k), VECTOR), "float32")
    direct = T.alloc_local((experts // (VECTOR * top_k), VECTOR), "bfloat16")
    token = T.alloc_local((1,), "int32")
    part = T.alloc_local((1,), "int32")
    expert = T.alloc_local((1,), "int32")
    other = T.alloc_local((1,), "int32")
    prob = T.alloc_local((1,), "float32")
    grad = T.alloc_local((1,), "float32")
    inner = T.alloc_local((1,), "float32")
    # Threads beyond the last token repeat it: all take part in the exchanges.
    token[0] = T.min(block * (THREADS // top_k) + thread // top_k, tokens - 1)
    part[0] = thread % top_k
    for c in T.unroll(experts // (VECTOR * top_k)):
        for e in T.vectorized(VECTOR):
            own[c, e] = probs[token[0], (c * top_k + part[0]) * VECTOR + e]
    for c in T.unroll(experts // (VECTOR * top_k)):
        for e in T.vectorized(VECTOR):
            direct[c, e] = grad_direct[token[0], (c * top_k + part[0]) * VECTOR + e]
    expert[0] = T.cast(selected[token[0], part[0]], "int32")
    prob[0] = probs[token[0], expert[0]]
    grad[0] = float32(grad_weights[token[0], part[0]])
    inner[0] = T.cuda.warp_sum(grad[0] * prob[0], top_k) / sums[token[0]]
    grad[0] = (grad[0] - inner[0]) / sums[token[0]] + float32(grad_mask[expert[0], part[0], token[0]])
    inner[0] = T.cuda.warp_sum(grad[0] * prob[0], top_k)
    for c in T.unroll(experts // (VECTOR * top_k)):
        for e in T.unroll(VECTOR):
            grads[c, e] = -inner[0]
    for k in T.unroll(top_k):
        other[0] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), expert[0], k, top_k) - part[0] * VECTOR
        prob[0] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), grad[0], k, top_k)
        for c in T.unroll(experts // (VECTOR * top_k)):
            for e in T.unroll(VECTOR):
                if other[0] == c * top_k * VECTOR + e:
                    grads[c, e] = grads[c, e] + prob[0]
    if block * (THREADS // top_k) + thread // top_k < tokens:
        for c in T.unroll(experts // (VECTOR * top_k)):
            for e in T.unroll(VECTOR):
                direct[c, e] = T.cast(own[c, e] * grads[c, e] + float32(direct[c, e]), "bfloat16")
            for e in T.vectorized(VECTOR):
                out[token[0], (c * top_k + part[0]) * VECTOR + e] = direct[c, e]


@T.jit
def logits_cpu(
    p: T.handle,
    s: T.handle,
    z: T.handle,
    w: T.handle,
    m: T.handle,
    d: T.handle,
    o: T.handle,
    *,
    experts: T.constexpr,
    top_k: T.constexpr,
):
    tokens = T.int32()
    probs = T.match_buffer(p, (tokens, experts), "float32")
    selected = T.match_buffer(s, (tokens, top_k), "int64")
    sums = T.match_buffer(z, (tokens,), "float32")
    grad_weights = T.match_buffer(w, (tokens, top_k), "bfloat16")
    grad_mask = T.match_buffer(m, (experts, top_k, tokens), "bfloat16")
    grad_direct = T.match_buffer(d, (tokens, experts), "bfloat16")
    out = T.match_buffer(o, (tokens, experts), "bfloat16")
    grads = T.alloc_buffer((experts,), "float32", scope="local")
    grad = T.alloc_buffer((1,), "float32", scope="local")
    weighted = T.alloc_buffer((1,), "float32", scope="local")
    inner = T.alloc_buffer((1,), "float32", scope="local")
    for token in T.serial(tokens):
        weighted[0] = T.float32(0)
        inner[0] = T.float32(0)
        for e in T.serial(experts):
            grads[e] = T.float32(0)
        for k in T.serial(top_k):
            weighted[0] = weighted[0] + float32(grad_weights[token, k]) * probs[token, selected[token, k]]
        for k in T.serial(top_k):
            grad[0] = (float32(grad_weights[token, k]) - weighted[0] / sums[token]) / sums[token]
            grad[0] = grad[0] + float32(grad_mask[selected[token, k], k, token])
            grads[selected[token, k]] = grad[0]
            inner[0] = inner[0] + grad[0] * probs[token, selected[token, k]]
        for e in T.serial(experts):
            grad[0] = probs[token, e] * (grads[e] - inner[0]) + float32(grad_direct[token, e])
            out[token, e] = T.cast(grad[0], "bfloat16")


def compile_for(arch: str, experts: int = 128, top_k: int = 8) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernel = logits_cpu.specialize(experts=experts, top_k=top_k)
        return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")
    assert top_k in (1, 2, 4, 8, 16, 32) and experts % (VECTOR * top_k) == 0
    kernel = logits_cuda.specialize(experts=experts, top_k=top_k)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, experts: int, top_k: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, experts, top_k)["main"]


def solve(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    routing_probs: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights_sum: torch.Tensor,
    grad_routing_weights: torch.Tensor,
    grad_expert_mask: torch.Tensor,
    grad_router_logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_logits = torch.empty_like(grad_router_logits)
    kernel_for(gate_weight.device, len(gate_weight), selected_experts.shape[1])(
        *(routing_probs, selected_experts, routing_weights_sum.view(-1)),
        *(grad_routing_weights, grad_expert_mask, grad_router_logits, grad_logits),
    )
    return torch.mm(grad_logits, gate_weight), torch.mm(grad_logits.t(), hidden_states)
