"""Every table there is: its name, what it shows, and how it is made. What lists tables, lists these."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import polars as pl

from metakernelbench.analysis import outcome, robustness, standing
from metakernelbench.analysis.frames import Frames
from metakernelbench.analysis.noise import noise
from metakernelbench.analysis.tables import Table
from metakernelbench.analysis.usage import usage
from metakernelbench.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class TableKind:
    """One table that any study has."""

    name: str
    shows: str
    """One sentence."""
    make: Callable[[Frames], Table]
    main: bool = False
    """Whether everybody reads it; the others say when, why and how surely."""
    where: Callable[[Frames], bool] = lambda study: True  # noqa: ARG005
    """Whether a study has anything for it to show."""


def _lift(*by: str) -> Callable[[Frames], Table]:
    return lambda study: outcome.lift(study.main, by, study.band)


def _several_models(study: Frames) -> bool:
    return study.attempts["model"].n_unique() > 1


def _retries(study: Frames) -> pl.DataFrame:
    return study.comparisons.filter(pl.col("design") == "retry")


_ALL = (
    TableKind(
        name="solo",
        shows="Pass rate P, geometric mean speedup GM and R(2) of attempts alone, by model and DSL.",
        make=lambda study: outcome.solo(study.attempts),
        main=True,
    ),
    TableKind(
        name="lift_by_direction",
        shows="Paired lift ΔGM, help rate T and harm rate H over all and by direction.",
        make=_lift("direction"),
        main=True,
    ),
    TableKind(name="lift_by_family", shows="The same by family of problems.", make=_lift("family"), main=True),
    TableKind(name="lift_by_model", shows="The same by model.", make=_lift("model"), main=True, where=_several_models),
    TableKind(
        name="questions",
        shows="The same for every design and arm of the experiment, so that a lift stands beside its controls.",
        make=lambda study: outcome.questions(study.comparisons, study.band),
        main=True,
        where=lambda study: len(study.contrasts) > 1,
    ),
    TableKind(
        name="lift_by_model_and_direction",
        shows="The same by model and direction.",
        make=_lift("model", "direction"),
        where=_several_models,
    ),
    TableKind(
        name="lift_by_family_and_direction",
        shows="The same by family and direction.",
        make=_lift("family", "direction"),
    ),
    TableKind(
        name="lift_by_model_and_family",
        shows="The same by model and family.",
        make=_lift("model", "family"),
        where=_several_models,
    ),
    TableKind(
        name="leave_best_family_out",
        shows="The lift without the family that gains most, over all and by direction.",
        make=lambda study: outcome.leave_best_family_out(study.main, study.band),
    ),
    TableKind(
        name="verdict_changes",
        shows="How many of the helped and the harmed changed their verdict rather than their time.",
        make=lambda study: outcome.verdict_changes(study.main, study.band),
    ),
    TableKind(
        name="reverse_directions",
        shows="Rank correlation of the two directions' ratios per model and problem, against random signs.",
        make=lambda study: standing.reverse_directions(study.main),
    ),
    TableKind(
        name="help_against_help",
        shows="What one direction did against what the other did to the same problem and model.",
        make=lambda study: standing.help_against_help(study.main, study.band),
    ),
    TableKind(
        name="standing",
        shows="Lift where the source stood below, at or above the baseline's tier, pooled and by model.",
        make=lambda study: standing.standing(study.main, study.band),
    ),
    TableKind(
        name="tier_pairs",
        shows="Lift for each tier of the solo attempt and each tier of the source.",
        make=lambda study: standing.tier_pairs(study.main, study.band),
    ),
    TableKind(
        name="tracking",
        shows="Whether treatments follow their source's speedup more than solo attempts do, against swapped arms.",
        make=lambda study: standing.tracking(study.main),
    ),
    TableKind(
        name="source_verdicts",
        shows="Pass rates of baseline and treatment given whether the source passed.",
        make=lambda study: standing.source_verdicts(study.main),
    ),
    TableKind(
        name="bands",
        shows="T, neutral and H at several indifference bands, beside those of retries where there are any.",
        make=lambda study: outcome.bands(study.main, _retries(study)),
    ),
    TableKind(
        name="noise",
        shows="How far apart two measurements of one thing lie, and the band that this supports.",
        make=noise,
    ),
    TableKind(
        name="ratios_both_ways",
        shows="The lift with ratios measured head to head, and with ratios of two medians.",
        make=robustness.ratios_both_ways,
        where=lambda study: study.measured > 0,
    ),
    TableKind(
        name="ratio_changes",
        shows="Which comparisons read differently when they are measured head to head.",
        make=robustness.ratio_changes,
        where=lambda study: study.measured > 0,
    ),
    TableKind(
        name="rules",
        shows="The outcome with each rule's violations counted as failures and as passes.",
        make=robustness.rules,
    ),
    TableKind(
        name="rule_changes",
        shows="Every comparison that reads differently once violations count as passes.",
        make=robustness.rule_changes,
        where=lambda study: bool(study.violations),
    ),
    TableKind(
        name="usage",
        shows="What attempts used and what they cost, by model and arm.",
        make=lambda study: usage(study.attempts),
    ),
)
TABLES = {kind.name: kind for kind in _ALL}


def tables(study: Frames, *, main: bool | None = None) -> list[Table]:
    """Every table that has something to show of a study; with `main`, only those that everybody reads, or the rest.

    Two are made at a time: nearly all of their time is spent in array operations, which leave the interpreter free.
    """
    kinds = [kind for kind in _ALL if main in (None, kind.main) and kind.where(study)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda kind: kind.make(study), kinds))


def table(study: Frames, name: str) -> Table:
    """One table by name. Raises `UnknownName`."""
    if name not in TABLES:
        raise UnknownName("table", name, TABLES, hint="`mkb tables --list` says what each shows")
    return TABLES[name].make(study)
