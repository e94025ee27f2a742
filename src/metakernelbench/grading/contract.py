"""The grading contract's numbers. Stated here and nowhere else: docs, prompts and reports render from `CONTRACT`."""

from dataclasses import dataclass

CONTRACT_VERSION = 1
"""Raised whenever a change here or in the verifier can move a verdict; attempts graded under another one are stale."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What an implementation is held to. The defaults are the benchmark's."""

    correctness_draws: int = 5
    """Draws that are compared with the reference and its float64 anchor before anything is timed."""
    warmup_calls: int = 10
    """Calls like the timed ones that come before them; their outputs are compared and their times are not kept."""
    timed_calls: int = 50
    """Timed calls, each on fresh inputs; the medians are taken over them."""
    rechecked_calls: int = 3
    """Timed calls, chosen unpredictably, whose outputs are held to the float64 anchor as well."""
    tolerance_factor: float = 3.0
    """The allowance is this factor times max(reference's own error, epsilon of the output dtype · max|anchor|)."""
    time_limit_s: float = 600.0
    """Shared by import, correctness, warm-up, timing and rechecks; the eager side does not count towards it."""
    clock_tolerance: float = 0.10
    """A worker's time may fall short of the verifier's, less the cost of carrying the tensors, by this share of itself
    or by the floor below, whichever is larger, and by the noise that the verifier measures."""
    clock_floor_ms: float = 0.02
    """The floor on a GPU."""
    clock_floor_cpu_ms: float = 0.2
    """The floor on a CPU, which verifier, worker and everything else share."""
    timing_tries: int = 5
    """How often the timed calls are measured before clocks that do not agree count against a submission."""
    max_source_bytes: int = 300_000
    """The largest kernel.py that is read."""


CONTRACT = Contract()
