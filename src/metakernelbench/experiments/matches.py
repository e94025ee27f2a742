"""How the rematches of an experiment stand: every pair of kernels that its plan compares, against what is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from metakernelbench.experiments.planned import Plan, PlannedAttempt
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.store.rematches import Rematch, lease_key
from metakernelbench.store.store import Standing, Store


class State(StrEnum):
    """How the rematch of a comparison stands."""

    KEPT = "kept"
    """Measured, for the kernels that the two attempts have now."""
    MISSING = "missing"
    STALE = "stale"
    """Measured, but a kernel or the contract has changed since."""
    UNTIMED = "untimed"
    """Nothing to measure: one of the two did not pass, or was not run."""
    WAITING = "waiting"
    """One of the two attempts is not finished yet."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One comparison's pair of kernels, and how its rematch stands."""

    baseline: PlannedAttempt
    treatment: PlannedAttempt
    kernels: tuple[str | None, str | None]
    """Digests of the two, as they are now."""
    state: State
    reason: str | None = None

    @property
    def key(self) -> str:
        """Under what it is lent to one runner at a time."""
        return lease_key(self.baseline.key, self.treatment.key)


def matches_of(plan: Plan, store: Store, experiment: str) -> list[Match]:
    """Every pair that the plan compares, each once, in the plan's order."""
    attempts = {attempt.key: attempt for attempt in plan.attempts}
    standings = store.standings(experiment)
    pairs = dict.fromkeys((comparison.baseline, comparison.treatment) for comparison in plan.comparisons)
    kernels = store.digests(experiment, "kernel", {key for pair in pairs for key in pair})
    known = store.rematches.of(experiment)
    return [match_of(attempts[a], attempts[b], standings, kernels, known.get((a, b))) for a, b in pairs]


def match_of(
    baseline: PlannedAttempt,
    treatment: PlannedAttempt,
    standings: dict[str, Standing],
    kernels: dict[str, str | None],
    known: Rematch | None,
) -> Match:
    both = (kernels.get(baseline.key), kernels.get(treatment.key))
    state, reason = _standing([baseline, treatment], standings)
    if state is State.MISSING and known is not None:
        if (known.baseline_sha256, known.treatment_sha256) != both:
            state, reason = State.STALE, "a kernel has changed"
        elif known.contract_version != CONTRACT_VERSION:
            state, reason = State.STALE, f"timed under contract {known.contract_version}, now {CONTRACT_VERSION}"
        else:
            state = State.KEPT
    return Match(baseline=baseline, treatment=treatment, kernels=both, state=state, reason=reason)


def _standing(pair: Iterable[PlannedAttempt], standings: dict[str, Standing]) -> tuple[State, str | None]:
    """`MISSING` where both kernels passed; else what keeps them from being timed."""
    untimed = None
    for attempt in pair:
        standing = standings.get(attempt.key)
        if standing is None:
            return State.WAITING, f"{attempt.key} is not finished"
        if not standing.passed:
            untimed = untimed or f"{attempt.key} {'was not run' if standing.ended == 'skipped' else 'did not pass'}"
    return (State.MISSING, None) if untimed is None else (State.UNTIMED, untimed)


def counts(matches: Iterable[Match]) -> Counter[State]:
    """How many stand how."""
    return Counter(match.state for match in matches)
