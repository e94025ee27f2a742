"""`task check`: whatever can be said of kernel.py without a submission, in a sandbox without a GPU.

What is read from the source alone is checked here; what runs kernel.py is done by `trial.py`, in processes of their
own, so that a crash or an endless loop in there is only one more thing to report.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from metakernelbench.grading import rules, source
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.verdict import Finding

ROOT = Path(os.environ.get("MKB_ROOT") or "/")
KERNEL = ROOT / "app" / "kernel.py"
FACTS = ROOT / "task" / "facts.json"
TRIAL = Path(__file__).with_name("trial.py")
NOTHING_WRONG, WRONG = 0, 1
PATIENCE_S = 150
_SHOWN_OUTPUT = 1200
_LABELS = {"ok": "ok", "wrong": "WRONG", "open": "not checked"}


class Said(NamedTuple):
    """One line of the report."""

    state: Literal["ok", "wrong", "open"]
    what: str
    detail: str


def main() -> int:
    """Print the report line by line, as it comes to be known."""
    print(f"Checking {KERNEL} here in the sandbox. Nothing is sent; no submission is used.", flush=True)
    wrong = 0
    for said in check(json.loads(FACTS.read_text())):
        wrong += said.state == "wrong"
        print(f"  {_LABELS[said.state]:<12} {said.what}: {said.detail}", flush=True)
    return WRONG if wrong else NOTHING_WRONG


def check(facts: dict[str, Any]) -> Iterator[Said]:
    """Everything there is to say, cheapest first; ends early where nothing more can be said."""
    contents = KERNEL.read_bytes() if KERNEL.is_file() else None
    tree = source.read(contents, CONTRACT)
    if isinstance(tree, Finding):
        yield Said("wrong", "source", _finding(tree))
        return
    yield Said("ok", "source", f"{len(contents or b'')} bytes that parse and define `solve`")
    broken = rules.check(tree, _rulebook(facts))
    yield from (Said("wrong", "rules", _finding(item)) for item in broken)
    if not broken:
        yield Said("ok", "rules", "nothing found that is not allowed")
    if facts["device"] == "cuda" and facts["arch"] is None:
        yield Said("open", "kernels", f"compiling for the {facts['gpu']}, whose architecture is not known here")
    known: set[tuple[str, str]] = set()
    for mode in ("gpu", "cpu") if facts["device"] == "cuda" and facts["arch"] else ("cpu",):
        results = list(_trial(mode))
        yield from (said for said in results if (said.state, said.what) not in known or said.state == "wrong")
        known |= {(said.state, said.what) for said in results}
        if any(said.what in ("import", "signature") and said.state != "ok" for said in results):
            return
    yield Said("open", "the rest", _rest(facts))


def _rulebook(facts: dict[str, Any]) -> Any:
    """What the rules ask of a DSL."""
    return SimpleNamespace(title=facts["title"], imports=frozenset(facts["imports"]), forbidden=facts["forbidden"])


def _finding(finding: Finding) -> str:
    return f"{f'line {finding.line}: ' if finding.line is not None else ''}[{finding.code}] {finding.message}"


def _rest(facts: dict[str, Any]) -> str:
    where = f"on the {facts['gpu']}" if facts["device"] == "cuda" else "on the grading machine"
    return f"values, dependence on the kernels and speed {where}: these are known from `task submit`"


def _trial(mode: str) -> Iterator[Said]:
    """What one process that runs kernel.py has found, and how it ended if it did not end well."""
    with tempfile.TemporaryDirectory() as scratch:
        report, printed = Path(scratch, "report"), Path(scratch, "printed")
        report.touch()
        code = _run([sys.executable, "-B", str(TRIAL), mode, str(report)], printed)
        lines = [json.loads(line) for line in report.read_text().splitlines()]
        yield from (Said(*line) for line in lines if line[0] != "began")
        unfinished = lines[-1][1] if lines and lines[-1][0] == "began" else None
        if unfinished is not None or code != 0:
            # A compiler may take its time: that alone is no mistake.
            yield Said("open" if code is None else "wrong", unfinished or "import", _death(code))
        output = printed.read_text(errors="replace").strip()
        if output and (code != 0 or any(line[0] == "wrong" for line in lines)):
            shown = "\n".join(f"      {line}" for line in output[-_SHOWN_OUTPUT:].splitlines())
            yield Said("open", "output", f"the end of what was printed, which may explain this:\n{shown}")


def _run(command: list[str], printed: Path) -> int | None:
    """Exit status of a command, whose output goes to a file; None where it took too long."""
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def _death(code: int | None) -> str:
    if code is None:
        return f"took over {PATIENCE_S} s here and was ended; look for a loop that does not end, or compile less"
    if code < 0:
        return f"the process was ended by signal {-code}; look for accesses out of bounds, or too much memory"
    return f"the process ended with exit status {code}; kernel.py must not leave"


if __name__ == "__main__":
    sys.exit(main())
