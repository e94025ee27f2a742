"""`mkb grade`: one kernel.py, one verdict; several, and how their runtimes are to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metakernelbench.cli import output
from metakernelbench.cli.devices import check_device
from metakernelbench.cli.output import ExitCode
from metakernelbench.cli.submissions import grade_many, named, read_kernel, read_list
from metakernelbench.errors import UserError

if TYPE_CHECKING:
    from metakernelbench.grading.head_to_head import HeadToHead
    from metakernelbench.grading.profile import Profile
    from metakernelbench.grading.verdict import Verdict

app = typer.Typer(add_completion=False)


@app.command()
def grade(
    problem: Annotated[str | None, typer.Argument(metavar="PROBLEM", help="Problem id, such as p28.")] = None,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DSL:]FILE...",
            help="The kernel.py to grade; any name will do. Several are timed against each other, interleaved in one "
            "session; a DSL of its own may stand before each, as in cute:a.py.",
        ),
    ] = None,
    dsl: Annotated[
        str | None, typer.Option("--dsl", help="The DSL of the files that name none: cute, tirx, triton, ...")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="full or smoke; by default full on a GPU, smoke on a CPU.")
    ] = None,
    final: Annotated[
        bool, typer.Option("--final", help="Measure on after a rule violation, and time the vectorized eager form too.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time went; with --json, every timed draw as well.")
    ] = False,
    many: Annotated[
        Path | None,
        typer.Option(
            metavar="LIST",
            help="Grade every line of this file, each `PROBLEM [DSL:]FILE`; - reads them from standard input. The "
            "verifier starts once, each submission has a fresh worker.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON (keys: passed, timing, ...); many: one a line.")
    ] = False,
) -> None:
    """Grade one kernel.py, or several head to head, or many one after the other. Exit code: 0 all passed, 1 one failed,
    2 wrong usage, 3 fault of this machine."""
    chosen = _device(device)
    options = {"workload": workload or ("full" if chosen == "cuda" else "smoke"), "device": chosen, "final": final}
    if many is not None:
        if problem is not None:
            raise UserError(f"`--many` takes problems and files from its list; leave out `{problem}` and what follows")
        if profile:
            raise UserError("`--many` has no `--profile`", hint="grade the one kernel by itself")
        raise typer.Exit(grade_many(read_list(many, dsl), options, as_json=as_json))
    if problem is None or not files:
        raise UserError("say what to grade: a problem and a file", hint="mkb grade p28 kernel.py --dsl tirx")
    _grade(problem, files, dsl, options, profile=profile, as_json=as_json)


def _grade(
    problem: str, files: Sequence[str], dsl: str | None, options: Mapping[str, Any], *, profile: bool, as_json: bool
) -> None:
    from metakernelbench.grading.client import VerifierProcess
    from metakernelbench.grading.head_to_head import Entrant

    entrants = [Entrant(language, read_kernel(path)) for language, path in (named(text, dsl) for text in files)]
    with VerifierProcess() as verifier, output.stderr.status("starting") as status:
        options = {**options, "progress": lambda text: status.update(f"grading: {text}")}
        answer: Verdict | HeadToHead
        if len(entrants) == 1:
            answer = verifier.grade(problem, entrants[0].kernel, entrants[0].dsl, **options)
        else:
            answer = verifier.head_to_head(problem, entrants, **options)
        status.stop()
        measured = verifier.profile if profile else None
        if as_json:
            output.print_json(_document(answer, measured))
        else:
            output.stdout.print(_text(answer, files, measured), markup=False, end="", soft_wrap=True)
    raise typer.Exit(ExitCode.OK if answer.passed else ExitCode.FAILED)


def _document(answer: Verdict | HeadToHead, profile: Profile | None) -> dict[str, Any]:
    """The answer itself, or with a profile beside it."""
    document = dataclasses.asdict(answer)
    if profile is None:
        return document
    return {"verdict" if "passed" in document else "head_to_head": document, "profile": profile.to_dict()}


def _text(answer: Verdict | HeadToHead, files: Sequence[str], profile: Profile | None) -> str:
    from metakernelbench.grading.report import render, render_head_to_head, render_profile
    from metakernelbench.grading.verdict import Verdict

    report = render(answer, for_feedback=False) if isinstance(answer, Verdict) else render_head_to_head(answer, files)
    return report if profile is None else f"{report}\n{render_profile(profile)}"


def _device(asked: str | None) -> str:
    if asked is None:
        return "cuda" if _has_gpu() else "cpu"
    check_device(asked)
    return asked


def _has_gpu() -> bool:
    """Whether the NVIDIA driver knows a GPU; asked without importing torch, which the verifier does."""
    return Path("/dev/nvidiactl").exists()
