"""RWKV-4's WKV recurrence over long sequences, from a given state, kept in range by a running maximum.

Inputs (full workload: batch 64, 1721 tokens, 2048 channels):

    time_decay  [2048]            fp32  uniform in [-6, -1)
    key         [64, 1721, 2048]  fp32  standard normal
    time_first  [2048]            fp32  0.5 * standard normal
    value       [64, 1721, 2048]  fp32  standard normal
    num_state   [64, 2048]        fp32  standard normal
    max_state   [64, 2048]        fp32  standard normal
    den_state   [64, 2048]        fp32  uniform in [0.5, 2)

Outputs:

    output     [64, 1721, 2048]  fp32
    num_state  [64, 2048]        fp32
    den_state  [64, 2048]        fp32
    max_state  [64, 2048]        fp32

Everything is elementwise over (batch, channel), with w = -e^time_decay and u = time_first. The state (n, d, m) stands
for a numerator n·e^m and a denominator d·e^m. For every token:

    μ = max(m, k + u);       output = (e^(m-μ) n + e^(k+u-μ) v) / (e^(m-μ) d + e^(k+u-μ))
    m' = max(m + w, k);      n ← e^(m+w-m') n + e^(k-m') v;  d ← e^(m+w-m') d + e^(k-m');  m ← m'

The output reads the state before the token is absorbed. The incoming states are left as they were.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from metakernelbench.problems.formats.chunked import into_chunks
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "RWKV-4 WKV recurrence with per-channel exponential decay and a running maximum, resumed from a given state and "
    "returning the new one."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L1 row 93, workload 6, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="RWKV-4",
    inferred=(
        "the semantics, and the order of the outputs: of the public RWKV layer's plain path",
        "the roles of the three states: the denominator is the one drawn from a positive uniform law",
        "0.5 as the scale of time_first, and as the lower end of the denominator's range: chosen",
    ),
)

BLOCK = 64
"""Tokens that `vectorized` handles at once: e^(64·|w|) stays far inside the range of float32."""


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    channels: int


FULL = Workload(batch=64, length=1721, channels=2048)
SMOKE = Workload(batch=3, length=149, channels=16)

OUTPUTS = ("output", "num_state", "den_state", "max_state")


def reference(
    time_decay: torch.Tensor,
    key: torch.Tensor,
    time_first: torch.Tensor,
    value: torch.Tensor,
    num_state: torch.Tensor,
    max_state: torch.Tensor,
    den_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    compute = wide(key)
    w, u = -torch.exp(time_decay.to(compute)), time_first.to(compute)
    n, d, m = num_state.to(compute), den_state.to(compute), max_state.to(compute)
    output = torch.empty_like(value, dtype=compute)
    for t in range(key.shape[1]):
        k, v = key[:, t].to(compute), value[:, t].to(compute)
        largest = torch.maximum(m, k + u)
        old, new = torch.exp(m - largest), torch.exp(k + u - largest)
        output[:, t] = (old * n + new * v) / (old * d + new)
        largest = torch.maximum(m + w, k)
        old, new = torch.exp(m + w - largest), torch.exp(k - largest)
        n, d, m = old * n + new * v, old * d + new, largest
    return output.to(key.dtype), n, d, m


def vectorized(
    time_decay: torch.Tensor,
    key: torch.Tensor,
    time_first: torch.Tensor,
    value: torch.Tensor,
    num_state: torch.Tensor,
    max_state: torch.Tensor,
    den_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In blocks: running sums within all blocks at once, and a loop over blocks for the state only.

    Token s of a block weighs e^(k_s - (s+1) w) relative to the block's start, and decays with e^(i w) up to token i.
    """
    compute, length = wide(key), key.shape[1]
    w, u = -torch.exp(time_decay.to(compute)), time_first.to(compute)
    v = into_chunks(value.to(compute), BLOCK, -2)
    k = into_chunks(key.to(compute), BLOCK, -2)
    place = torch.arange(BLOCK, dtype=compute, device=key.device).unsqueeze(-1)
    from_start = k - (place + 1) * w
    ragged = length % BLOCK
    if ragged:
        from_start[:, -1, ragged:] = float("-inf")  # padding weighs nothing
    top = from_start.amax(dim=2)
    weight = torch.exp(from_start - top.unsqueeze(2))
    den_sums, num_sums = weight.cumsum(dim=2), (weight * v).cumsum(dim=2)

    n, d, m = num_state.to(compute), den_state.to(compute), max_state.to(compute)
    incoming = []
    for block in range(k.shape[1]):
        incoming.append((n, d, m))
        largest = torch.maximum(m, top[:, block])
        old, new = torch.exp(m - largest), torch.exp(top[:, block] - largest)
        n, d = old * n + new * num_sums[:, block, -1], old * d + new * den_sums[:, block, -1]
        m = largest + (ragged if ragged and block == k.shape[1] - 1 else BLOCK) * w

    n0, d0, m0 = (torch.stack(states, dim=1).unsqueeze(2) for states in zip(*incoming, strict=True))
    largest = torch.maximum(torch.maximum(m0, top.unsqueeze(2)) + place * w, k + u)
    old, new = torch.exp(m0 + place * w - largest), torch.exp(k + u - largest)
    earlier = torch.exp(top.unsqueeze(2) + place * w - largest)
    num_before, den_before = (pad(sums[:, :, :-1], (0, 0, 1, 0)) for sums in (num_sums, den_sums))
    output = (old * n0 + earlier * num_before + new * v) / (old * d0 + earlier * den_before + new)
    return output.flatten(1, 2)[:, :length].to(key.dtype), n, d, m


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, length, channels = workload.batch, workload.length, workload.channels

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=device).uniform_(low, high)

    return (
        uniform(-6.0, -1.0, channels),
        normal(batch, length, channels),
        0.5 * normal(channels),
        normal(batch, length, channels),
        normal(batch, channels),
        normal(batch, channels),
        uniform(0.5, 2.0, batch, channels),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: about 14 per token and channel, exponentials and the division counted as one each."""
    elements = workload.batch * workload.length * workload.channels
    states = 3 * workload.batch * workload.channels
    return Cost(
        bytes_read=4 * (2 * elements + states + 2 * workload.channels),
        bytes_written=4 * (elements + states),
        flops={"fp32": 14 * elements},
    )
