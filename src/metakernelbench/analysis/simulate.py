"""Studies made by chance, with an effect that is known: to test the statistics, and to develop the report at full size.

The world simulated here: each problem has a difficulty, which decides how often attempts pass; a passing attempt has a
log-normal time; a skill multiplies the treatment's time by exp(−effect). Nothing here pretends to be a measurement: the
records say `simulated` for their device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from metakernelbench.analysis.metrics import FLOOR, Array, paired_ratio
from metakernelbench.analysis.resampling import Tracked
from metakernelbench.analysis.simulated_records import Drawn, simulated_record, simulated_rematch, skipped_record
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.errors import UserError
from metakernelbench.experiments.plan import Fingerprint, Freshness
from metakernelbench.experiments.planned import Material, Plan, PlannedAttempt, merged
from metakernelbench.experiments.registry import load_design
from metakernelbench.experiments.spec import EXPERIMENT_NAME_IS, ExperimentSpec
from metakernelbench.problems import catalog
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.rematches import Rematch
from metakernelbench.store.store import Store

family_of = catalog.family_of
"""Simulated studies are over problems of the catalogue."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What is true in a simulated study."""

    problems: int = 74
    models: int = 6
    dsls: tuple[str, ...] = ("cute", "tirx")
    replicates: int = 1
    designs: tuple[str, ...] = ("cross-dsl",)
    effect: float = 0.0
    """Mean of ln ρ where both arms pass and the skill is of the same problem; of any other, or of none, it is 0."""
    problem_effect: float = 0.0
    """Standard deviation of the effect between problems."""
    noise: float = 0.2
    """Standard deviation of the logarithm of a time between attempts at one variant."""
    fail: float = 0.3
    """Share of attempts that fail."""
    difficulty: float = 1.0
    """Standard deviation, in logits, of the failure rate between problems."""
    skip: float = 0.05
    """Share of solo attempts that keep no skill."""
    unfinished: float = 0.0
    """Share of attempts without a record."""
    violate: float = 0.1
    """Share of the failing attempts whose kernel was right and fast and broke a rule."""
    grading_noise: float = 0.01
    """Standard deviation of ln time between two gradings of one kernel."""
    rematched: float = 0.0
    """Share of the comparisons with two passing kernels that are timed head to head."""
    texts: bool = False
    """Whether records carry kernels, skills, submissions and trajectories of a realistic size."""


def simulate(world: World, seed: int) -> tuple[Plan, dict[str, AttemptRecord]]:
    """The plan of the world's designs over problems of the catalogue, and a record of each attempt that finished."""
    plan = _plan(world)
    return plan, {attempt.key: record for attempt, record, _ in _records(world, plan, seed)}


def _plan(world: World) -> Plan:
    models = [f"model-{chr(ord('a') + number)}" for number in range(world.models)]
    cells = (_some_problems(world.problems), world.dsls, models, world.replicates)
    return merged(load_design(name).plan(*cells, {}) for name in world.designs)


def _records(world: World, plan: Plan, seed: int) -> Iterator[tuple[PlannedAttempt, AttemptRecord, str | None]]:
    """Attempt, record and the digest of what the attempt was given, one after the other, because a full study with its
    texts fills memory."""
    rng = np.random.default_rng(seed)
    problems, models = (list(dict.fromkeys(getattr(a, name) for a in plan.attempts)) for name in ("problem", "model"))
    drawn = _Outcomes.draw(world, rng)
    skills: dict[str, str | None] = {}
    wanted = {(attempt.source, attempt.material) for attempt in plan.attempts if attempt.source}
    left: dict[tuple[str, Material], str | None] = {}
    for attempt in plan.attempts:
        if rng.random() < world.unfinished or (attempt.source and attempt.source not in skills):
            continue
        cell = (problems.index(attempt.problem), models.index(attempt.model), attempt.replicate)
        given = left[attempt.source, attempt.material] if attempt.source else None
        if attempt.source and given is None:
            record = skipped_record(attempt)
        else:
            skill = skills[attempt.source] if attempt.source else None
            reached = drawn.of(cell, world, attempt, rng)
            record = simulated_record(attempt, reached, long=world.texts, source_skill=skill, rng=rng)
        skills[attempt.key] = record.skill
        for material in _MATERIALS:
            if (attempt.key, material) in wanted:
                left[attempt.key, material] = _digest_of(record, material)
        yield attempt, record, given


