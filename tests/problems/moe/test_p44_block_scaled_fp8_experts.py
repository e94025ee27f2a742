"""p44 against one token at a time in float64, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.moe import p44_block_scaled_fp8_experts as p44
from tests.problems.support import CPU, case


def _dequantised(values, scale, row_block=128, column_block=128):
    """Element (i, j) times the scale of its block, written with index arithmetic."""
    rows, columns = (torch.arange(size) for size in values.shape[-2:])
    return values.double() * scale.double()[..., rows[:, None] // row_block, columns // column_block]


def _by_token(
    logits, bias, hidden, hidden_scale, w1, w1_scale, w2, w2_scale, offset, factor, *, swap=False,
    biased_weights=False, local_norm=False, unscaled_activations=False, unscaled_second=False, ungrouped=False
):  # fmt: skip
    """Every token by itself: experts by sorting, dequantised matrices, no rounding before the end."""
    scores = 1 / (1 + torch.exp(-logits.double()))
    biased = scores + bias.double()
    size = logits.shape[1] // p44.GROUPS
    x = hidden.double() if unscaled_activations else _dequantised(hidden, hidden_scale.t(), row_block=1)
    first = [_dequantised(w, s) for w, s in zip(w1, w1_scale, strict=True)]
    second = [w.double() if unscaled_second else _dequantised(w, s) for w, s in zip(w2, w2_scale, strict=True)]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        row = biased[token].tolist()
        groups = sorted(range(p44.GROUPS), key=lambda g: -sum(sorted(row[g * size : (g + 1) * size])[-2:]))
        kept = range(p44.GROUPS) if ungrouped else groups[: p44.KEPT_GROUPS]
        eligible = [e for g in kept for e in range(g * size, (g + 1) * size)]
        chosen = sorted(eligible, key=lambda e: -row[e])[: p44.TOP_K]
        local = [e for e in chosen if offset <= e < offset + len(first)]
        source = biased if biased_weights else scores
        total = sum(float(source[token, e]) for e in (local if local_norm else chosen))
        for expert in local:
            up, gate = (first[expert - offset] @ x[token]).chunk(2)
            if swap:
                up, gate = gate, up
            y = second[expert - offset] @ (gate / (1 + torch.exp(-gate)) * up)
            out[token] += factor * float(source[token, expert]) / total * y
    return out.to(torch.bfloat16)


@pytest.mark.parametrize("seed", [7, 8])
def test_reference_agrees_with_one_token_at_a_time(seed):
    problem = case("p44", seed)
    assert problem.accepts(_by_token)
    assert problem.accepts(p44.vectorized)


@pytest.mark.parametrize(
    "mistake", ["swap", "biased_weights", "local_norm", "unscaled_activations", "unscaled_second", "ungrouped"]
)
def test_a_wrong_layer_is_refused(mistake):
    assert not case("p44").accepts(lambda *inputs: _by_token(*inputs, **{mistake: True}))


def test_smoke_draws_have_tokens_with_and_without_local_experts():
    empty = [(case("p44", seed).expected == 0).all(dim=1) for seed in range(3)]
    assert all(0 < int(rows.sum()) < len(rows) for rows in empty)


def test_full_size_loads_are_those_that_the_cost_assumes():
    torch.manual_seed(0)
    bias = torch.full((256,), p44.LOW_BIAS).bfloat16()
    bias[list(p44.HIGH_BIAS_EXPERTS)] = p44.HIGH_BIAS
    logits = (torch.randn(14107, 256) * 0.6560 - 1.6706).bfloat16().float()
    selected, _ = p44._route(logits, bias, 2.5)
    local = (selected >= 32) & (selected < 64)
    assert int(local.sum()) == pytest.approx(p44.FULL.expected_local_pairs, rel=0.05)
    assert int(local.any(dim=1).sum()) == pytest.approx(p44.FULL.expected_local_tokens, rel=0.05)
    assert len(p44.HIGH_BIAS_EXPERTS) == 101


def test_scores_that_decide_keep_their_distance():
    logits, bias = case("p44").inputs[:2]
    assert not p44._unstable(logits, bias).any()
    assert p44._unstable(torch.zeros_like(logits), bias).all()


def test_cost_is_that_of_the_fact_sheet():
    cost = p44.cost(p44.FULL)
    weights = 939_524_096 + 469_762_048 + 344_064
    assert cost.bytes_read == weights + 7490 * 7168 + 7490 * 56 * 4 + 14_445_568 + 512
    assert cost.bytes_written == 202_237_952
    assert cost.bytes == pytest.approx(1.68e9, rel=2e-3)
    assert cost.flops["fp8"] == pytest.approx(1.36e12, rel=2e-3)


def test_scales_have_a_row_per_block_of_rows_and_a_column_per_block_of_columns():
    torch.manual_seed(0)
    inputs = p44.make_inputs(p44.SMOKE, CPU)
    assert [tuple(x.shape) for x in inputs[3:8:2]] == [(2, 10), (4, 2, 2), (4, 2, 1)]
