"""`mkb witnesses`: the honest implementations that this repository ships, and what was measured of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from metakernelbench.cli.devices import check_device
from metakernelbench.cli.output import ExitCode, print_json, stderr, stdout
from metakernelbench.cli.pages import bring_up_to_date
from metakernelbench.errors import UnknownName
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.grading.verdict import Verdict
    from metakernelbench.grading.witnesses import Witness

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The honest implementations that this repository ships, and what was measured of them.",
)

Ids = Annotated[list[str] | None, typer.Argument(metavar="[pNN]...", help="Problems; all of them when left out.")]
Family = Annotated[str | None, typer.Option("--family", help="Only the problems of this family.")]
Dsl = Annotated[list[str] | None, typer.Option("--dsl", help="Only this DSL; may be given again.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Records = Annotated[
    Path | None, typer.Option("--records", help="The verdicts; records/h200/witnesses.jsonl if unsaid.")
]


@app.command("list")
def list_witnesses(
    ids: Ids = None,
    family: Family = None,
    dsl: Dsl = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only variants without a passing verdict on their present file.")
    ] = False,
    records: Records = None,
    as_json: Json = False,
) -> None:
    """List every variant: has it a witness, and what does the record say of it?"""
    witnesses = _chosen(ids, family, dsl, missing=missing, records=records)
    if as_json:
        return print_json([_row(witness) for witness in witnesses])
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in ("problem", "dsl", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("speedup", "ms", "eager ms", "roofline"):
        table.add_column(column, no_wrap=True, justify="right")
    for row in map(_row, witnesses):
        fraction = "" if row["roofline_fraction"] is None else f"{row['roofline_fraction']:.0%}"
        numbers = [
            "" if row[key] is None else f"{row[key]:.4g}" for key in ("speedup", "implementation_ms", "eager_ms")
        ]
        table.add_row(row["problem"], escape(row["dsl"]), row["state"], *numbers, fraction)
    stdout.print(table)
    passed = sum(witness.state == "passed" for witness in witnesses)
    return stdout.print(f"\n{passed} of {len(witnesses)} passed")


@app.command("grade")
def grade_witnesses(
    ids: Ids = None,
    family: Family = None,
    dsl: Dsl = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only those without a passing verdict on their present file.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    workload: Annotated[
        str | None, typer.Option(help="full or smoke; full on cuda and smoke on cpu if unsaid.")
    ] = None,
    records: Records = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Write the verdicts to this records file; a former one of a variant is replaced.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Give witnesses a final grading each. Exit code 1 where one fails, 3 where the machine prevented a verdict."""
    from metakernelbench.grading import witnesses as module
    from metakernelbench.grading.verdict import Verdict

    check_device(device)
    chosen = [w for w in _chosen(ids, family, dsl, missing=missing, records=records) if w.path.exists()]
    kept = module.read_records(keep) if keep is not None else {}
    outcomes: list[Verdict | None] = []
    for witness, outcome in module.grade(chosen, workload=workload or _workload(device), device=device):
        verdict = outcome if isinstance(outcome, Verdict) else None
        outcomes.append(verdict)
        _tell(witness, verdict, str(outcome), f"{len(outcomes)}/{len(chosen)}")
        if keep is not None and verdict is not None:
            kept[witness.problem, witness.dsl] = verdict
            module.write_records(keep, kept)
    if as_json:
        print_json([None if verdict is None else dataclasses.asdict(verdict) for verdict in outcomes])
    raise typer.Exit(_exit_code(outcomes))


@app.command()
def table(
    check_only: Annotated[bool, typer.Option("--check", help="Only say whether the page is up to date.")] = False,
) -> None:
    """Bring docs/witnesses.md up to date with the witnesses and the record."""
    from metakernelbench.grading import witnesses as module

    generated = module.render(_chosen(None, None, None, missing=False, records=None))
    bring_up_to_date(
        module.PAGE,
        lambda page: module.replace_generated(page, generated),
        "mkb witnesses table",
        check_only=check_only,
    )


def _chosen(
    ids: list[str] | None, family: str | None, dsls: list[str] | None, *, missing: bool, records: Path | None
) -> list[Witness]:
    """The variants asked for. Raises `UnknownName` for a problem, family or DSL that does not exist."""
    from metakernelbench.cli.problems import chosen_ids
    from metakernelbench.dsls.dsl import DSL_HINT, dsl_names
    from metakernelbench.grading import witnesses as module

    for name in dsls or ():
        if name not in dsl_names():
            raise UnknownName("DSL", name, dsl_names(), hint=DSL_HINT)
    kept = module.read_records(records or module.RECORDS)
    found = module.survey(chosen_ids(ids, family), dsls or module.BENCHMARK_DSLS, kept)
    return [witness for witness in found if not missing or witness.state != "passed"]


def _row(witness: Witness) -> dict[str, Any]:
    from metakernelbench.problems.catalog import family_of

    verdict = witness.verdict if witness.state in ("passed", "failed") else None
    timing = verdict.timing if verdict is not None else None
    return {
        "problem": witness.problem,
        "family": family_of(witness.problem),
        "dsl": witness.dsl,
        "state": str(witness.state),
        "device": verdict.device if verdict else None,
        "speedup": timing.speedup if timing else None,
        "speedup_interval": timing.speedup_interval if timing else None,
        "implementation_ms": timing.implementation_median_ms if timing else None,
        "eager_ms": timing.eager_median_ms if timing else None,
        "vectorized_ms": timing.vectorized_median_ms if timing else None,
        "roofline_fraction": timing.roofline_fraction if timing else None,
        "versions": dict(verdict.versions) if verdict else None,
    }


def _workload(device: str) -> str:
    return "full" if device == "cuda" else "smoke"


def _tell(witness: Witness, verdict: Verdict | None, fault: str, number: str) -> None:
    """One line a grading, as soon as it is known."""
    if verdict is None:
        said = f"no verdict: {harmless(fault)}"
    elif verdict.passed:
        said = f"passed, {verdict.speedup:.3g} times as fast as eager"
    else:
        said = f"FAILED, {verdict.code}: {harmless(verdict.findings[0].message)}"
    stderr.print(f"[{number}] {witness.problem} {witness.dsl}: {said}", markup=False, soft_wrap=True)


def _exit_code(outcomes: list[Verdict | None]) -> ExitCode:
    if any(verdict is not None and not verdict.passed for verdict in outcomes):
        return ExitCode.FAILED
    return ExitCode.INFRASTRUCTURE if None in outcomes else ExitCode.OK
