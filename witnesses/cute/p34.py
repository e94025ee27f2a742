"""p34, gradients of a SiLU-gated MLP, in CuTe DSL. The six products stay with eager PyTorch.

One kernel reads the gradient at the inner activations and the three saved ones, and writes all that the products need:
their own product, and the gradients at gate and up, the latter in place. Each value is read and written once, 16 bytes
at a time. The second part of the gradient at hidden_states is added by the product that computes it.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256


@cute.kernel
def gradients_kernel(
    gradient: cute.Tensor, pre: cute.Tensor, act: cute.Tensor, up: cute.Tensor, product: cute.Tensor, gate: cute.Tensor
):
    """All [vectors, 8]; a thread has one of them. `gradient` becomes the gradient at up, `gate` that at the gate."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index < gradient.shape[0]:
        inputs = cute.make_rmem_tensor((VECTOR, 4), cutlass.BFloat16)
        for k, source in enumerate((gradient, pre, act, up)):
            cute.autovec_copy(source[index, None], inputs[None, k])
        g, z = inputs[None, 0].load().to(cutlass.Float32), inputs[None, 1].load().to(cutlass.Float32)
        a, u = inputs[None, 2].load().to(cutlass.Float32), inputs[None, 3].load().to(cutlass.Float32)
        sigmoid = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        sigmoid.store(1.0 + cute.math.exp(-z, fastmath=True))
        for e in cutlass.range_constexpr(VECTOR):
            sigmoid[e] = cute.arch.rcp_approx(sigmoid[e])
        s = sigmoid.load()
        outputs = cute.make_rmem_tensor((VECTOR, 3), cutlass.BFloat16)
        outputs[None, 0].store((g * a).to(cutlass.BFloat16))
        outputs[None, 1].store((a * u).to(cutlass.BFloat16))
        outputs[None, 2].store((g * u * (s * (1.0 + z * (1.0 - s)))).to(cutlass.BFloat16))
        for k, target in enumerate((gradient, product, gate)):
            cute.autovec_copy(outputs[None, k], target[index, None])


@cute.jit
def gradients(
    gradient: cute.Tensor,
    pre: cute.Tensor,
    act: cute.Tensor,
    up: cute.Tensor,
    product: cute.Tensor,
    gate: cute.Tensor,
    stream,
):
    blocks = (gradient.shape[0] + THREADS - 1) // THREADS
    gradients_kernel(gradient, pre, act, up, product, gate).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    vectors = cute.sym_int()
    tensors = [
        make_fake_compact_tensor(cutlass.BFloat16, (vectors, VECTOR), stride_order=(1, 0), assumed_align=16)
        for _ in range(6)
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(gradients, *tensors, stream, options=f"--enable-tvm-ffi --gpu-arch {arch}")


@cache
def kernel_for(device: torch.device):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a")


def solve(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    gate_pre: torch.Tensor,
    gate_act: torch.Tensor,
    up: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    width = down_weight.shape[0]
    grad, x = grad_output.view(-1, width), hidden_states.view(-1, width)
    grad_up = grad @ down_weight  # the gradient at gate_act · up, until the kernel has seen it
    product, grad_gate = torch.empty_like(grad_up), torch.empty_like(grad_up)
    tensors = (grad_up, gate_pre, gate_act, up, product, grad_gate)
    kernel_for(grad.device)(*(tensor.view(-1, VECTOR) for tensor in tensors))
    grad_hidden = (grad_gate @ gate_weight).addmm_(grad_up, up_weight)
    grad_weights = grad_gate.T @ x, grad_up.T @ x, grad.T @ product
    return grad_hidden.view(hidden_states.shape), *grad_weights
