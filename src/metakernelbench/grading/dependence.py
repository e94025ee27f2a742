"""Do the outputs come from the DSL's kernels? Asked by intervention, in an untimed worker that nothing else uses.

It answers as many calls as the timed worker, each on a draw of its own, so that no memory holds the right answer from
before and a submission that counts calls finds no difference. Every call must launch. In calls that nobody can foresee,
among those that are timed in the other worker, the launches are left out, replaced by copies, or their results are
disturbed or replaced by those of the call before; if the outputs are valid all the same, the kernels are decoration. A
crash or a hang after such an intervention is as good an answer as wrong outputs: the kernels mattered.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metakernelbench.grading.buffers import Form
from metakernelbench.grading.calls import Budget, Link, Result, SubmissionFault
from metakernelbench.grading.codes import finding
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.draws import Draw, Draws
from metakernelbench.grading.transport import Transport
from metakernelbench.grading.verdict import Finding

_OBSERVED_CALLS = 2
_OBSERVE, _RECORD = "observe", "record"
_FOUND = {
    "suppress": ("not-dependent", "With every launch left out, the outputs are still right"),
    "perturb": ("not-dependent", "With the results of every launch disturbed, the outputs are still right"),
    "replay": (
        "not-dependent",
        "With the results of the call before in the place of every launch's, the outputs are right",
    ),
    "copy": ("laundering", "With every launch replaced by a copy of what it was given, the outputs are still right"),
}
_INTERVENTIONS = [["suppress"], ["copy"], [_RECORD, "replay"]] * 4
"""For a better median, whoever counts calls must do without its kernels in half of the timed ones; each of these has an
even chance to fall on one."""
_PATIENCE_FLOOR_S = 20.0
_PATIENCE_FACTOR = 20.0
_OBSERVATION_FACTOR = 2
"""How much longer an observed worker may take than one that is timed."""

type Opener = Callable[[Budget], tuple[Link, list[Any]]]
"""Starts an observed worker that has loaded the submission; gives its link and the actions seen while it loaded."""


@dataclass
class Dependence:
    """The check of one submission."""

    draws: Draws
    form: Form
    transport: Transport
    open_worker: Opener
    contract: Contract
    allowances: Sequence[float]
    """How far an output may be from the reference's before it is not even nearly right."""

    def findings(self) -> list[Finding]:
        """What is wrong; empty for a submission whose outputs depend on its kernels. Raises `SubmissionFault` where the
        submission fails in the observed pass as such."""
        link, events = self.open_worker(self._budget())
        started = time.monotonic()
        disturbed, answered, patience_s = False, set[str](), _PATIENCE_FLOOR_S
        for number, planned in enumerate(self._modes()):
            mode = _OBSERVE if planned in answered else planned
            if number == _OBSERVED_CALLS:
                patience_s = max(_PATIENCE_FLOOR_S, _PATIENCE_FACTOR * (time.monotonic() - started))
            disturbed = disturbed or mode in _FOUND
            if disturbed:
                link.patience_s = patience_s
            try:
                result, right = self._call(link, mode, compared=number < _OBSERVED_CALLS)
            except SubmissionFault:
                if not disturbed:
                    raise
                if not link.alive:  # the kernels mattered so much that the next intervention needs another worker
                    answered.add(mode)
                    link, disturbed = self._started_again(number), False
                continue
            events += result.events
            if mode not in _FOUND and result.launches == 0:
                reason = finding("library-kernel", f"`{result.foreign}`") if result.foreign else finding("no-launch")
                return [reason, *_forbidden_actions(events)]
            if mode in _FOUND and right:
                return [finding(*_FOUND[mode]), *_forbidden_actions(events)]
        return _forbidden_actions(events)

    def _modes(self) -> list[str]:
        """What is done to each call: interventions among those that are timed in the other worker. Disturbed results
        come last, because they may leave their marks in the worker."""
        contract = self.contract
        ordinary = contract.timed_calls - sum(map(len, _INTERVENTIONS))
        timed = [*_INTERVENTIONS, *([_OBSERVE] for _ in range(ordinary))]
        secrets.SystemRandom().shuffle(timed)
        before = contract.correctness_draws + contract.warmup_calls
        return [*[_OBSERVE] * before, *(mode for modes in timed for mode in modes), "perturb"]

    def _call(self, link: Link, mode: str, *, compared: bool) -> tuple[Result, bool]:
        """One call, and whether its outputs are right although its launches were interfered with. Of calls without
        intervention only those to be `compared` are looked at."""
        draw = self.draws.next()
        result = link.call(self.transport, draw.inputs, self.form, mode)
        if mode in _FOUND:
            return result, result.altered > 0 and self._is_right(draw, result)
        if compared and not (draw.nearly(result.outputs, self.allowances) or self._passes(draw, result)):
            raise SubmissionFault(
                finding("wrong-output", "In the pass that observes launches"), draw.compare(result.outputs)
            )
        return result, True

    def _is_right(self, draw: Draw, result: Result) -> bool:
        """Whether the contract accepts the outputs; the anchor is computed only where they are nearly right."""
        outputs = result.outputs
        return (
            not draw.far_off(outputs, self.allowances)
            and draw.nearly(outputs, self.allowances)
            and self._passes(draw, result)
        )

    def _passes(self, draw: Draw, result: Result) -> bool:
        return all(comparison.passed for comparison in draw.compare(result.outputs))

    def _started_again(self, number: int) -> Link:
        """Another worker, as far as the one before it came."""
        link, _ = self.open_worker(self._budget())
        for _ in range(number):
            self._call(link, _OBSERVE, compared=False)
        return link

    def _budget(self) -> Budget:
        return Budget(_OBSERVATION_FACTOR * self.contract.time_limit_s)


def _forbidden_actions(events: list[Any]) -> list[Finding]:
    """Findings for the actions that the observed worker reports, whatever else these reports may be."""
    found: dict[tuple[str, int], Finding] = {}
    for event in events:
        detail, line = (event.get("detail"), event.get("line")) if isinstance(event, dict) else (None, None)
        if isinstance(detail, str) and type(line) is int and 0 < line < 10**6:
            found.setdefault((detail, line), finding("forbidden-action", f"kernel.py {detail[:200]}", line))
    return list(found.values())