_MATERIALS: tuple[Material, ...] = get_args(Material.__value__)


def _digest_of(record: AttemptRecord, material: Material) -> str | None:
    """The digest of what a later attempt may be given of this one; a trajectory, which is large, only where it is."""
    if material == "trajectory":
        text = None if record.trajectory is None else json.dumps(record.trajectory)
    else:
        text = record.skill if material == "skill" else record.kernel
    return None if text is None else digest_of(text)


def write_study(
    world: World,
    seed: int,
    store: Store,
    name: str,
    *,
    fingerprint: Fingerprint | None = None,
    saved: Callable[[int, int], None] | None = None,
) -> None:
    """Put a simulated study into a store as an experiment that has been run; `saved` is told (done, of how many).

    With `fingerprint`, attempts are kept under the task that they would have had today, so that `mkb status` takes them
    as finished. Raises `UserError` where `name` is no name.
    """
    plan = _plan(world)
    settings = {
        "name": name,
        "design": world.designs,
        "problems": tuple(_some_problems(world.problems)),
        "dsls": world.dsls,
        "models": tuple(dict.fromkeys(attempt.model for attempt in plan.attempts)),
        "replicates": world.replicates,
        "store": str(store.folder),
    }
    try:
        spec = ExperimentSpec.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"`{name}` is no name of an experiment", hint=EXPERIMENT_NAME_IS) from error
    store.save_experiment(spec, plan)
    freshness = None if fingerprint is None else Freshness(spec.attempt, fingerprint)
    kept: dict[str, AttemptRecord] = {}
    for done, (attempt, record, given) in enumerate(_records(world, plan, seed), 1):
        task = None if freshness is None else freshness.task(attempt)
        store.save_attempt(name, attempt, record, attached=given, task=task)
        kept[attempt.key] = record.model_copy(update={"submissions": (), "trajectory": None})  # all else is small
        if saved:
            saved(done, len(plan.attempts))
    for rematch in simulated_rematches(world, plan, kept, seed):
        store.rematches.save(name, rematch)


def simulated_rematches(world: World, plan: Plan, records: Mapping[str, AttemptRecord], seed: int) -> Iterator[Rematch]:
    """Head-to-head measurements of the share `rematched` of the comparisons of which both kernels passed: nearer to the
    truth than two gradings are."""
    rng = np.random.default_rng([seed, 1])
    for comparison in plan.comparisons:
        sides = [records.get(key) for key in (comparison.baseline, comparison.treatment)]
        times = [side.final.timing for side in sides if side and side.final and side.final.passed and side.final.timing]
        kernels = [side.kernel for side in sides if side and side.kernel is not None]
        if rng.random() >= world.rematched or len(times) < 2 or len(kernels) < 2:
            continue
        noise = float(np.exp(rng.normal(0, world.grading_noise)))
        ratio = times[0].implementation_median_ms / times[1].implementation_median_ms * noise
        yield simulated_rematch(comparison, ratio, (digest_of(kernels[0]), digest_of(kernels[1])))


