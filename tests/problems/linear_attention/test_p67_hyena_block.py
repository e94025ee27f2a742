"""p67 with its convolutions written as sums over taps, and the mistakes that the contract refuses."""

import math

import pytest
import torch

from metakernelbench.problems.linear_attention import p67_hyena_block as p67
from tests.problems.linear_attention.recurrent import promoted
from tests.problems.support import case
from tests.problems.workloads import case_at, tf32


def _norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def _by_taps(
    hidden, n1w, n1b, n2w, n2b, in_w, in_b, short_w, short_b, f_in_w, f_in_b, freq, f1w, f1b, f2w, f2b, f_out,
    skip_w, deltas, out_w, out_b, fc1w, fc1b, fc2w, fc2b, eps, shift, *, circular=False, skip=True, exact_gelu=False,
    long=True, periodic_tau=False
):  # fmt: skip
    batch, length, width = hidden.shape
    dtype = hidden.dtype
    u = _norm(hidden, n1w, n1b, eps) @ in_w.t() + in_b
    padded = torch.cat([torch.zeros(batch, 2, 3 * width, dtype=dtype), u], dim=1)
    u = sum(short_w[:, 0, i] * padded[:, i : i + length] for i in range(3)) + short_b
    x0, x1, v = u.chunk(3, dim=-1)

    t = torch.arange(length, dtype=dtype)
    tau = t / (length if periodic_tau else length - 1)
    features = [tau, *(torch.cos(f * 2 * math.pi * t / length) for f in (1e-4, 1.0))]
    features += [-torch.sin(f * 2 * math.pi * t / length) for f in (1e-4, 1.0)]
    a = torch.stack(features, dim=1)
    for weight, bias in ((f_in_w, f_in_b), (f1w, f1b), (f2w, f2b)):
        a = torch.sin(freq * (a @ weight.t() + bias))
    kernel = (a @ f_out.t()) * (torch.exp(-tau[:, None] * deltas.flatten().abs()) + shift)

    s = v * x1
    y = torch.zeros_like(s)
    for j in range(length if long else 0):
        shifted = s.roll(j, dims=1)
        if not circular:
            shifted[:, :j] = 0
        y = y + kernel[j] * shifted
    y = y + skip_w * s if skip else y
    r = (y * x0) @ out_w.t() + out_b + hidden
    z = _norm(r, n2w, n2b, eps) @ fc1w.t() + fc1b
    tanh = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    exact = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
    return (exact if exact_gelu else tanh) @ fc2w.t() + fc2b + r


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_block_with_sums_over_taps(seed):
    problem = case("p67", seed)
    torch.testing.assert_close(problem.anchor[0], _by_taps(*promoted(*problem.inputs)), rtol=1e-10, atol=1e-11)
    assert problem.accepts(_by_taps)


def _changed(place, change):
    def implementation(*inputs):
        inputs = list(inputs)
        inputs[place] = change(inputs[place])
        return p67.reference(*inputs)

    return implementation


@pytest.mark.parametrize("mistake", ["circular", "exact_gelu", "periodic_tau"])
def test_a_wrong_block_is_refused(mistake):
    assert not case("p67").accepts(lambda *inputs: _by_taps(*inputs, **{mistake: True}))


@pytest.mark.parametrize("part", ["skip", "long"])
def test_no_part_of_the_convolution_can_be_left_out_at_the_full_width(part):
    sizes = p67.Workload(batch=1, length=64, width=256, mlp_width=1024, filter_width=64, features=5, taps=3)
    problem = case_at("p67", sizes)
    assert problem.accepts(_by_taps)
    assert not problem.accepts(lambda *inputs: _by_taps(*inputs, **{part: False}))
    assert not problem.accepts(_changed(26, lambda shift: 0 * shift))


@pytest.mark.parametrize(
    ("place", "change"), [(25, lambda eps: 100 * eps), (26, lambda shift: 0 * shift), (5, tf32), (21, tf32)]
)
def test_wrong_constants_and_single_tf32_products_are_refused(place, change):
    assert not case("p67").accepts(_changed(place, change))


def test_cost_is_that_of_the_fact_sheet():
    cost = p67.cost(p67.FULL)
    assert cost.bytes == 20_051_200
    assert cost.flops["fp32_matrix"] == pytest.approx(12.88e9, rel=1e-3)
