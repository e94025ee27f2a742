"""Which buffers carry a call."""

from __future__ import annotations

from collections import Counter

from metakernelbench.grading.transport import choose_buffers


def test_the_first_buffers_carry_most_calls_and_the_others_some() -> None:
    counts = Counter(choose_buffers([0, 1]) for _ in range(4000))
    assert 350 < counts[1] < 650
    assert counts[0] + counts[1] == 4000


def test_buffers_that_are_still_looked_at_are_not_chosen() -> None:
    assert {choose_buffers([1]) for _ in range(100)} == {1}
