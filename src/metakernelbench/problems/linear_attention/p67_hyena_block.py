"""A whole Hyena block in float32 (HyenaDNA small): an implicit long convolution by FFT, gating, and an MLP.

Inputs (full workload: batch 32, 256 tokens, width D = 256, MLP width 1024, filter width 64, 5 positional features):

    hidden_states        [32, 256, 256]  fp32   standard normal
    norm1_weight         [256]           fp32   1 + 0.1 * standard normal
    norm1_bias           [256]           fp32   0.1 * standard normal
    norm2_weight         [256]           fp32   1 + 0.1 * standard normal
    norm2_bias           [256]           fp32   0.1 * standard normal
    in_proj_weight       [768, 256]      fp32   standard normal / 16
    in_proj_bias         [768]           fp32   0.1 * standard normal
    short_filter_weight  [768, 1, 3]     fp32   standard normal / sqrt(3)
    short_filter_bias    [768]           fp32   0.1 * standard normal
    filter_in_weight     [64, 5]         fp32   standard normal / sqrt(5)
    filter_in_bias       [64]            fp32   0.1 * standard normal
    sin_freq             [1, 64]         fp32   1 + 0.1 * standard normal
    filter_mid1_weight   [64, 64]        fp32   standard normal / 8
    filter_mid1_bias     [64]            fp32   0.1 * standard normal
    filter_mid2_weight   [64, 64]        fp32   standard normal / 8
    filter_mid2_bias     [64]            fp32   0.1 * standard normal
    filter_out_weight    [256, 64]       fp32   standard normal / 8
    filter_bias          [256]           fp32   standard normal
    exp_mod_deltas       [1, 1, 256]     fp32   256 equally spaced values from ln(0.01)/1.5 to ln(0.01)/0.3, always
    out_proj_weight      [256, 256]      fp32   standard normal / 16
    out_proj_bias        [256]           fp32   0.1 * standard normal
    fc1_weight           [1024, 256]     fp32   standard normal / 16
    fc1_bias             [1024]          fp32   0.1 * standard normal
    fc2_weight           [256, 1024]     fp32   standard normal / 32
    fc2_bias             [256]           fp32   0.1 * standard normal
    layer_norm_eps       1e-5            float  the same in every draw
    exp_mod_shift        0.05            float  the same in every draw

Output: [32, 256, 256] fp32.

1. Layer norm, then the projection to 3·D channels; each channel is convolved causally over time with its 3 taps (the
   last tap meets the current token) plus bias. The channels split into x0, x1 and v.
2. The long filter, for t = 0 … L-1: τ = t/(L-1), ω = 2πt/L, two frequencies f from 1e-4 to 1, features (τ, cos(fω),
   -sin(fω)); three layers a ← sin(sin_freq * (W a + b)), then filter_out_weight · a. Channel d is multiplied by
   e^(-τ|δ_d|) + shift.
3. s = v * x1; y_t = Σ_{j≤t} filter_j s_{t-j} + filter_bias * s_t, by an FFT of length 2L.
4. r = (y * x0) · out_projᵀ + bias + hidden_states.
5. output = fc2(gelu(fc1(layer norm 2 of r))) + r, with the tanh form of GELU.
"""

from dataclasses import dataclass
from math import log, pi, sqrt

