from __future__ import annotations

from metakernelbench.grading.contention import Contention


def test_a_cpu_is_never_looked_at() -> None:
    contention = Contention("cpu")
    contention.look_alone()
    contention.look()
    assert not contention.alone_ms and not contention.between_ms and not contention.excessive


def test_waiting_for_a_slice_after_most_calls_is_excessive_and_a_hiccup_is_not() -> None:
    alone = [0.09, 0.1, 0.11]
    assert not Contention("cuda", alone, [0.1, 0.12, 0.3, 0.11, 40.0]).excessive
    assert not Contention("cuda", alone, [0.25, 0.25, 0.25]).excessive, "a slower clock is not another process"
    busy = Contention("cuda", alone, [2.1, 1.9, 0.1, 2.0])
    assert busy.excessive
    assert busy.told() == "A small kernel takes 1.95 ms after its calls, and 0.10 ms on an idle GPU"
