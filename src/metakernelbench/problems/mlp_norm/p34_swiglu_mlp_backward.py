"""Gradients of a SiLU-gated MLP of the size of Hermes 405B, of its input and three weights, from saved activations.

Inputs (full workload):

    grad_output    [64, 128, 16384]  bf16  standard normal: the gradient at the MLP's output
    hidden_states  [64, 128, 16384]  bf16  standard normal
    gate_pre       [64, 128, 53248]  bf16  standard normal: the gate before its activation
    gate_act       [64, 128, 53248]  bf16  standard normal: stands for silu of the gate
    up             [64, 128, 53248]  bf16  standard normal
    gate_weight    [53248, 16384]    bf16  standard normal / 128; [out, in], as all weights
    up_weight      [53248, 16384]    bf16  standard normal / 128
    down_weight    [16384, 53248]    bf16  standard normal / sqrt(53248)

Outputs, bf16: the gradients at hidden_states, gate_weight, up_weight and down_weight.

The saved activations are drawn independently: gate_act is not silu(gate_pre), and none follows from hidden_states, so
all three must be read. Every matrix product and every elementwise product is rounded to bf16, except that the
derivative of silu is computed in fp32 and multiplied there before one rounding. The two parts of the gradient at
hidden_states are rounded before they are added.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Compute the gradients at the input and the three weights of a SiLU-gated MLP of the size of a 405B model from "
    "saved activations."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 4, workload 12",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Hermes 405B",
    inferred=(
        "The roles of inputs of equal shape; in particular the three saved activations are the gate before and after "
        "its activation, and up, and their product is formed again.",
        "The order of the gradients is that of the parameters.",
        "Where values are rounded to bf16; the formulas themselves are checked against autograd.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    inner: int


FULL = Workload(batch=64, sequence=128, width=16384, inner=53248)
SMOKE = Workload(batch=2, sequence=6, width=32, inner=48)

OUTPUTS = ("grad_hidden_states", "grad_gate_weight", "grad_up_weight", "grad_down_weight")


def silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient at x from that at silu(x): one rounding."""
    z = x.to(wide(x))
    sigmoid = torch.sigmoid(z)
    return (grad.to(z.dtype) * (sigmoid * (1 + z * (1 - sigmoid)))).to(x.dtype)


def reference(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    gate_pre: torch.Tensor,
    gate_act: torch.Tensor,
    up: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    grad, x, gate, activated, up = (
        t.reshape(-1, t.shape[-1]) for t in (grad_output, hidden_states, gate_pre, gate_act, up)
    )
    grad_down_weight = grad.T @ (activated * up)
    grad_inner = grad @ down_weight
    grad_up = grad_inner * activated
    grad_gate = silu_backward(grad_inner * up, gate)
    grad_gate_weight = grad_gate.T @ x
    grad_up_weight = grad_up.T @ x
    grad_hidden = grad_gate @ gate_weight + grad_up @ up_weight
    return grad_hidden.reshape(hidden_states.shape), grad_gate_weight, grad_up_weight, grad_down_weight


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    width, inner = workload.width, workload.inner
    tokens = (workload.batch, workload.sequence)
    grad_output, hidden_states = normal(*tokens, width), normal(*tokens, width)
    gate_pre, gate_act, up = normal(*tokens, inner), normal(*tokens, inner), normal(*tokens, inner)
    gate_weight, up_weight = normal(inner, width) / width**0.5, normal(inner, width) / width**0.5
    down_weight = normal(width, inner) / inner**0.5
    return grad_output, hidden_states, gate_pre, gate_act, up, gate_weight, up_weight, down_weight


def cost(workload: Workload) -> Cost:
    width, inner = workload.width, workload.inner
    tokens = workload.batch * workload.sequence
    weights = 3 * width * inner
    return Cost(
        bytes_read=2 * (2 * tokens * width + 3 * tokens * inner + weights),
        bytes_written=2 * (tokens * width + weights),
        flops={"bf16": 2 * 2 * tokens * weights},
    )
