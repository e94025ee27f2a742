"""What a study can and what it cannot show, as sentences with a name: a report, a terminal and a paper say the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from metakernelbench.analysis.frames import Frames
from metakernelbench.analysis.metrics import lift_metrics, value
from metakernelbench.analysis.noise import regradings, repeated_gradings, supported_band
from metakernelbench.analysis.outcome import judged
from metakernelbench.analysis.resampling import MIN_PROBLEMS
from metakernelbench.analysis.tables import number
from metakernelbench.grading.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Caveat:
    """Something that a reader must know."""

    name: str
    """Stable, for programs."""
    text: str
    """One to four sentences."""


def caveats(study: Frames, gradings: Iterable[Verdict] = ()) -> tuple[Caveat, ...]:
    """What holds for this study, the most important first. `gradings` are further verdicts, some of them of one
    kernel."""
    return (*_of_design(study), *_of_extent(study), *_of_noise(study, gradings), *_of_measurement(study))


ONE_ATTEMPT = (
    "There is one attempt per cell. That can show whether, over many problems, attempts with a skill do better or "
    "worse than attempts without, because the luck of single attempts averages out. It cannot show whether the skill "
    "helped in one comparison, where luck and skill are one number: read groups, not rows."
)
NO_NULL = (
    "No attempt was repeated without a skill (the design `retry`), so the help and harm that chance alone brings are "
    "not known: T and H say how often the two arms differ, not how often a skill was the reason. ΔGM has no such floor."
)


def _of_design(study: Frames) -> Iterator[Caveat]:
    cells = study.attempts.group_by("problem", "dsl", "model", "label").len()
    if cells.height and cells["len"].max() == 1:
        yield Caveat(name="one_attempt_per_cell", text=ONE_ATTEMPT)
    if not judged(study.comparisons).height:
        return
    retries = judged(study.comparisons.filter(pl.col("design") == "retry"))
    if not retries.height:
        yield Caveat(name="no_null", text=NO_NULL)
        return
    rho = retries["rho"].to_numpy()
    _, helped, _, harmed = (value(metric, rho) for metric in lift_metrics(study.band))
    yield Caveat(
        name="null",
        text=f"Of {retries.height:,} second attempts that were given nothing, {number(helped, 'share')} came out as "
        f"helped and {number(harmed, 'share')} as harmed: that much of T and H is chance.",
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _of_extent(study: Frames) -> Iterator[Caveat]:
    main = study.main
    rated = judged(main)
    problems = rated["problem"].n_unique()
    if rated.height and problems < MIN_PROBLEMS:
        few = f"With {_count(problems, 'problem')} there are no intervals (that takes {MIN_PROBLEMS})"
        yield Caveat(name="few_problems", text=f"{few}: the numbers describe these comparisons only.")
    if unjudged := main.height - rated.height:
        text = f"{unjudged:,} of {main.height:,} comparisons are not finished; they are in no mean and no denominator."
        yield Caveat(name="unjudged", text=text)
    if skipped := int((main["change"] == "skipped").sum()):
        without = _count(skipped, "treatment")
        text = f"{without} had no skill to be given; each inherits its baseline and counts as ratio 1."
        yield Caveat(name="skipped", text=text)


def _of_noise(study: Frames, gradings: Iterable[Verdict]) -> Iterator[Caveat]:
    differences = np.concatenate([regradings(study.attempts, study.submissions), repeated_gradings(gradings)])
    band = supported_band(differences)
    if band is not None and band > study.band:
        yield Caveat(
            name="band_below_noise",
            text=f"Two gradings of one kernel differ by up to {number(band, 'share')} in 95 % of cases, more than the "
            f"indifference band of {number(study.band, 'share')}: some of T and H is the noise of measuring.",
        )


def _of_measurement(study: Frames) -> Iterator[Caveat]:
    passing = judged(study.main).filter(pl.col("change") == "both pass")
    if study.measured and study.measured < passing.height:
        yield Caveat(
            name="ratios_mixed",
            text=f"{study.measured:,} of {passing.height:,} ratios of times were measured head to head; the others "
            "come from two gradings. The tables show the outcome both ways.",
        )
    freed = int(study.attempts["violations"].count())
    if freed:
        yield Caveat(
            name="rules",
            text=f"{_count(freed, 'attempt')} failed by a rule alone, with a kernel that was right and timed. That "
            "counts as a failure; the table of rules shows the outcome with such attempts as passes.",
        )
    for column, what in (("device", "devices"), ("workload", "workloads")):
        kinds = sorted(study.attempts[column].drop_nulls().unique())
        if len(kinds) > 1:
            text = f"Attempts were graded on different {what} ({', '.join(kinds)}), whose times do not compare."
            yield Caveat(name=f"several_{what}", text=text)
