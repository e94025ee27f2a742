"""Texts, records and prepared replies that the tests of the annotation share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from metakernelbench.annotation.annotator import Annotator, ask
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.scripted import Reply, ScriptedAnnotator, serving
from metakernelbench.attempts.record import AttemptRecord, Submission
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.grading.verdict import Comparison, Finding, Isolation, Stage, Timing, Verdict
from metakernelbench.store.annotations import Answer

NOTE = """# Paged decode: what was learned

- The last page is ragged, the others are full.
- A running softmax needs one pass over the pages; it passed at the first submission.
- Splitting long sequences cannot help here.
"""


def verdict(*, passed: bool = False, code: str = "wrong-output", error: float | None = None, **changes: Any) -> Verdict:
    """A final verdict; `error` is that of a float output whose allowance is 1."""
    timing = Timing(
        implementation_ms=(1.0,), eager_ms=(2.0,), implementation_median_ms=1.0, eager_median_ms=2.0, speedup=2.0
    )
    comparison = Comparison(output="out", error=error, allowance=1.0, mismatches=3, elements=64, passed=False)
    fields: dict[str, Any] = {
        "problem": "p28",
        "dsl": "tirx",
        "workload": "smoke",
        "device": "cpu",
        "passed": passed,
        "ended_at": None if passed else Stage.CORRECTNESS,
        "findings": () if passed else (Finding(code=code, message="what was wrong"),),
        "comparisons": () if error is None else (comparison,),
        "timing": timing if passed else None,
        "final": True,
        "isolation": Isolation(method="process"),
        "contract_version": CONTRACT_VERSION,
    }
    return Verdict(**(fields | changes))


def submission(number: int | None, final: Verdict | None, source: str = "old", answer: str = "answered") -> Submission:
    return Submission(
        number=number, requested_at_s=60.0, answered_at_s=70.0, source=source, verdict=final, answer=answer
    )


def step(remark: str, command: str = "", output: str = "") -> dict[str, Any]:
    """One step of an agent, as Harbor writes it."""
    return {
        "source": "agent",
        "message": remark,
        "tool_calls": [{"tool_call_id": "1", "function_name": "bash_command", "arguments": {"keystrokes": command}}],
        "observation": {"results": [{"content": output}]},
    }


def attempt(*steps: dict[str, Any], **changes: Any) -> AttemptRecord:
    """A conditioned attempt whose final kernel failed."""
    fields: dict[str, Any] = {
        "problem": "p28",
        "dsl": "tirx",
        "model": "vendor/secret-model",
        "replicate": 0,
        "arm": "conditioned",
        "source": "p28/cute/vendor/secret-model/0/solo",
        "ended": "completed",
        "instruction": f"Write a kernel.\n\n# Attached notes\n\n{NOTE}",
        "submissions": (submission(1, verdict()),),
        "kernel": "def solve(x): ...",
        "skill": "The last page is ragged. Splitting cannot help.",
        "final": verdict(),
        "trajectory": {"steps": [{"source": "user", "message": "the task"}, *steps]},
        "fingerprint": "f",
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T00:40:00+00:00",
    }
    return AttemptRecord.model_validate(fields | changes)


def asked_of(replies: list[Reply], asked: Asked, **changes: Any) -> tuple[Answer, ScriptedAnnotator]:
    """Ask a scripted annotator, over HTTP on the loopback address."""

    async def run() -> tuple[Answer, ScriptedAnnotator]:
        async with serving(tuple(replies)) as server:
            annotator = Annotator(model="scripted/judge", api_base=server.api_base, first_pause_s=0.01, **changes)
            return await ask(annotator, asked), server

    return asyncio.run(run())


def labels_reply(*labels: tuple[str, str, bool], **changes: Any) -> Reply:
    """A reply about a skill: (category, quote, supported)."""
    entries = tuple({"category": c, "quote": q, "supported": s} for c, q, s in labels)
    return Reply(labels=entries, **changes)


def sent(server: ScriptedAnnotator) -> str:
    """All that the provider has been sent."""
    return json.dumps(server.requests, ensure_ascii=False)
