"""The files that `mkb grade` is given: by name, or many of them in a list."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metakernelbench.cli import output
from metakernelbench.cli.output import ExitCode
from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.files import read_all, read_text
from metakernelbench.grading.contract import CONTRACT

_STANDARD_INPUT = Path("-")


def named(text: str, dsl: str | None, folder: Path = Path()) -> tuple[str, Path]:
    """The DSL and the path of a FILE or DSL:FILE below a folder. Raises `UserError` where nobody names the DSL."""
    match = re.fullmatch(r"([a-z]\w*):(.+)", text)
    if match and not (folder / text).exists():
        return match[1], folder / match[2]
    if dsl is None:
        raise UserError(
            f"nobody says which DSL `{text}` is written in", hint=f"add `--dsl DSL`, or write DSL:{text.lstrip(':')}"
        )
    return dsl, folder / text


def read_kernel(path: Path) -> bytes:
    """The file's bytes, cut where it is too long anyway. Raises `UserError` where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(CONTRACT.max_source_bytes + 1)
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Listed:
    """One line of a list."""

    problem: str
    dsl: str
    path: Path
    kernel: bytes


def read_list(path: Path, dsl: str | None) -> list[Listed]:
    """What a list names, a line each: a problem and a file, whose path is relative to the list. Empty lines and those
    that begin with # are left out. All is looked up and read now, so that a mistake shows before anything is graded.
    Raises `UserError`, which names the line."""
    folder = Path() if path == _STANDARD_INPUT else path.parent
    found = list(_lines(path, folder, dsl))
    if not found:
        raise UserError(f"`{path}` lists nothing to grade", hint="a line is `PROBLEM [DSL:]FILE`")
    return found


def _lines(path: Path, folder: Path, dsl: str | None) -> Iterator[Listed]:
    from metakernelbench.problems import catalog

    try:
        text = read_all(sys.stdin) if path == _STANDARD_INPUT else read_text(path)
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"`{path}` is no UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        problem, *rest = line.split(maxsplit=1)
        if not rest:
            raise UserError(
                f"`{path}` line {number} names no file: {line.strip()}", hint="a line is `PROBLEM [DSL:]FILE`"
            )
        try:
            language, file = named(rest[0].strip(), dsl, folder)
            catalog.source_path(problem)
            yield Listed(problem, language, file, read_kernel(file))
        except UserError as error:
            raise UserError(f"`{path}` line {number}: {error.message}", hint=error.hint) from None


def grade_many(items: Sequence[Listed], options: Mapping[str, Any], *, as_json: bool) -> ExitCode:
    """Grade one after the other, in one verifier, and print a line each as it comes. A fault of the machine or a wrong
    request in one does not keep the others from being graded. Returns the worst exit code met."""
    from metakernelbench.grading.client import VerifierProcess

    worst = ExitCode.OK
    with VerifierProcess() as verifier, output.stderr.status("starting") as status:
        for number, item in enumerate(items):
            for name, count in Counter(other.dsl for other in items[number : number + 2]).items():
                verifier.start_ahead(name, options["device"], count)
            status.update(f"grading {number + 1} of {len(items)}: {item.path}")
            worst = max(worst, _grade_one(verifier, item, options, as_json=as_json))
    return worst


def _grade_one(verifier: Any, item: Listed, options: Mapping[str, Any], *, as_json: bool) -> ExitCode:
    from metakernelbench.grading.report import headline

    document: dict[str, Any]
    try:
        verdict = verifier.grade(item.problem, item.kernel, item.dsl, **options)
    except (InfrastructureFault, UserError) as error:
        code = ExitCode.INFRASTRUCTURE if isinstance(error, InfrastructureFault) else ExitCode.USAGE
        line = f"NO VERDICT: {item.problem} in {item.dsl}: {error.message}"
        document = {"error": {"kind": error.kind, "message": error.message, "hint": error.hint}}
    else:
        code = ExitCode.OK if verdict.passed else ExitCode.FAILED
        line, document = headline(verdict), dataclasses.asdict(verdict)
    if as_json:
        text = json.dumps({"file": str(item.path), **document}, ensure_ascii=False, allow_nan=False)
    else:
        text = f"{line} ({item.path})"
    output.stdout.print(text, markup=False, soft_wrap=True)
    return code
