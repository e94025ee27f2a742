"""What may start next: in the plan's order, within a model's bound, and not while its provider is left alone."""

from __future__ import annotations

from dataclasses import dataclass

from metakernelbench.experiments.queue import Pauses, Queue

MODELS = ["a", "a", "b", "a", "b"]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def queue(most: int | None = None, pauses: Pauses | None = None) -> Queue:
    made = Queue(MODELS, most, pauses or Pauses())
    for place in (3, 1, 4, 0, 2):
        made.add(place)
    return made


def test_without_a_bound_attempts_start_in_the_order_of_the_plan() -> None:
    taken = queue()
    assert [taken.take() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert not taken


def test_a_model_at_its_bound_lets_others_pass_and_goes_on_when_one_has_ended() -> None:
    taken = queue(most=1)
    assert [taken.take(), taken.take(), taken.take()] == [0, 2, None]
    assert taken.pause is None, "one has to end first"
    taken.give_back(0)
    assert [taken.take(), taken.take()] == [1, None]


def test_a_model_that_is_left_alone_lets_others_pass_until_the_pause_is_over() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    taken = queue(pauses=pauses)
    pauses.begin("a")
    assert [taken.take(), taken.take(), taken.take()] == [2, 4, None]
    assert taken.pause is not None
    assert 30 <= taken.pause <= 45
    clock.now += taken.pause
    assert (taken.pause, taken.take()) == (0.0, 0)


def test_pauses_grow_with_every_refusal_in_a_row_up_to_a_bound_and_end_with_a_success() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    lengths = []
    for _ in range(8):
        pauses.begin("a")
        first = pauses.left("a")
        pauses.begin("a")
        assert pauses.left("a") == first, "attempts that are refused together count once"
        lengths.append(first)
        clock.now += first
    expected = zip((30, 60, 120, 240, 480, 600), lengths, strict=False)
    assert all(base <= length <= 1.5 * base for base, length in expected)
    assert max(lengths) <= 900
    pauses.begin("a")
    pauses.end("a")
    assert pauses.left("a") == 0
    pauses.begin("a")
    assert pauses.left("a") <= 45