def _some_problems(count: int) -> list[str]:
    """So many problems, evenly over the catalogue, so that few problems are of several families too."""
    known = catalog.problem_ids()
    if not 1 <= count <= len(known):
        raise UserError(f"{count} problems were asked for; the catalogue has {len(known)}", hint="ask for fewer")
    return [known[number * len(known) // count] for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class _Outcomes:
    """What every attempt of a study reaches; NaN where it fails. Axes: problem, model, replicate, (source,) target."""

    solo: Array
    conditioned: Array
    kept: npt.NDArray[np.bool_]
    """Whether the solo attempt kept a skill."""
    level: Array
    """Mean ln speedup of a variant. Axes: problem, DSL."""
    fails: Array
    """Chance of a problem's attempts to fail."""
    effect: Array
    """What a skill of the same problem adds to ln speedup."""

    @staticmethod
    def draw(world: World, rng: np.random.Generator) -> _Outcomes:
        dsls = len(world.dsls)
        cells = (world.problems, world.models, world.replicates, dsls)
        odds = world.fail / (1 - world.fail) * np.exp(rng.normal(0, world.difficulty, world.problems))
        fails = odds / (1 + odds)
        level = rng.normal(0.7, 0.6, (world.problems, dsls))
        effect = rng.normal(world.effect, world.problem_effect, world.problems)

        def attempts(mean: Array, shape: tuple[int, ...]) -> Array:
            speedup = np.exp(mean + rng.normal(0, world.noise, shape))
            failing = rng.random(shape) < fails.reshape(-1, *[1] * (len(shape) - 1))
            return np.where(failing, np.nan, speedup)

        return _Outcomes(
            solo=attempts(level[:, None, None, :], cells),
            conditioned=attempts((level + effect[:, None])[:, None, None, None, :], (*cells, dsls)),
            kept=rng.random(cells) >= world.skip,
            level=level,
            fails=fails,
            effect=effect,
        )

    def of(self, cell: tuple[int, int, int], world: World, attempt: PlannedAttempt, rng: np.random.Generator) -> Drawn:
        """What the attempt in this cell reached. Of those that fail, some do so only by a rule."""
        target = world.dsls.index(attempt.dsl)
        kept = True
        if attempt.label == "solo":
            speedup, kept = float(self.solo[*cell, target]), bool(self.kept[*cell, target])
        elif attempt.source and attempt.label in [f"from-{dsl}" for dsl in world.dsls]:
            speedup = float(self.conditioned[*cell, world.dsls.index(attempt.source.split("/")[1]), target])
        else:
            speedup = self._another(cell[0], target, world, attempt, rng)
        fails = bool(np.isnan(speedup))
        by_a_rule = fails and rng.random() < world.violate
        return Drawn(
            speedup=None if fails else speedup,
            broke_a_rule=float(np.exp(rng.normal(0.7, 0.6))) if by_a_rule else None,
            keeps_skill=kept,
            grading_noise=world.grading_noise,
        )

    def _another(
        self, problem: int, dsl: int, world: World, attempt: PlannedAttempt, rng: np.random.Generator
    ) -> float:
        """An attempt of another design: only what is of the same problem has an effect."""
        if rng.random() < self.fails[problem]:
            return float("nan")
        helps = attempt.source is not None and attempt.source.split("/")[0] == attempt.problem
        mean = self.level[problem, dsl] + (self.effect[problem] if helps else 0.0)
        return float(np.exp(rng.normal(mean, world.noise)))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The comparisons of a study as arrays of equal length, and their attempts."""

    problem: npt.NDArray[np.int64]
    direction: npt.NDArray[np.int64]
    """0, 1, ... in the order of the ordered pairs of DSLs."""
    rho: Array
    attempts: Tracked
    """With speedups, `FLOOR` where an attempt failed."""


def simulated_rows(world: World, seed: int) -> Rows:
    """The comparisons of the study that `simulate` would make, all finished, without its records."""
    drawn = _Outcomes.draw(world, np.random.default_rng(seed))
    source, target = np.nonzero(~np.eye(len(world.dsls), dtype=np.bool_))
    solo, skipped = drawn.solo[..., target], ~drawn.kept[..., source]
    conditioned = np.where(skipped, solo, drawn.conditioned[..., source, target])
    rho = paired_ratio(1 / solo, 1 / conditioned, skipped)
    problem = np.broadcast_to(np.arange(world.problems)[:, None, None, None], rho.shape)
    alone = np.arange(drawn.solo.size).reshape(drawn.solo.shape)  # the places of solo attempts; each has its own group
    treated = drawn.solo.size + np.arange(rho.size).reshape(rho.shape)
    speedup = np.concatenate([drawn.solo.ravel(), conditioned.ravel()])
    attempts = Tracked(
        speedup=np.maximum(np.nan_to_num(speedup, nan=FLOOR), FLOOR),
        group=np.concatenate([alone.ravel(), alone[..., target].ravel()]),
        source=alone[..., source].ravel(),
        solo=alone[..., target].ravel(),
        conditioned=np.where(skipped, alone[..., target], treated).ravel(),
    )
    return Rows(
        problem=problem.ravel(),
        direction=np.broadcast_to(np.arange(len(source)), rho.shape).ravel(),
        rho=rho.ravel(),
        attempts=attempts,
    )


def simulated_ratios(world: World, seed: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """(ρ, problem) of `simulated_rows`."""
    rows = simulated_rows(world, seed)
    return rows.rho, rows.problem
