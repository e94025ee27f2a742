"""Properties of the paired ratio and its aggregates, on anything that a study can contain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metakernelbench.analysis.metrics import (
    FAST_RATE,
    GEOMETRIC_MEAN,
    PAIRED_LIFT,
    PASS_RATE,
    RATIO_LIMIT,
    harmed,
    helped,
    lift_metrics,
    paired_ratio,
    value,
)

times = st.one_of(st.just(float("nan")), st.floats(1e-6, 1e6))
pairs = st.lists(st.tuples(times, times, st.booleans()), min_size=1, max_size=40)
ratios = st.lists(st.floats(1 / RATIO_LIMIT, RATIO_LIMIT), min_size=1, max_size=40).map(np.array)
bands = st.floats(0, 1)


def columns(rows: list[tuple[float, float, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    base, treat, skipped = zip(*rows, strict=True)
    return np.array(base), np.array(treat), np.array(skipped)


@given(pairs)
def test_swapping_the_arms_inverts_the_ratio(rows):
    base, treat, skipped = columns(rows)
    np.testing.assert_allclose(paired_ratio(treat, base, skipped), 1 / paired_ratio(base, treat, skipped), rtol=1e-12)


@given(pairs)
def test_the_ratio_stays_within_its_bounds(rows):
    rho = paired_ratio(*columns(rows))
    assert ((rho >= 1 / RATIO_LIMIT) & (rho <= RATIO_LIMIT)).all()


@given(pairs, bands)
def test_swapping_the_arms_swaps_help_and_harm(rows, band):
    base, treat, skipped = columns(rows)
    forth, back = paired_ratio(base, treat, skipped), paired_ratio(treat, base, skipped)
    np.testing.assert_array_equal(helped(forth, band), harmed(back, band))


@given(ratios, bands)
def test_help_neutral_and_harm_are_all_there_is(rho, band):
    _, *shares = (value(metric, rho) for metric in lift_metrics(band))
    assert sum(shares) == pytest.approx(1)


@given(ratios, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rho, random):
    shuffled = rho.tolist()
    random.shuffle(shuffled)
    for metric in lift_metrics():
        assert value(metric, np.array(shuffled)) == pytest.approx(value(metric, rho), abs=1e-12)


@given(st.integers(1, 50))
def test_ratios_of_one_have_no_lift_and_are_neutral(count):
    assert [value(metric, np.ones(count)) for metric in lift_metrics()] == [0, 0, 1, 0]


@given(ratios, st.integers(1, 10))
def test_skipped_pairs_move_nothing_but_denominators(rho, skipped):
    longer = np.concatenate([rho, np.ones(skipped)])
    share = len(rho) / len(longer)
    lift, more = value(PAIRED_LIFT, rho), value(PAIRED_LIFT, longer)
    assert np.log1p(more) == pytest.approx(np.log1p(lift) * share, abs=1e-12)
    for metric in (lift_metrics()[1], lift_metrics()[3]):
        assert value(metric, longer) == pytest.approx(value(metric, rho) * share)


@pytest.mark.parametrize(
    ("base", "treat", "skipped", "rho"),
    [
        (3.0, 2.0, False, 1.5),
        (9.0, 1.0, False, 4.0),
        (1.0, 9.0, False, 0.25),
        (np.nan, 1.0, False, 4.0),
        (1.0, np.nan, False, 0.25),
        (np.nan, np.nan, False, 1.0),
        (3.0, 2.0, True, 1.0),
    ],
)
def test_the_ratio_of_each_case(base, treat, skipped, rho):
    assert paired_ratio(np.array([base]), np.array([treat]), np.array([skipped])) == [rho]


def test_the_edge_of_the_band_is_neutral():
    edges = np.array([1.05, 1 / 1.05, 1.0501, 0.9523])
    assert helped(edges).tolist() == [False, False, True, False]
    assert harmed(edges).tolist() == [False, False, False, True]


def test_solo_metrics_keep_failures_in_the_denominators_and_cap_speedups():
    speedups = np.array([2.0, np.nan, 0.5, 400.0])
    assert value(PASS_RATE, speedups) == 0.75
    assert value(GEOMETRIC_MEAN, speedups) == pytest.approx(100 ** (1 / 3))
    assert value(FAST_RATE, speedups) == 0.5


def test_the_mean_speedup_of_no_passing_attempt_is_undefined():
    assert value(GEOMETRIC_MEAN, np.array([np.nan, np.nan])) is None