import torch
from torch.nn.functional import conv1d, gelu, layer_norm, linear

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "A whole Hyena block in float32: layer norm, three streams with a short filter, an implicit long convolution by "
    "FFT, gating, output projection and an MLP, with residuals."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 50, workload 7, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="HyenaDNA small",
    inferred=(
        "the semantics, and shift 0.05: of the public HyenaDNA block",
        "scales of weights and biases: chosen, each stream of unit order; with the public initialiser's 0.02 the whole "
        "long convolution would lie below the allowance",
        "end points of exp_mod_deltas: the public defaults, fast 0.3 and slow 1.5 at target 0.01",
        "the positional grid uses the sequence length itself: no other length is among the constants",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    width: int
    mlp_width: int
    filter_width: int
    features: int
    taps: int


FULL = Workload(batch=32, length=256, width=256, mlp_width=1024, filter_width=64, features=5, taps=3)
SMOKE = Workload(batch=2, length=32, width=16, mlp_width=64, filter_width=8, features=5, taps=3)

OUTPUTS = ("output",)

FIXED = ("exp_mod_deltas",)


def _features(length: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[length, count]: τ, then a cosine and a negative sine per frequency."""
    bands = (count - 1) // 2
    tau = torch.linspace(0, 1, length, dtype=dtype, device=device).unsqueeze(1)
    omega = 2 * pi * torch.arange(length, dtype=dtype, device=device).unsqueeze(1) / length
    phase = torch.linspace(1e-4, bands - 1, bands, dtype=dtype, device=device) * omega
    return torch.cat([tau, phase.cos(), -phase.sin()], dim=1)


def reference(
    hidden_states: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    in_proj_weight: torch.Tensor,
    in_proj_bias: torch.Tensor,
    short_filter_weight: torch.Tensor,
    short_filter_bias: torch.Tensor,
    filter_in_weight: torch.Tensor,
    filter_in_bias: torch.Tensor,
    sin_freq: torch.Tensor,
    filter_mid1_weight: torch.Tensor,
    filter_mid1_bias: torch.Tensor,
    filter_mid2_weight: torch.Tensor,
    filter_mid2_bias: torch.Tensor,
    filter_out_weight: torch.Tensor,
    filter_bias: torch.Tensor,
    exp_mod_deltas: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    layer_norm_eps: float,
    exp_mod_shift: float,
) -> torch.Tensor:
    compute = wide(hidden_states)
    length, width = hidden_states.shape[1:]
    hidden = hidden_states.to(compute)

    streams = layer_norm(hidden, (width,), norm1_weight.to(compute), norm1_bias.to(compute), layer_norm_eps)
    streams = linear(streams, in_proj_weight.to(compute), in_proj_bias.to(compute)).transpose(1, 2)
    channels, _, taps = short_filter_weight.shape
    streams = conv1d(
        streams, short_filter_weight.to(compute), short_filter_bias.to(compute), padding=taps - 1, groups=channels
    )
    x0, x1, v = torch.split(streams[..., :length], width, dim=1)

    a = _features(length, filter_in_weight.shape[1], compute, hidden_states.device)
    for weight, bias in (
        (filter_in_weight, filter_in_bias),
        (filter_mid1_weight, filter_mid1_bias),
        (filter_mid2_weight, filter_mid2_bias),
    ):
        a = torch.sin(sin_freq.to(compute) * linear(a, weight.to(compute), bias.to(compute)))
    tau = torch.linspace(0, 1, length, dtype=compute, device=hidden_states.device).unsqueeze(1)
    window = torch.exp(-tau * exp_mod_deltas.to(compute).flatten().abs()) + exp_mod_shift
    long_filter = (linear(a, filter_out_weight.to(compute)) * window).t()

    s = v * x1
    spectrum = torch.fft.rfft(s, n=2 * length) * torch.fft.rfft(long_filter, n=2 * length)
    y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + filter_bias.to(compute).unsqueeze(1) * s

    mixed = linear((y * x0).transpose(1, 2), out_proj_weight.to(compute), out_proj_bias.to(compute)) + hidden
    normed = layer_norm(mixed, (width,), norm2_weight.to(compute), norm2_bias.to(compute), layer_norm_eps)
    inner = gelu(linear(normed, fc1_weight.to(compute), fc1_bias.to(compute)), approximate="tanh")
    return (linear(inner, fc2_weight.to(compute), fc2_bias.to(compute)) + mixed).to(hidden_states.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, mlp_width, filter_width = workload.width, workload.mlp_width, workload.filter_width

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device) * scale

    def weight(*shape: int) -> torch.Tensor:
        return normal(*shape, scale=1 / sqrt(shape[-1]))

    def bias(size: int) -> torch.Tensor:
        return normal(size, scale=0.1)

    return (
        normal(workload.batch, workload.length, width),
        1 + normal(width, scale=0.1),
        bias(width),
        1 + normal(width, scale=0.1),
        bias(width),
        weight(3 * width, width),
        bias(3 * width),
        weight(3 * width, 1, workload.taps),
        bias(3 * width),
        weight(filter_width, workload.features),
        bias(filter_width),
        1 + normal(1, filter_width, scale=0.1),
        weight(filter_width, filter_width),
        bias(filter_width),
        weight(filter_width, filter_width),
        bias(filter_width),
        weight(width, filter_width),
        normal(width),
        torch.linspace(log(0.01) / 1.5, log(0.01) / 0.3, width, device=device).view(1, 1, width),
        weight(width, width),
        bias(width),
        weight(mlp_width, width),
        bias(mlp_width),
        weight(width, mlp_width),
        bias(width),
        1e-5,
        0.05,
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: the projections and the MLP. Filter network and FFT are a few percent of them."""
    tokens, width, mlp_width, filter_width = (
        workload.batch * workload.length,
        workload.width,
        workload.mlp_width,
        workload.filter_width,
    )
    projections = 4 * width * width + 2 * width * mlp_width
    short = 3 * width * (workload.taps + 1)
    long_filter = filter_width * (workload.features + 2 * filter_width + width + 4) + 2 * width
    vectors = 4 * width + 3 * width + width + mlp_width + width
    return Cost(
        bytes_read=4 * (tokens * width + projections + short + long_filter + vectors),
        bytes_written=4 * tokens * width,
        flops={"fp32_matrix": 2 * tokens * projections},
    )
