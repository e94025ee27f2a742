"""What a study can and cannot show, said exactly where it holds."""

from __future__ import annotations

import pytest

from metakernelbench.analysis.caveats import caveats
from metakernelbench.analysis.frames import Frames, frames_of
from metakernelbench.analysis.simulate import World, simulate
from metakernelbench.experiments.planned import Plan


def named(world: World) -> set[str]:
    return {caveat.name for caveat in caveats(frames_of(*simulate(world, 1)))}


PLAIN = World(problems=12, models=1, replicates=2, designs=("cross-dsl", "retry"), skip=0.0, violate=0.0)


def test_a_study_with_replicates_and_retries_knows_its_null():
    assert named(PLAIN) == {"null"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"replicates": 1}, "one_attempt_per_cell"),
        ({"designs": ("cross-dsl",)}, "no_null"),
        ({"problems": 3}, "few_problems"),
        ({"unfinished": 0.3}, "unjudged"),
        ({"skip": 0.5}, "skipped"),
        ({"violate": 1.0}, "rules"),
        ({"texts": True, "grading_noise": 0.2}, "band_below_noise"),
    ],
)
def test_each_caveat_is_there_where_it_holds(changes, name):
    world = World(**(vars(PLAIN) | changes))
    assert name in named(world)
    assert name not in named(PLAIN)


def test_what_retries_did_is_what_is_said():
    study = frames_of(*simulate(PLAIN, 1))
    retries = study.asking("retry").comparisons
    [null] = [caveat.text for caveat in caveats(study) if caveat.name == "null"]
    helped = 100 * (retries["rho"] > 1.05).mean()
    assert f"{helped:.1f}\u00a0% came out as helped" in null


def test_nothing_is_said_of_nothing():
    empty: Frames = frames_of(Plan(attempts=(), comparisons=()), {})
    assert caveats(empty) == ()
