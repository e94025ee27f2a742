"""A study with something of everything in it, and texts that try to break out of the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metakernelbench.attempts.record import Submission, Usage
from metakernelbench.experiments.designs import cross_dsl
from metakernelbench.report.page import Report
from metakernelbench.report.study import Study
from tests.analysis.support import FAIL, SKIPPED, Outcome, record, verdict

HOSTILE = (
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'></pre></details></script><!-- \u202e"
    '\x1b[31m <svg onload=window.broken=3>" onmouseover="window.broken=4" {{ 7 * 7 }} '
    "[click](javascript:window.broken=5) ![pixel](http://127.0.0.1:9/pixel.png) <http://127.0.0.1:9/auto> \ud800"
)

HOSTILE_NAME = "vendor/" + HOSTILE.replace("\ud800", "")
"""As a model's name: an experiment file is UTF-8, so it cannot hold half a character."""

TIMES: dict[str, tuple[Outcome, Outcome, Outcome, Outcome]] = {
    "p03": (4.0, 6.0, 4.0, 4.0),
    "p21": (FAIL, 3.0, 6.0, 5.0),
    "p28": (2.0, FAIL, FAIL, FAIL),
    "p49": (10.0, 2.0, 2.04, 2.0),
    "p61": (6.0, 8.0, SKIPPED, 8.0),
    "p72": (FAIL, FAIL, 6.0, FAIL),
}


def study(*, text: str = "x", model: str = "m", **changes: Any) -> Study:
    """Six problems in both directions; `text` stands wherever an agent, a kernel or a provider can write."""
    plan = cross_dsl(list(TIMES), ["cute", "tirx"], [model], 1)
    columns = {("cute", "solo"): 0, ("tirx", "solo"): 1, ("tirx", "from-cute"): 2, ("cute", "from-tirx"): 3}
    records = {}
    for attempt in plan.attempts:
        outcome = TIMES[attempt.problem][columns[attempt.dsl, attempt.label]]
        made = record(attempt, outcome)
        if outcome != SKIPPED:
            feedback = verdict(attempt.problem, attempt.dsl, 5.0, final=False, submission_output=text)
            final = made.final and verdict(
                attempt.problem,
                attempt.dsl,
                outcome if isinstance(outcome, float) else None,
                submission_output=text,
                versions={text: text},
            )
            made = record(
                attempt,
                outcome,
                instruction=f"# Task\n{text}",
                kernel=f"def solve(x):\n    return x + {outcome!r:.3}  # {text}\n",
                skill=f"# Learned\n\n**{text}**\n\n```\n{text}\n```\n\n| a | b |\n|---|---|\n| {text} | 1 |\n",
                submissions=(
                    Submission(number=None, requested_at_s=5, answered_at_s=6, answer=f"unreadable {text}"),
                    Submission(
                        number=1, requested_at_s=60, answered_at_s=70, source=text, verdict=feedback, answer=text
                    ),
                    Submission(number=2, requested_at_s=90, source=text, answer=text),
                ),
                final=final,
                usage=Usage(turns=3, input_tokens=1000, output_tokens=100, cost_usd=0.5),
                seconds={"agent": 100.0, "grading": 10.0},
                trajectory=trajectory(text),
                versions={"harbor": "0.20"},
            )
        records[attempt.key] = made
    return Study(name="trial", plan=plan, records=records, **changes)


def everything(made: Study) -> str:
    """All pages of a report, one after the other."""
    report = Report(made)
    assert "<" not in report.part("search")
    return report.overview() + "".join(report.part(name) for name in [*report.shared, *report.cells])


def trajectory(text: str) -> dict[str, Any]:
    """Three turns of a terminal agent: it writes, waits, and says that it is done."""
    steps = [
        {"source": "user", "message": "Task"},
        *(
            {
                "source": "agent",
                "timestamp": f"2026-01-01T00:0{minute}:00+00:00",
                "message": f"Analysis: {text}" if typed else "",
                "tool_calls": [{"function_name": "bash_command", "arguments": {"keystrokes": typed}}],
                "observation": {"results": [{"content": f"New Terminal Output:\n{text}"}]},
            }
            for minute, typed in enumerate([f"echo {text}\n", "", "", "task submit\n"])
        ),
    ]
    return {"schema_version": "ATIF-v1.5", "steps": steps}


CHROMIUM = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A real browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, **context: Any) -> Iterator[tuple[Any, list[str]]]:
    """The page in a browser that is offline, with what it complained about and what it asked the network for."""
    session = browser.new_context(offline=True, **context)
    page = session.new_page()
    complaints: list[str] = []

    def asked(request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            complaints.append(request.url)

    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", asked)
    page.goto(path.as_uri())
    yield page, complaints
    session.close()


def accessibility(tab: Any) -> list[tuple[str, str, list[str]]]:
    """What axe-core finds serious or critical on the page: rule, help, elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(tab).response["violations"]
    return [
        (rule["id"], rule["help"], [node["html"][:300] for node in rule["nodes"]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
