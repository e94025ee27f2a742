"""Intervals and tests: exact where the answer is known, and at their stated rate where it is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom, rankdata, spearmanr

from metakernelbench.analysis.metrics import GEOMETRIC_MEAN, PAIRED_LIFT, PASS_RATE, lift_metrics, value
from metakernelbench.analysis.resampling import (
    MIN_PROBLEMS,
    Tracked,
    codes_of,
    estimate,
    sign_flip_test,
    spearman,
    swap_test,
    twice_ranks,
)
from metakernelbench.analysis.simulate import World, simulated_ratios, simulated_rows

RNG = np.random.default_rng(0)


def arms_of(source: np.ndarray, solo: np.ndarray, conditioned: np.ndarray) -> Tracked:
    """Comparisons that share no attempt: only the two arms of each can change places."""
    places = np.arange(3 * len(source)).reshape(3, -1)
    groups = np.concatenate([places[0], places[1], places[1]])
    values = np.concatenate([source, solo, conditioned])
    return Tracked(speedup=values, group=groups, source=places[0], solo=places[1], conditioned=places[2])


def test_one_problem_gives_a_value_and_no_interval():
    found = estimate(PAIRED_LIFT, np.array([2.0, 0.5, 4.0]), np.zeros(3, dtype=np.int64))
    assert found.value == pytest.approx(4 ** (1 / 3) - 1)
    assert (found.low, found.high) == (None, None)


@pytest.mark.parametrize(("problems", "defined"), [(MIN_PROBLEMS - 1, False), (MIN_PROBLEMS, True)])
def test_an_interval_needs_a_least_number_of_problems(problems, defined):
    found = estimate(PAIRED_LIFT, RNG.uniform(0.5, 2, problems), np.arange(problems))
    assert (found.low is not None) is defined


def test_problems_that_agree_give_no_interval_of_zero_width():
    found = estimate(PAIRED_LIFT, np.full(20, 1.5), np.arange(20))
    assert (found.low, found.high) == (None, None)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.4593), (1.0, 0.5407, 1.0)])
def test_a_share_without_exception_gets_the_exact_binomial_interval(share, low, high):
    """R 4.3: binom.test(0, 6)$conf.int is 0.0000000 0.4592581."""
    column = np.full(12, np.nan if share == 0 else 2.0)
    found = estimate(PASS_RATE, column, np.repeat(np.arange(6), 2))
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_the_mean_speedup_counts_only_problems_with_a_pass():
    column = np.array([2.0, 3.0, 4.0, np.nan, np.nan, np.nan, np.nan])
    found = estimate(GEOMETRIC_MEAN, column, np.arange(7))
    assert found.value == pytest.approx(24 ** (1 / 3))
    assert found.low is None


def test_the_same_data_give_the_same_interval_in_any_order():
    rho, problem = RNG.uniform(0.25, 4, 60), np.repeat(np.arange(20), 3)
    order = RNG.permutation(60)
    one, other = estimate(PAIRED_LIFT, rho, problem), estimate(PAIRED_LIFT, rho[order], problem[order])
    assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-6)


def test_rows_of_one_problem_are_not_taken_for_independent():
    rho = RNG.uniform(0.5, 2, 20)
    once = estimate(PAIRED_LIFT, rho, np.arange(20))
    repeated = estimate(PAIRED_LIFT, np.tile(rho, 50), np.tile(np.arange(20), 50))
    assert (once.low, once.high) == pytest.approx((repeated.low, repeated.high), rel=1e-5)


def almost_surely(share: float, studies: int) -> tuple[int, int]:
    """Bounds that a count of `studies` with this chance leaves once in a thousand times."""
    return int(binom.ppf(0.0005, studies, share)), int(binom.ppf(0.9995, studies, share))


WORLD = World(models=1, effect=0.1, problem_effect=0.2, fail=0.25, skip=0.1)
STUDIES = 400


@pytest.fixture(scope="module")
def truth() -> dict[str, float]:
    """What every metric of a paired ratio is in the simulated world, from more problems than any study has."""
    rho, _ = simulated_ratios(replace(WORLD, problems=400_000), seed=99)
    return {metric.name: value(metric, rho) for metric in lift_metrics()}


@pytest.mark.parametrize("problems", [12, 74])
@pytest.mark.parametrize("metric", [lift_metrics()[0], lift_metrics()[1], lift_metrics()[3]], ids=lambda m: m.name)
def test_intervals_cover_the_truth_at_the_stated_rate(problems, metric, truth):
    inside = 0
    for seed in range(STUDIES):
        found = estimate(metric, *simulated_ratios(replace(WORLD, problems=problems), seed), draws=1_000)
        inside += found.low is not None and found.low <= truth[metric.name] <= found.high
    least, most = almost_surely(0.95, STUDIES)
    assert least <= inside <= most


def test_intervals_over_several_models_cover_too(truth):
    """Rows of one problem go up and down together; taken for independent they would give intervals far too narrow."""
    world = replace(WORLD, problems=40, models=6)
    inside = 0
    for seed in range(STUDIES):
        found = estimate(PAIRED_LIFT, *simulated_ratios(world, seed), draws=1_000)
        inside += found.low <= truth["lift"] <= found.high
    least, most = almost_surely(0.95, STUDIES)
    assert least <= inside <= most


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_are_average_ranks(ties):
    values = RNG.normal(size=(50, 30))
    if ties:
        values = values.round()
    codes = codes_of(values.ravel()).reshape(values.shape)
    np.testing.assert_array_equal(twice_ranks(codes, codes.max() + 1), 2 * rankdata(values, axis=1))


def test_spearman_is_scipys():
    x, y = RNG.normal(size=(2, 40)).round(1)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)


@pytest.mark.parametrize("values", [([1.0, 2.0], [2.0, 1.0]), ([1.0] * 5, [1.0, 2, 3, 4, 5])])
def test_a_correlation_of_too_few_or_constant_values_is_undefined(values):
    x, y = map(np.array, values)
    assert spearman(x, y) is None
    assert sign_flip_test(x, y).p is None
    assert swap_test(arms_of(x, y, y)).p is None


def test_the_sign_flip_test_tends_to_the_share_of_sign_patterns():
    values = np.array([1.0, 2.0, 3.0])
    patterns = [np.array(signs) for signs in product((-1, 1), repeat=3)]
    reached = [abs(spearmanr(values * s, values * t).statistic) > 1 - 1e-9 for s in patterns for t in patterns]
    found = sign_flip_test(values, values, draws=20_000)
    assert found.value == pytest.approx(1)
    assert found.p == pytest.approx(np.mean(reached), abs=0.01)


def test_the_swap_test_finds_treatments_that_follow_their_source():
    source, solo = RNG.normal(size=(2, 60))
    found = swap_test(arms_of(source, solo, source + 0.1 * RNG.normal(size=60)))
    assert found.value > 0.5
    assert found.p < 0.01


def test_the_swap_test_tends_to_the_share_of_all_swaps():
    """Of 2^5 ways to swap the arms of five comparisons, counted one by one."""
    source, solo, conditioned = RNG.normal(size=(3, 5)).round(1)

    def difference(swap: np.ndarray) -> float:
        alone, after = np.where(swap, conditioned, solo), np.where(swap, solo, conditioned)
        return spearmanr(source, after).statistic - spearmanr(source, alone).statistic

    ways = [difference(np.array(swap)) for swap in product((False, True), repeat=5)]
    found = swap_test(arms_of(source, solo, conditioned), draws=20_000)
    assert found.value == pytest.approx(ways[0])
    assert found.p == pytest.approx(np.mean(np.abs(ways) >= abs(ways[0]) - 1e-9), abs=0.015)


def test_a_seed_gives_the_same_p_again():
    rows = simulated_rows(World(problems=20, models=2), 1).attempts
    assert swap_test(rows, seed=5) == swap_test(rows, seed=5)
    assert len({swap_test(rows, seed=seed).p for seed in range(6)}) > 1


def directions(world: World, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows = simulated_rows(world, seed)
    return tuple(np.log(rows.rho[rows.direction == direction]) for direction in (0, 1))


NULLS = {
    "one model": World(problems=40, models=1),
    "three models": World(problems=25, models=3),
    "an effect that is the same everywhere": World(problems=40, models=1, effect=0.2),
}


@pytest.mark.parametrize("world", NULLS.values(), ids=NULLS.keys())
@pytest.mark.parametrize("test", ["sign flip", "swap"])
def test_the_tests_hold_their_level_in_studies_without_what_they_look_for(test, world):
    studies, rejected = 300, 0
    for seed in range(studies):
        if test == "sign flip":
            found = sign_flip_test(*directions(world, seed), seed=seed, draws=200)
        else:
            found = swap_test(simulated_rows(world, seed).attempts, seed=seed, draws=200)
        rejected += found.p <= 0.05
    least, most = almost_surely(0.05, studies)
    assert least <= rejected <= most


def test_the_sign_flip_test_finds_problems_whose_directions_go_together():
    world = World(problems=74, models=6, problem_effect=0.5, fail=0.1, noise=0.1)
    assert sign_flip_test(*directions(world, 1)).p < 0.001


def test_the_lift_interval_is_positive_exactly_for_an_effect():
    clear = estimate(PAIRED_LIFT, *simulated_ratios(World(models=2, effect=0.4, fail=0.1), 1))
    none = estimate(PAIRED_LIFT, *simulated_ratios(World(models=2, effect=0.0, fail=0.1), 1))
    assert clear.low > 0
    assert none.low < 0 < none.high


def test_rates_of_a_group_are_estimated_as_shares():
    rho, problem = simulated_ratios(World(problems=30, models=1), 4)
    for metric in lift_metrics()[1:]:
        found = estimate(metric, rho, problem)
        assert 0 <= found.low <= found.value <= found.high <= 1
