"""Several implementations in one session."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from metakernelbench.errors import UserError
from metakernelbench.grading.head_to_head import Entrant, HeadToHead, Pair, orders
from metakernelbench.grading.timed_calls import orders_of_steps
from metakernelbench.grading.timing import paired_ratio
from tests.grading.support import HONEST, QUICK, Grader

SLOWER = (
    f"import time\n{HONEST}"
    + """
fast = solve

def solve(*inputs):
    end = time.perf_counter() + 0.004
    while time.perf_counter() < end:
        pass
    return fast(*inputs)
"""
)
WRONG_LATER = (
    f"calls = []\n{HONEST}"
    + """
right = solve

def solve(*inputs):
    calls.append(1)
    return right(*inputs) + (len(calls) > 10)
"""
)
OPTIONS = {"workload": "smoke", "device": "cpu", "contract": replace(QUICK, clock_floor_cpu_ms=100)}
"""With so few calls, clocks would say little on a busy machine."""


def entrants(*sources: str | None) -> list[Entrant]:
    return [Entrant("toy", None if source is None else source.encode()) for source in sources]


def test_pairs_are_measured_and_each_has_its_verdict(grade: Grader) -> None:
    result = grade.process.head_to_head("p28", entrants(HONEST, SLOWER, "solve = 1", HONEST), **OPTIONS)
    assert [verdict.code for verdict in result.verdicts] == [None, None, "no-solve", None]
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1), (0, 3), (1, 3)]
    slower = result.pair(1, 0)
    assert slower is not None and slower.low > 1.5
    assert len({verdict.timing.eager_ms for verdict in result.verdicts if verdict.timing}) == 1, "same eager calls"
    assert not result.passed and result.pair(0, 2) is None
    assert HeadToHead.from_json(result.to_json()) == result


def test_a_side_that_fails_while_it_is_timed_leaves_the_others_a_result(grade: Grader) -> None:
    result = grade.process.head_to_head("p28", entrants(HONEST, WRONG_LATER, HONEST), **OPTIONS)
    assert [verdict.passed for verdict in result.verdicts] == [True, False, True]
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 2)]


def test_one_alone_is_no_head_to_head(grade: Grader) -> None:
    with pytest.raises(UserError, match="at least two"):
        grade.process.head_to_head("p28", entrants(HONEST), **OPTIONS)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_everyone_has_every_place_equally_often(count: int) -> None:
    places = Counter(
        (member, place) for order in islice(orders(range(count)), 4 * count) for place, member in enumerate(order)
    )
    assert set(places.values()) == {4} and len(places) == count * count


def test_every_order_of_a_draw_s_calls_comes_as_often() -> None:
    drawn = list(islice(orders_of_steps(), 60))
    assert all(len(set(drawn[first : first + 6])) == 6 for first in range(0, 60, 6))
    assert len({tuple(islice(orders_of_steps(), 6)) for _ in range(20)}) > 1


def test_orders_are_not_the_same_each_time() -> None:
    assert len({tuple(map(tuple, islice(orders("ab"), 50))) for _ in range(20)}) > 1


def test_a_pair_seen_from_the_other_side_is_the_inverse() -> None:
    rng = random.Random(1)
    first = [1 + 0.2 * rng.random() for _ in range(50)]
    second = [1 + 0.3 * rng.random() for _ in range(50)]
    ratio, low, high = paired_ratio(first, second)
    assert low < ratio < high
    assert paired_ratio(second, first) == pytest.approx((1 / ratio, 1 / high, 1 / low))
    pair = Pair(first=0, second=1, ratio=ratio, low=low, high=high)
    assert pair.swapped.swapped == Pair(
        first=0, second=1, ratio=pytest.approx(ratio), low=pytest.approx(low), high=pytest.approx(high)
    )


@pytest.mark.parametrize("seed", range(10))
def test_two_heaps_and_outliers_leave_a_copy_at_one(seed: int) -> None:
    """Times as an H200 gave them: either 0.11 or 0.148 ms, by chance, and now and then a disturbed call."""
    rng = random.Random(seed)

    def call() -> float:
        return rng.choice((0.11, 0.148)) * (1 + rng.gauss(0, 0.02)) + (0.3 if rng.random() < 0.03 else 0)

    ratio, low, high = paired_ratio([call() for _ in range(50)], [call() for _ in range(50)])
    assert 0.9 < ratio < 1.1 and low <= ratio <= high


def test_interval_holds_the_ratio_about_as_often_as_it_says() -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(400):
        drift = [1 + 0.5 * rng.random() for _ in range(50)]
        first = [1.1 * d * rng.lognormvariate(0, 0.05) for d in drift]
        _, low, high = paired_ratio(first, [d * rng.lognormvariate(0, 0.05) for d in drift])
        held += low <= 1.1 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_two_draws_are_enough_to_compute_something() -> None:
    ratio, low, high = paired_ratio([1.0, 2.0], [1.0, 1.0])
    assert low <= ratio <= high
