"""What a report is made from: an experiment's plan, the records of its attempts, and the frames computed from both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from metakernelbench.analysis.frames import Frames, frames_of
from metakernelbench.analysis.metrics import BAND
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.attempts.settings import SCRIPTED
from metakernelbench.experiments.designs import Plan, PlannedAttempt
from metakernelbench.problems import catalog
from metakernelbench.report.trajectory import count_turns

if TYPE_CHECKING:
    from metakernelbench.annotation.results import Results
    from metakernelbench.store.rematches import Rematch
    from metakernelbench.store.store import Store, StoredExperiment


@dataclass(frozen=True, kw_only=True)
class Running:
    """An attempt that is going on."""

    trajectory: dict[str, Any] | None = None
    """The agent's own, so far as it is on the disk."""

    @cached_property
    def turns(self) -> int:
        """How many turns the agent has had."""
        return count_turns(self.trajectory)

    @property
    def sentence(self) -> str:
        return f"running, {self.turns} turn{'' if self.turns == 1 else 's'} so far"


@dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment as it stands."""

    name: str
    plan: Plan
    records: Mapping[str, AttemptRecord]
    design: str = "cross-dsl"
    band: float = BAND
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """What else the reader should know of how it was run, as name and value."""
    rematches: tuple[Rematch, ...] = ()
    """Comparisons whose kernels were timed head to head."""
    annotations: Results | None = None
    """What skills contain and how they were used, where somebody has annotated that."""
    max_submissions: int = 10
    """Counted submissions that an attempt may make."""
    faults: int = 0
    """Tries that failed for a reason of ours; they count nowhere else."""
    running: Mapping[str, Running] = field(default_factory=dict[str, "Running"])
    """Key → what is known of an attempt that a runner is at."""
    family_of: Callable[[str], str] = catalog.family_of
    subject_of: Callable[[str], str] = catalog.subject_of

    @cached_property
    def frames(self) -> Frames:
        return frames_of(
            self.plan,
            self.records,
            name=self.name,
            rematches=self.rematches,
            band=self.band,
            family_of=self.family_of,
        )

    @property
    def attempts(self) -> pl.DataFrame:
        return self.frames.attempts

    @property
    def comparisons(self) -> pl.DataFrame:
        """The comparisons of every question that the study asks."""
        return self.frames.comparisons

    @property
    def main(self) -> pl.DataFrame:
        """The comparisons of the main question, which the overview is about."""
        return self.frames.main

    @cached_property
    def models(self) -> list[str]:
        return sorted({attempt.model for attempt in self.plan.attempts})

    @cached_property
    def directions(self) -> list[str]:
        return sorted(self.main["direction"].unique())

    @cached_property
    def replicates(self) -> int:
        """Attempts of one kind per cell."""
        return len({attempt.replicate for attempt in self.plan.attempts})

    @cached_property
    def violations(self) -> dict[str, tuple[str, float]]:
        """Key → the rules that alone stand between a right and timed kernel and a pass, and its time in ms."""
        broken = self.attempts.filter(pl.col("violations").is_not_null())
        return {key: (codes, ms) for key, codes, ms in broken.select("key", "violations", "timed_ms").iter_rows()}

    @cached_property
    def planned(self) -> dict[str, PlannedAttempt]:
        """Key → planned attempt."""
        return {attempt.key: attempt for attempt in self.plan.attempts}

    def rehearsal(self) -> list[str]:
        """Why this is a rehearsal and not a result, one clause each; empty for a study that may claim something."""
        verdicts = [record.final for record in self.records.values() if record.final]
        models = {attempt.model for attempt in self.plan.attempts}
        reasons = {
            "a script of prepared turns stood in for the model": any(model.startswith(SCRIPTED) for model in models),
            "kernels were graded on a CPU": any(verdict.device == "cpu" for verdict in verdicts),
            "the workload was the small one": any(verdict.workload == "smoke" for verdict in verdicts),
            "the records are simulated": any(verdict.device == "simulated" for verdict in verdicts),
        }
        return [reason for reason, holds in reasons.items() if holds]


def study_from_store(store: Store, name: str) -> Study:
    """The experiment `name` of a store. Raises `UnknownName`."""
    study = study_of(
        store.experiment(name),
        dict(store.attempts(name)),
        rematches=store.rematches.of(name).values(),
        faults=len(store.faults(name)),
    )
    return replace(study, annotations=annotations_of(study, store))


def annotations_of(study: Study, store: Store) -> Results:
    """What annotators have said of the study's skills and attempts."""
    from metakernelbench.analysis.annotations import harmed_treatments
    from metakernelbench.annotation.results import results_of
    from metakernelbench.annotation.subjects import Subjects

    subjects = Subjects(
        plan=study.plan,
        records=study.records,
        harmed=harmed_treatments(study.plan, study.comparisons, study.band),
        max_submissions=study.max_submissions,
    )
    return results_of(subjects, store.annotations)


def study_of(
    experiment: StoredExperiment,
    records: Mapping[str, AttemptRecord],
    *,
    rematches: Iterable[Rematch] = (),
    faults: int = 0,
    running: Mapping[str, Running] | None = None,
) -> Study:
    """An experiment with what has been read of it."""
    spec, attempt = experiment.spec, experiment.spec.attempt
    return Study(
        name=experiment.name,
        plan=experiment.plan,
        records=records,
        design=", ".join(spec.design),
        band=spec.indifference_band,
        max_submissions=attempt.max_submissions,
        settings={
            "agent": attempt.agent,
            "sandbox": attempt.sandbox,
            "budget": f"{attempt.budget_s / 60:g} minutes, {attempt.max_submissions} counted submissions",
            "resources": f"{attempt.cpus} cores, {attempt.memory_mb / 1024:g} GB of memory",
            "workload": f"{attempt.workload} on {attempt.device}",
            "last run": experiment.updated_at,
        },
        rematches=tuple(rematches),
        faults=faults,
        running=running or {},
    )
