from __future__ import annotations

import random
from statistics import median

import pytest

from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.timing import Agreement, Clocks, Idleness, agreement, speedup_interval

CALM, BUSY = [0.0] * 50, [0.4] * 50
"""Shares of its time for which the reference waits for a processor, draw by draw."""


def clocks(claimed: float, real: float, *, carrying: float = 0.3, calls: int = 50, seed: int = 1) -> list[Clocks]:
    """Calls that take `real` ms and claim `claimed`, on a machine that disturbs one call in three."""
    rng = random.Random(seed)

    def carried() -> float:
        return carrying + rng.gauss(0, 0.01) + (rng.expovariate(0.5) if rng.random() < 0.33 else 0)

    return [Clocks(claimed, real + carried(), carried()) for _ in range(calls)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", range(20))
def test_honest_clocks_agree_on_a_disturbed_machine(device: str, seed: int) -> None:
    assert agreement(clocks(1.0, 1.0, seed=seed), 0.0, CALM, device, CONTRACT).believable


@pytest.mark.parametrize("seed", range(20))
def test_a_lie_beyond_the_tolerance_is_seen(seed: int) -> None:
    assert not agreement(clocks(1.0, 1.3, seed=seed), 0.0, CALM, "cuda", CONTRACT).believable
    assert not agreement(clocks(0.01, 0.2, seed=seed), 0.0, CALM, "cuda", CONTRACT).believable
    assert not agreement(clocks(0.01, 1.0, seed=seed), 0.0, CALM, "cpu", CONTRACT).believable


def as_on_a_gpu(claimed: float, real: float, seed: int) -> list[Clocks]:
    """Windows as an H200's: a hard lower edge, above it a tail of a few tenths of a millisecond."""
    rng = random.Random(seed)

    def carried() -> float:
        return 1.05 + rng.gauss(0, 0.01) + rng.expovariate(1 / 0.15)

    return [Clocks(claimed, real + carried(), carried()) for _ in range(50)]


@pytest.mark.parametrize("seed", range(50))
def test_a_lie_of_twice_the_tolerance_is_seen_in_the_noise_of_a_gpu(seed: int) -> None:
    assert not agreement(as_on_a_gpu(0.1, 0.18, seed), 0.0, CALM, "cuda", CONTRACT).believable
    assert not agreement(as_on_a_gpu(1.0, 1.25, seed), 0.0, CALM, "cuda", CONTRACT).believable


@pytest.mark.parametrize("claimed", [0.05, 0.3, 1.0])
def test_honest_clocks_agree_in_the_noise_of_a_gpu_in_nearly_every_try(claimed: float) -> None:
    tries = [agreement(as_on_a_gpu(claimed, claimed, seed), 0.0, CALM, "cuda", CONTRACT) for seed in range(200)]
    assert sum(told.believable for told in tries) >= 190
    assert all(told.believable or told.undecided for told in tries)


def test_lying_about_the_faster_half_is_enough_to_be_seen() -> None:
    mixed = clocks(1.0, 2.0, calls=26) + clocks(2.0, 2.0, calls=24, seed=2)
    assert not agreement(mixed, 0.0, CALM, "cuda", CONTRACT).believable


@pytest.mark.parametrize("seed", range(5))
def test_noise_hides_no_lie_of_several_times_the_tolerance(seed: int) -> None:
    rng = random.Random(seed)
    noisy = [Clocks(0.01, 4.0 + 8 * rng.random(), 0.5 + 8 * rng.random()) for _ in range(50)]
    assert not agreement(noisy, 0.0, CALM, "cpu", CONTRACT).believable


def test_nobody_is_refused_for_what_only_noise_excuses() -> None:
    assert Agreement(hidden_ms=3.0, allowed_ms=0.2, noise_ms=4.0, most_noise_ms=2.0, waited=0.0).undecided
    assert Agreement(hidden_ms=1.5, allowed_ms=0.2, noise_ms=4.0, most_noise_ms=2.0, waited=0.0).believable
    assert not Agreement(hidden_ms=4.5, allowed_ms=0.2, noise_ms=4.0, most_noise_ms=2.0, waited=0.0).undecided


def test_a_lie_on_a_quiet_machine_is_not_undecided() -> None:
    assert not agreement(clocks(0.01, 5.0), 0.0, CALM, "cpu", CONTRACT).undecided


def test_where_the_reference_waits_as_well_clocks_that_disagree_decide_nothing() -> None:
    late = clocks(1.0, 5.0)
    told = agreement(late, 0.0, BUSY, "cpu", CONTRACT)
    assert not told.believable and told.undecided
    assert agreement(clocks(1.0, 1.0), 0.0, BUSY, "cpu", CONTRACT).believable
    waits_now_and_then = [0.4] * 20 + [0.0] * 30
    assert not agreement(late, 0.0, waits_now_and_then, "cpu", CONTRACT).undecided


def idleness(*busy: float) -> Idleness:
    """After a call's end, one second without a call for each share of it that the processes ran."""
    seen, run_s = Idleness(), 5.0
    for number, share in enumerate(busy):
        seen.begins(2.0 * number, run_s)
        run_s += share
        seen.ends(2.0 * number + 1, run_s)
        run_s += 0.7  # the call itself
    return seen


def test_background_work_is_what_runs_without_a_call() -> None:
    assert idleness(0.6, 0.5, 0.7).excessive
    assert not idleness(0.01, 0.02, 0.01).excessive
    assert idleness(0.6, 0.5).run_s == pytest.approx(1.1)


def test_few_milliseconds_of_processor_time_say_nothing() -> None:
    short = Idleness()
    short.begins(0.0, 1.0)
    short.ends(0.012, 1.004)
    assert not short.excessive


def test_background_work_is_seen_in_as_little_time_as_a_dozen_short_calls_leave() -> None:
    short = Idleness()
    short.begins(0.0, 1.0)
    short.ends(0.012, 1.012)
    assert short.excessive


def test_handicap_of_the_worker_is_not_held_against_it() -> None:
    slow = clocks(1.0, 1.5)
    assert not agreement(slow, 0.0, CALM, "cuda", CONTRACT).believable
    assert agreement(slow, 0.5, CALM, "cuda", CONTRACT).believable


def test_a_handicap_that_only_noise_explains_excuses_no_lie() -> None:
    lying = clocks(1.0, 9.0)
    told = agreement(lying, 8.0, CALM, "cpu", CONTRACT)
    assert not told.believable and told.undecided


def test_interval_holds_the_ratio_of_medians_and_is_reproducible() -> None:
    rng = random.Random(3)
    own = [1 + 0.05 * rng.random() for _ in range(50)]
    eager = [2 * x + 0.1 * rng.random() for x in own]
    low, high = speedup_interval(eager, own)
    assert low <= median(eager) / median(own) <= high
    assert (low, high) == speedup_interval(eager, own)
    assert high - low < 0.2


def test_pairing_cancels_a_drift_that_both_sides_share() -> None:
    drift = [1 + 0.5 * i / 50 for i in range(50)]
    assert speedup_interval([3 * d for d in drift], drift)[1] < 3.5
