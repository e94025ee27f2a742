"""p49 against a routing written in plain Python, and the mistakes that the contract refuses."""

from dataclasses import replace

import pytest
import torch

from metakernelbench.problems.moe import p49_group_limited_topk_routing as p49
from tests.problems.support import CPU, case


def _route(scores: list[float], biases: list[float]) -> tuple[list[int], list[float]]:
    """One token, with sorted lists instead of tensors."""
    size = len(scores) // p49.GROUPS
    biased = [score + bias for score, bias in zip(scores, biases, strict=True)]
    groups = [range(start, start + size) for start in range(0, len(scores), size)]
    by_strength = sorted(groups, key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
    eligible = [expert for group in by_strength[: p49.KEPT_GROUPS] for expert in group]
    chosen = sorted(eligible, key=lambda expert: -biased[expert])[: p49.TOP_K]
    total = sum(scores[expert] for expert in chosen)
    return chosen, [2.5 * scores[expert] / total for expert in chosen]


@pytest.mark.parametrize("seed", range(3))
def test_reference_routes_as_a_plain_python_loop_does(seed):
    problem = case("p49", seed)
    hidden, weight, bias, _ = problem.inputs
    scores = torch.sigmoid(hidden.double() @ weight.double().t())
    routed = [_route(row.tolist(), bias.double().tolist()) for row in scores]
    indices, weights = problem.expected
    assert indices.tolist() == [chosen for chosen, _ in routed]
    torch.testing.assert_close(weights.double(), torch.tensor([w for _, w in routed], dtype=torch.float64))


def test_every_score_that_decides_something_keeps_its_distance():
    hidden, weight, bias, _ = case("p49").inputs
    assert not p49._unstable(hidden, weight, bias).any()
    assert p49._unstable(hidden, weight, torch.zeros_like(bias)).shape == (12,)
    duplicated = torch.cat([weight[:1], weight[:-1]])  # two experts with equal scores
    assert p49._unstable(hidden, duplicated, bias.new_full(bias.shape, 0.5)).any()


def _variant(*, bias_in_weights=False, ungrouped=False, factor=1.0, half_scores=False, ascending=False, normalise=True):
    def implementation(hidden, weight, bias, scaling):
        scores = p49._scores(hidden, weight)
        if half_scores:
            scores = scores.bfloat16().float()
        biased = scores + bias.float()
        indices = (biased if ungrouped else p49._within_best_groups(biased)).topk(p49.TOP_K).indices
        if ascending:
            indices = indices.flip(-1)
        weights = (biased if bias_in_weights else scores).gather(-1, indices)
        return indices, (weights / weights.sum(-1, keepdim=True) if normalise else weights) * scaling * factor

    return implementation


def test_the_same_routing_written_once_more_is_accepted():
    assert case("p49").accepts(_variant())


@pytest.mark.parametrize(
    "mistake",
    [
        {"bias_in_weights": True},
        {"ungrouped": True},
        {"factor": 1 / 2.5},
        {"half_scores": True},
        {"ascending": True},
        {"normalise": False},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_routing_is_refused(mistake):
    assert not case("p49").accepts(_variant(**mistake))


def test_cost_is_that_of_the_fact_sheet():
    cost = p49.cost(p49.FULL)
    assert cost.bytes == 134_217_728 + 2_097_152 + 512 + 1_048_576 + 524_288
    assert cost.flops == {"bf16": 2 * 16384 * 4096 * 256}


def test_inputs_have_the_shapes_of_the_workload():
    torch.manual_seed(0)
    hidden, weight, bias, factor = p49.make_inputs(replace(p49.SMOKE, tokens=5), CPU)
    assert (hidden.shape, weight.shape, bias.shape, factor) == ((5, 32), (32, 32), (32,), 2.5)
