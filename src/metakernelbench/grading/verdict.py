"""What the verifier says of one implementation, as plain dataclasses that travel as JSON.

Standard library only: a GPU machine that grades needs torch, the DSLs and nothing more.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

VERDICT_VERSION = 1


class Stage(StrEnum):
    """The stages of a grading, in order. A verdict that did not pass names the one that ended it."""

    SOURCE = "source"
    """kernel.py is read: present, UTF-8, not too large, parsable, defines `solve`."""
    RULES = "rules"
    """Static rules on the source."""
    IMPORT = "import"
    """The worker imports kernel.py."""
    CORRECTNESS = "correctness"
    """The correctness draws."""
    DEPENDENCE = "dependence"
    """Every call launches a kernel of the DSL, and the outputs depend on it."""
    TIMING = "timing"
    """Warm-up and timed calls, with every timed output compared."""
    RECHECK = "recheck"
    """Some timed outputs held to the float64 anchor."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with an implementation."""

    code: str
    """Stable name, such as `forbidden-import`; the full list with its sentences is in `grading/codes.py`."""
    message: str
    """What was found and what to change, in a sentence or two."""
    line: int | None = None
    """1-based line of kernel.py, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output tensor of one draw against the reference and the anchor."""

    output: str
    """Name of the output."""
    error: float | None
    """Largest |submission − anchor| over the finite part; None for integer outputs."""
    allowance: float | None
    """The largest error allowed; None for integer outputs."""
    mismatches: int
    """Elements outside the allowance (or unequal, for integer outputs)."""
    elements: int
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The measured times. All in milliseconds, in the order of the timed draws."""

    implementation_ms: tuple[float, ...]
    eager_ms: tuple[float, ...]
    vectorized_ms: tuple[float, ...] = ()
    """Of the problem's `vectorized` form, where it has one and the grading was final."""
    implementation_median_ms: float
    eager_median_ms: float
    vectorized_median_ms: float | None = None
    speedup: float
    """Eager median over implementation median."""
    speedup_interval: tuple[float, float] | None = None
    """95 % interval of the speedup, from the pairing of the draws."""
    roofline_fraction: float | None = None
    """Roofline bound over implementation median, on a GPU whose peaks are known."""


@dataclass(frozen=True, kw_only=True)
class ClockCheck:
    """How a worker's clock fitted the verifier's in one try of the timed calls. All in milliseconds a call."""

    hidden_ms: float
    """What the verifier's clock saw beyond the worker's, less the cost of carrying the tensors."""
    allowed_ms: float
    """What the contract allows."""
    noise_ms: float
    """What the noise of the machine adds to that."""
    waited: float
    """The share of its time for which the reference waited for a processor."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What separated the worker from the verifier during this grading."""

    method: str
    """`bubblewrap` or `process`; `none` where the grading ended before anything was run."""
    notes: tuple[str, ...] = ()
    """What is weaker than it could be, one sentence each; empty for full isolation."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one implementation of one variant."""

    problem: str
    dsl: str
    workload: str
    device: str
    """`cpu`, or the GPU's name."""
    passed: bool
    ended_at: Stage | None = None
    """The stage that ended the grading; None exactly when passed."""
    findings: tuple[Finding, ...] = ()
    """What was wrong; empty exactly when passed. The first is the reason of the verdict."""
    comparisons: tuple[Comparison, ...] = ()
    """The outputs of the draw that failed, or the tightest of the draws where all passed."""
    draws_passed: int = 0
    """Correctness draws passed."""
    timing: Timing | None = None
    """Present when passed, and in a final grading also beside a rule violation, where timing was reached."""
    clocks: tuple[ClockCheck, ...] = ()
    """One for every try of the timed calls that came to its end; all but the last were given up."""
    final: bool = False
    """A final grading measures on after a rule violation; a feedback grading ends at the first fault."""
    isolation: Isolation
    source_sha256: str | None = None
    contract_version: int
    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Versions of Python, torch, the DSL's packages and the driver."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Wall clock by phase of the grading."""
    submission_output: str = ""
    """The last few kilobytes that the submission printed, control characters removed."""
    version: int = VERDICT_VERSION

    def __post_init__(self) -> None:
        if self.passed != (self.ended_at is None) or self.passed != (not self.findings):
            raise ValueError(f"passed={self.passed} with ended_at={self.ended_at} and {len(self.findings)} findings")
        if self.passed and self.timing is None:
            raise ValueError("a passed verdict carries its timing")

    @property
    def code(self) -> str | None:
        """The stable code of the first finding; None when passed."""
        return self.findings[0].code if self.findings else None

    @property
    def speedup(self) -> float | None:
        """Eager median over implementation median; None unless passed."""
        return self.timing.speedup if self.passed and self.timing else None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Verdict:
        """The inverse of `dataclasses.asdict`. Raises `ValueError` for a verdict written by a newer version."""
        if data.get("version", 0) > VERDICT_VERSION:
            raise ValueError(f"verdict version {data['version']} is newer than this program's {VERDICT_VERSION}")
        fields = dict(data)
        fields["ended_at"] = Stage(data["ended_at"]) if data["ended_at"] else None
        fields["findings"] = tuple(Finding(**f) for f in data["findings"])
        fields["comparisons"] = tuple(Comparison(**c) for c in data["comparisons"])
        fields["clocks"] = tuple(ClockCheck(**c) for c in data.get("clocks", ()))
        fields["isolation"] = Isolation(method=data["isolation"]["method"], notes=tuple(data["isolation"]["notes"]))
        if timing := data["timing"]:
            lists = ("implementation_ms", "eager_ms", "vectorized_ms", "speedup_interval")
            numbers: dict[str, Any] = {k: tuple(v) if k in lists and v is not None else v for k, v in timing.items()}
            fields["timing"] = Timing(**numbers)
        return Verdict(**fields)

    @staticmethod
    def from_json(text: str) -> Verdict:
        return Verdict.from_dict(json.loads(text))
