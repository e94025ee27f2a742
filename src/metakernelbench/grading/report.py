"""A verdict as text: for an agent that has to act on it, and for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from metakernelbench.grading.head_to_head import HeadToHead, Pair
from metakernelbench.grading.profile import MANDATED, STARTS, WAITING, Profile
from metakernelbench.grading.verdict import Comparison, Timing, Verdict

_SHOWN_OUTPUT = 1500


def render(verdict: Verdict, *, for_feedback: bool = True) -> str:
    """The report of one verdict. `for_feedback` leaves out what an agent has no use for: versions, isolation,
    phases."""
    lines = [headline(verdict), *_findings(verdict), *_correctness(verdict)]
    if verdict.timing is not None:
        lines += _timing(verdict.timing, verdict.device)
    if verdict.submission_output.strip():
        lines += ["", "kernel.py printed (the end of it):", _indented(verdict.submission_output[-_SHOWN_OUTPUT:])]
    if not for_feedback:
        lines += _circumstances(verdict)
    return "\n".join(lines) + "\n"


def render_head_to_head(result: HeadToHead, names: Sequence[str]) -> str:
    """The report of a head to head: what each implementation is, called by its name, and each pair's ratio."""
    blocks = []
    for number, (name, verdict) in enumerate(zip(names, result.verdicts, strict=True), 1):
        report = render(verdict) if not verdict.passed else "\n".join([headline(verdict), *_own_time(verdict)]) + "\n"
        blocks.append(f"({number}) {name}\n{report}")
    lines = [_pair_line(pair) for pair in result.pairs]
    if lines:
        blocks.append("\n".join(["Runtimes, each draw run by all one right after the other:", *lines]) + "\n")
    else:
        blocks.append("No two were timed to the end, so there is no ratio.\n")
    return "\n".join(blocks)


def render_profile(profile: Profile) -> str:
    """Where the time of a session went, starts and imports apart from the work that the contract asks for."""
    rows = [
        ("Starts and imports", profile.part(STARTS), {name: profile.seconds.get(name, 0.0) for name in STARTS}),
        ("Mandated work", profile.part(MANDATED), {name: profile.seconds.get(name, 0.0) for name in MANDATED}),
        ("Verification", sum(profile.added.values()), profile.added),
    ]
    lines = [f"Time: {profile.all_s:.2f} s from the asking to the answer"]
    if (waited := profile.seconds.get(WAITING, 0.0)) > 0.01:
        lines.append(f"  {WAITING:<20}{waited:8.2f} s")
    for title, seconds, parts in rows:
        lines.append(f"  {title:<20}{seconds:8.2f} s")
        lines += [f"    {name:<18}{spent:8.2f} s" for name, spent in parts.items()]
    return "\n".join(lines) + "\n"


def _own_time(verdict: Verdict) -> Iterator[str]:
    if verdict.timing is not None:
        yield f"Median of {len(verdict.timing.implementation_ms)} timed calls: " + _milliseconds(
            verdict.timing.implementation_median_ms
        )


def _pair_line(pair: Pair) -> str:
    bounds = f"95 % interval {_ratio(pair.low)} to {_ratio(pair.high)}"
    if pair.low <= 1 <= pair.high:
        outcome = "no difference shown"
    else:
        outcome = f"({pair.second + 1}) is faster" if pair.ratio > 1 else f"({pair.first + 1}) is faster"
    return f"  ({pair.first + 1}) over ({pair.second + 1}): {_ratio(pair.ratio)} ({bounds}): {outcome}"


def headline(verdict: Verdict) -> str:
    """One line: the outcome, of what, and the speedup or the stage and code that ended it."""
    what = f"{verdict.problem} in {verdict.dsl}, {verdict.workload} workload on {verdict.device}"
    if verdict.passed:
        return f"PASSED: {what}: {_factor(verdict.speedup or 0.0)} over eager PyTorch"
    return f"FAILED: {what}: stage `{verdict.ended_at}`, reason `{verdict.code}`"


def _findings(verdict: Verdict) -> Iterator[str]:
    for item in verdict.findings:
        place = f"kernel.py line {item.line}: " if item.line is not None else ""
        yield ""
        yield f"[{item.code}] {place}{item.message}"


def _correctness(verdict: Verdict) -> Iterator[str]:
    if not verdict.comparisons:
        return
    failed = [c for c in verdict.comparisons if not c.passed]
    yield ""
    if failed:
        yield f"Outputs of the draw that failed ({verdict.draws_passed} correctness draws passed before):"
    else:
        yield f"Outputs of the tightest of the {verdict.draws_passed} correctness draws:"
    for comparison in verdict.comparisons:
        yield f"  {comparison_line(comparison)}"


def comparison_line(comparison: Comparison) -> str:
    """One output in one line: error against allowance, or how many elements differ."""
    state = "ok" if comparison.passed else "WRONG"
    if comparison.error is None or comparison.allowance is None:
        return f"{comparison.output}: {comparison.mismatches} of {comparison.elements} elements differ: {state}"
    text = f"{comparison.output}: largest error {comparison.error:.3g}, allowed {comparison.allowance:.3g}"
    if comparison.mismatches:
        text += f", {comparison.mismatches} of {comparison.elements} elements outside"
    return f"{text}: {state}"


def _timing(timing: Timing, device: str) -> Iterator[str]:
    yield ""
    yield f"Median of {len(timing.implementation_ms)} timed calls: {_milliseconds(timing.implementation_median_ms)}"
    yield f"Eager PyTorch on the same draws: {_milliseconds(timing.eager_median_ms)}"
    if timing.vectorized_median_ms is not None:
        ratio = _factor(timing.vectorized_median_ms / timing.implementation_median_ms)
        yield f"Vectorized eager form: {_milliseconds(timing.vectorized_median_ms)} (speedup over it: {ratio})"
    interval = timing.speedup_interval
    bounds = f" (95 % interval {_factor(interval[0])} to {_factor(interval[1])})" if interval else ""
    yield f"Speedup: {_factor(timing.speedup)}{bounds}"
    if timing.roofline_fraction is not None:
        yield f"Share of what {device} could do at best: {timing.roofline_fraction:.0%}"


def _circumstances(verdict: Verdict) -> Iterator[str]:
    yield ""
    yield f"Isolation: {verdict.isolation.method}" + "".join(f"\n  note: {note}" for note in verdict.isolation.notes)
    if verdict.versions:
        yield "Versions: " + ", ".join(f"{name} {number}" for name, number in verdict.versions.items())
    if verdict.seconds:
        yield "Seconds: " + ", ".join(f"{name} {spent:.1f}" for name, spent in verdict.seconds.items())


def _factor(value: float) -> str:
    return f"{value:.2f}×" if value >= 0.1 else f"{value:.4f}×"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if 0.1 <= value < 100 else f"{value:.3g}"


def _milliseconds(value: float) -> str:
    return f"{value:.3f} ms" if value >= 0.1 else f"{1000 * value:.1f} µs"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip("\n").splitlines())
