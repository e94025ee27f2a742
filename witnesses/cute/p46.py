"""p46, backward of a softmax top-k router, in CuTe DSL. The two products stay with eager PyTorch.

The kernel makes the gradient of the logits. As many threads as experts are selected share a token: each finds the
gradient of one selected probability, then all take their part of the token's experts, 4 at a time.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes
THREADS = 128


@cute.kernel
def logits_kernel(
    probs: cute.Tensor,
    selected: cute.Tensor,
    sums: cute.Tensor,
    grad_weights: cute.Tensor,
    grad_mask: cute.Tensor,
    grad_direct: cute.Tensor,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tokens, experts = probs.shape
    top_k = cutlass.const_expr(selected.shape[1])
    chunks = cutlass.const_expr(experts // (VECTOR * top_k))
    # Threads beyond the last token repeat it: all take part in the exchanges.
    place = block * (THREADS // top_k) + thread // top_k
    token, part = cutlass.min(place, tokens - 1), thread % top_k
    own = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    grads = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    direct = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(probs[token, None], (VECTOR,), (c * top_k + part,)), own[None, c])
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(grad_direct[token, None], (VECTOR,), (c * top_k + part,)), direct[None, c])
    expert = selected[token, part].to(cutlass.Int32)
    prob = probs[token, expert]
    grad = grad_weights[token, part].to(cutlass.Float32)
    total = sums[token]
    weighted = cute.arch.warp_reduction_sum(grad * prob, threads_in_group=top_k)
    grad = (grad - weighted / total) / total + grad_mask[expert, part, token].to(cutlass.Float32)
    inner = cute.arch.warp_reduction_sum(grad * prob, threads_in_group=top_k)
    grads.fill(-inner)
    first_lane = thread % cute.arch.WARP_SIZE - part
    for k in cutlass.range_constexpr(top_k):
        other_expert = cute.arch.shuffle_sync(expert, offset=first_lane + k)
        other_grad = cute.arch.shuffle_sync(grad, offset=first_lane + k)
        for c in cutlass.range_constexpr(chunks):
            for e in cutlass.range_constexpr(VECTOR):
                if other_expert == (c * top_k + part) * VECTOR + e:
                    grads[e, c] = grads[e, c] + other_grad
    if place < tokens:
        values = own.load() * grads.load() + direct.load().to(cutlass.Float32)
        direct.store(values.to(cutlass.BFloat16))
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(direct[None, c], cute.local_tile(out[token, None], (VECTOR,), (c * top_k + part,)))


@cute.jit
def logits_backward(
    probs: cute.Tensor,
    selected: cute.Tensor,
    sums: cute.Tensor,
    grad_weights: cute.Tensor,
    grad_mask: cute.Tensor,
    grad_direct: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    tokens, top_k = selected.shape
    logits_kernel(probs, selected, sums, grad_weights, grad_mask, grad_direct, out).launch(
        grid=(cute.ceil_div(tokens, THREADS // top_k), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, experts: int = 128, top_k: int = 8):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert top_k in (1, 2, 4, 8, 16, 32) and experts % (VECTOR * top_k) == 0
    tokens = cute.sym_int()

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    return cute.compile(
        logits_backward,
        fake(cutlass.Float32, tokens, experts),
        fake(cutlass.Int64, tokens, top_k),
        fake(cutlass.Float32, tokens),
        fake(cutlass.BFloat16, tokens, top_k),
        fake(cutlass.BFloat16, experts, top_k, tokens),
        fake(cutlass.BFloat16, tokens, experts),
        fake(cutlass.BFloat16, tokens, experts),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, experts: int, top_k: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", experts, top_k)


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
