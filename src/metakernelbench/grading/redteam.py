"""The red team: dishonest implementations that must be refused, and honest but unusual ones that must pass.

Both lie in folders of a checkout, one implementation a file, whose header says what it is: a sentence, an empty line,
then one `key: value` a line. `problem`, `dsl` and `devices` are said by all; an exploit adds the `family` of
`threats.py` it belongs to, its `mechanism`, and the codes that are `expected` to meet it.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.codes import CODES
from metakernelbench.grading.contract import CONTRACT, Contract

_CHECKOUT = Path(__file__).parents[3]
EXPLOITS = _CHECKOUT / "exploits"
HONEST = _CHECKOUT / "honest"

EXPLOIT_CONTRACT = replace(CONTRACT, time_limit_s=120)
"""The benchmark's, but for an exploit that hangs: no device is worth ten minutes of it."""

_PASSED = "passed"
_COMMON_KEYS = {"problem", "dsl", "devices"}
_EXPLOIT_KEYS = {"family", "mechanism", "expected"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One implementation of the red team's."""

    path: Path
    sentence: str
    problem: str
    dsl: str
    devices: tuple[str, ...]
    family: str = ""
    mechanism: str = ""
    expected: tuple[str, ...] = (_PASSED,)
    """Any of these is right: codes for an exploit, `passed` for an honest implementation."""


@dataclass(frozen=True)
class Outcome:
    """What the verifier made of a sample."""

    sample: Sample
    met: str
    """The verdict's code, `passed`, or `infrastructure` where the grading itself failed, which is never right."""
    message: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.met in self.sample.expected


def read(path: Path) -> Sample:
    """A sample from its file. Raises `UserError` for a header that does not say what it must."""
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence, _, rest = header.partition("\n\n")
    fields = dict(line.split(": ", 1) for line in rest.splitlines() if ": " in line)
    if fields.keys() not in (_COMMON_KEYS, _COMMON_KEYS | _EXPLOIT_KEYS):
        raise UserError(f"the header of `{path.name}` has the keys: {', '.join(sorted(fields)) or 'none'}")
    expected = tuple(fields.get("expected", _PASSED).split())
    if unknown := [code for code in expected if code not in CODES and code != _PASSED]:
        raise UserError(f"`{path.name}` expects `{unknown[0]}`, which is no code")
    return Sample(
        path=path,
        sentence=sentence,
        problem=fields["problem"],
        dsl=fields["dsl"],
        devices=tuple(fields["devices"].split()),
        family=fields.get("family", ""),
        mechanism=fields.get("mechanism", ""),
        expected=expected,
    )


def samples(folder: Path, device: str) -> list[Sample]:
    """All samples of a folder that can be tried on `device`. Raises `UserError` where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"there is no `{folder.name}` beside the package", hint="run from a checkout of the repository")
    return [sample for sample in map(read, sorted(folder.glob("*.py"))) if device in sample.devices]


def attempt(verifier: VerifierProcess, sample: Sample, device: str, contract: Contract | None = None) -> Outcome:
    """Grade one sample, on the full workload where there is a GPU, as `mkb grade` does."""
    start = time.monotonic()
    contract = contract or (EXPLOIT_CONTRACT if sample.family else CONTRACT)
    try:
        verdict = verifier.grade(
            sample.problem,
            sample.path.read_bytes(),
            sample.dsl,
            workload="full" if device == "cuda" else "smoke",
            device=device,
            contract=contract,
        )
    except InfrastructureFault as fault:
        return Outcome(sample, "infrastructure", fault.message, time.monotonic() - start)
    message = verdict.findings[0].message if verdict.findings else ""
    return Outcome(sample, verdict.code or _PASSED, message, time.monotonic() - start)


def attempts(found: list[Sample], device: str, contract: Contract | None = None) -> Iterator[Outcome]:
    """The outcomes of all samples, in order, from one verifier process."""
    with VerifierProcess() as verifier:
        for sample in found:
            yield attempt(verifier, sample, device, contract)
