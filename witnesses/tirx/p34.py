"""p34, gradients of a SiLU-gated MLP, in TIRx. The six products stay with eager PyTorch.

One kernel reads the gradient at the inner activations and the three saved ones, and writes all that the products need:
their own product, and the gradients at gate and up, the latter in place. Each value is read and written once; CUDA: 16
bytes at a time. The second part of the gradient at hidden_states is added by the product that computes it.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256


def silu_derivative(z, sigmoid):
    return sigmoid * (T.float32(1) + z * (T.float32(1) - sigmoid))


@T.jit
def gradients_cuda(d: T.handle, z: T.handle, a: T.handle, u: T.handle, p: T.handle, g: T.handle):
    """All [vectors, 8]; a thread has one of them. `gradient` becomes the gradient at up, `gate` that at the gate."""
    vectors = T.int32()
    gradient = T.match_buffer(d, (vectors, VECTOR), "bfloat16")
    pre = T.match_buffer(z, (vectors, VECTOR), "bfloat16")
    act = T.match_buffer(a, (vectors, VECTOR), "bfloat16")
    up = T.match_buffer(u, (vectors, VECTOR), "bfloat16")
    product = T.match_buffer(p, (vectors, VECTOR), "bfloat16")
    gate = T.match_buffer(g, (vectors, VECTOR), "bfloat16")
    T.device_entry()
    block = T.cta_id([(vectors + THREADS - 1) // THREADS])
    thread = T.thread_id([THREADS])
    ds = T.alloc_local((VECTOR,), "bfloat16")
    zs = T.alloc_local((VECTOR,), "bfloat16")
    acts = T.alloc_local((VECTOR,), "bfloat16")
    ups = T.alloc_local((VECTOR,), "bfloat16")
    gradient_up = T.alloc_local((VECTOR,), "bfloat16")
    gradient_gate = T.alloc_local((VECTOR,), "bfloat16")
    products = T.alloc_local((VECTOR,), "bfloat16")
    sigmoid = T.alloc_local((1,), "float32")
    if block * THREADS + thread < vectors:
        for e in T.vectorized(VECTOR):
            ds[e] = gradient[block * THREADS + thread, e]
        for e in T.vectorized(VECTOR):
            zs[e] = pre[block * THREADS + thread, e]
        for e in T.vectorized(VECTOR):
            acts[e] = act[block * THREADS + thread, e]
        for e in T.vectorized(VECTOR):
            ups[e] = up[block * THREADS + thread, e]
        for e in T.unroll(VECTOR):
            sigmoid[0] = T.float32(1) / (T.float32(1) + T.exp(-T.cast(zs[e], "float32")))
            gradient_up[e] = T.cast(T.cast(ds[e], "float32") * T.cast(acts[e], "float32"), "bfloat16")
            products[e] = T.cast(T.cast(acts[e], "float32") * T.cast(ups[e], "float32"), "bfloat16")
            gradient_gate[e] = T.cast(
                T.cast(ds[e], "float32")
                * T.cast(ups[e], "float32")
                * silu_derivative(T.cast(zs[e], "float32"), sigmoid[0]),
                "bfloat16",
            )
        for e in T.vectorized(VECTOR):
            gradient[block * THREADS + thread, e] = gradient_up[e]
        for e in T.vectorized(VECTOR):
            product[block * THREADS + thread, e] = products[e]
        for e in T.vectorized(VECTOR):
            gate[block * THREADS + thread, e] = gradient_gate[e]


@T.jit
def gradients_cpu(d: T.handle, z: T.handle, a: T.handle, u: T.handle, p: T.handle, g: T.handle):
    vectors = T.int32()
    gradient = T.match_buffer(d, (vectors, VECTOR), "bfloat16")
    pre = T.match_buffer(z, (vectors, VECTOR), "bfloat16")
    act = T.match_buffer(a, (vectors, VECTOR), "bfloat16")
    up = T.match_buffer(u, (vectors, VECTOR), "bfloat16")
    product = T.match_buffer(p, (vectors, VECTOR), "bfloat16")
    gate = T.match_buffer(g, (vectors, VECTOR), "bfloat16")
    x = T.alloc_buffer((5,), "float32", scope="local")
    for i, e in T.grid(vectors, VECTOR):
        x[0] = T.cast(gradient[i, e], "float32")
        x[1] = T.cast(pre[i, e], "float32")
        x[2] = T.cast(act[i, e], "float32")
        x[3] = T.cast(up[i, e], "float32")
        x[4] = T.float32(1) / (T.float32(1) + T.exp(-x[1]))
        gradient[i, e] = T.cast(x[0] * x[2], "bfloat16")
        product[i, e] = T.cast(x[2] * x[3], "bfloat16")
        gate[i, e] = T.cast(x[0] * x[3] * silu_derivative(x[1], x[4]), "bfloat16")


def compile_for(arch: str) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": gradients_cpu.specialize()}), target="llvm")
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": gradients_cuda.specialize()}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch)["main"]


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
