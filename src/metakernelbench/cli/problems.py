"""`mkb problems`: list, show, check, measure and start problems."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from metakernelbench.cli.devices import check_device
from metakernelbench.cli.output import ExitCode, print_json, stderr, stdout
from metakernelbench.cli.pages import bring_up_to_date
from metakernelbench.errors import UnknownName
from metakernelbench.problems.catalog import family_of, problem_ids, slug_of, source_path, subject_of
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.problems.check import CheckReport

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, show and check the problems of the catalogue."
)

REPOSITORY = Path(__file__).parents[3]
"""Where `records/` and `docs/` are, in a checkout."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Family = Annotated[str | None, typer.Option("--family", help="Only the problems of this family.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[pNN]...", help="Problems; all of them when left out.")]


@app.command("list")
def list_problems(family: Family = None, as_json: Json = False) -> None:
    """List problems: number, family, name and subject."""
    rows = [
        {"id": id, "family": family_of(id), "slug": slug_of(id), "subject": subject_of(id)}
        for id in chosen_ids(None, family)
    ]
    if as_json:
        return print_json(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "family", "slug", "subject"):
        table.add_column(column, no_wrap=column != "subject")
    for row in rows:
        table.add_row(*(escape(harmless(cell)) for cell in row.values()))
    return stdout.print(table)


@app.command()
def show(
    id: Annotated[str, typer.Argument(metavar="pNN", help="A problem.")],
    as_json: Json = False,
    source: Annotated[bool, typer.Option("--source", help="Print the module itself.")] = False,
) -> None:
    """Show a problem: subject, provenance, inputs, outputs, cost, roofline bounds and measured eager time."""
    text = source_path(id).read_text(encoding="utf-8")
    if source and as_json:
        print_json({"id": id, "path": str(source_path(id)), "source": text})
    elif source:
        stdout.print(harmless(text), markup=False, soft_wrap=True, end="")
    elif as_json:
        print_json(_description(id))
    else:
        _print_description(_description(id))


@app.command()
def check(ids: Ids = None, family: Family = None, as_json: Json = False) -> None:
    """Check that problems are fit to be posed. Exit code 1 where one is not."""
    chosen = chosen_ids(ids, family)
    from metakernelbench.problems.check import check_problem

    reports = []
    for number, id in enumerate(chosen, start=1):
        reports.append(check_problem(id))
        state = "[green]passed[/]" if reports[-1].passed else "[red]failed[/]"
        stderr.print(f"[{number}/{len(chosen)}] {id} {state} in {reports[-1].seconds:.2f} s".replace("[1/", r"\[1/"))
    passed = all(report.passed for report in reports)
    if as_json:
        print_json({"passed": passed, "problems": [{**dataclasses.asdict(r), "passed": r.passed} for r in reports]})
    else:
        _print_failures(reports)
    if not passed:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def new(
    family: Annotated[str, typer.Argument(help="The family, such as `moe`.")],
    id: Annotated[str, typer.Argument(metavar="pNN", help="A free problem number.")],
    slug: Annotated[str, typer.Argument(help="Words joined by underscores.")],
) -> None:
    """Start a problem: write a module that passes `check` once it is filled in."""
    from metakernelbench.problems.new import write_new_problem

    path = write_new_problem(family, id, slug)
    stdout.print(str(path), markup=False, soft_wrap=True)
    stderr.print(f"fill in what says REPLACE, then run `mkb problems check {id}`")


@app.command()
def measure(
    ids: Ids = None,
    family: Family = None,
    workload: Annotated[str, typer.Option(help="`full` or `smoke`.")] = "full",
    device: Annotated[str, typer.Option(help="`cuda` or `cpu`.")] = "cuda",
    timeout_s: Annotated[float, typer.Option(help="Seconds that one problem may take.")] = 600.0,
) -> None:
    """Measure time and memory of problems here, one JSON line each on stdout. Exit code 1 where one cannot run."""
    if workload not in ("full", "smoke"):
        raise UnknownName("workload", workload, ("full", "smoke"))
    check_device(device)
    from metakernelbench.problems.measure import measure_in_own_process

    failed = False
    for id in chosen_ids(ids, family):
        outcome = measure_in_own_process(id, workload, device, timeout_s)
        if isinstance(outcome, str):
            failed = True
            stderr.print(f"{id} failed: {escape(harmless(outcome))}")
            continue
        stderr.print(f"{id} reference {outcome.reference_ms:.3g} ms, draw {outcome.draw_s:.3g} s")
        sys.stdout.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        sys.stdout.flush()
    if failed:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def table(
    check_only: Annotated[bool, typer.Option("--check", help="Only say whether the page is up to date.")] = False,
) -> None:
    """Bring the tables of docs/problems.md up to date with the modules and the measured records."""
    from metakernelbench.problems.table import read_measurements, render, replace_generated

    generated = render(read_measurements(REPOSITORY / "records" / "h200" / "problems.jsonl"))
    bring_up_to_date(
        REPOSITORY / "docs" / "problems.md",
        lambda page: replace_generated(page, generated),
        "mkb problems table",
        check_only=check_only,
    )


def chosen_ids(ids: list[str] | None, family: str | None) -> list[str]:
    """The problems asked for, in order. Raises `UnknownName` for one that does not exist."""
    families = {family_of(id) for id in problem_ids()}
    if family is not None and family not in families:
        raise UnknownName("family", family, families)
    for id in ids or ():
        source_path(id)
    return [id for id in problem_ids(family) if not ids or id in ids]


def _description(id: str) -> dict[str, Any]:
    """What there is to know about a problem, drawing its smoke workload once."""
    import torch

    from metakernelbench.grading.compare import as_tuple, reference_numerics
    from metakernelbench.problems.catalog import load
    from metakernelbench.problems.roofline import GPUS, bound_seconds

    problem = load(id)
    with reference_numerics():
        inputs = problem.draw("smoke", 0, torch.device("cpu"))
        smoke_inputs = _tensors(inspect.signature(problem.reference).parameters, inputs)
        smoke_outputs = _tensors(problem.outputs, as_tuple(problem.reference(*inputs)))
    cost = problem.cost(problem.workloads["full"])
    return {
        "id": id,
        "family": problem.family,
        "slug": problem.slug,
        "subject": problem.subject,
        "path": problem.path,
        "provenance": dataclasses.asdict(problem.provenance),
        "workloads": {name: dataclasses.asdict(workload) for name, workload in problem.workloads.items()},
        "smoke_inputs": smoke_inputs,
        "smoke_outputs": smoke_outputs,
        "fixed": list(problem.fixed),
        "vectorized": problem.vectorized is not None,
        "cost": {**dataclasses.asdict(cost), "bytes": cost.bytes, "flops": dict(cost.flops)},
        "bound_us": {name: 1e6 * bound_seconds(cost, gpu) for name, gpu in GPUS.items()},
        "measured": _measured(id),
    }


def _tensors(names: Iterable[str], values: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Name, shape and dtype of tensors; of a Python number its type and value."""

    def one(name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, int | float):
            return {"name": name, "shape": [], "dtype": type(value).__name__, "value": value}
        return {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}

    return [one(name, value) for name, value in zip(names, values, strict=True)]


def _measured(id: str) -> dict[str, Any] | None:
    """The measurement of the full workload on an H200, where the checkout has one."""
    from metakernelbench.problems.table import read_measurements

    return read_measurements(REPOSITORY / "records" / "h200" / "problems.jsonl").get(id)


def _print_description(shown: dict[str, Any]) -> None:
    def line(label: str, text: str) -> None:
        stdout.print(f"[bold]{label:<13}[/]{escape(harmless(text))}", soft_wrap=True)

    line(shown["id"], f"{shown['slug']} ({shown['family']})")
    line("subject", shown["subject"])
    for label, text in shown["provenance"].items():
        for part in (text,) if isinstance(text, str) else text or ():
            line(label.replace("source_", ""), part)
    for name, sizes in shown["workloads"].items():
        line(name, ", ".join(f"{field} {value}" for field, value in sizes.items()))
    measured = shown["measured"]
    for name, shape, dtype in measured["inputs"] if measured else ():
        line("full input", f"{name} {shape or ''} {dtype}")
    for label in ("input", "output"):
        for tensor in shown[f"smoke_{label}s"]:
            fixed = ", the same in every draw" if tensor["name"] in shown["fixed"] else ""
            what = tensor["value"] if "value" in tensor else tensor["shape"]
            line(f"smoke {label}", f"{tensor['name']} {what} {tensor['dtype']}{fixed}")
    cost = shown["cost"]
    flops = "".join(f", {count / 1e9:.4g} GFLOP {datatype}" for datatype, count in cost["flops"].items())
    line("cost", f"{cost['bytes_read']} bytes read, {cost['bytes_written']} written{flops}")
    line("bound", ", ".join(f"{us:.1f} µs on {gpu}" for gpu, us in shown["bound_us"].items()))
    line("vectorized", "yes" if shown["vectorized"] else "no")
    if measured:
        line("eager", f"{measured['reference_ms']:.3g} ms on {measured['device']}, torch {measured['torch']}")
    else:
        line("eager", "not measured yet")


def _print_failures(reports: list[CheckReport]) -> None:
    for report in reports:
        for failure in report.failures:
            stdout.print(
                f"[bold]{report.problem}[/] {failure.name}: {escape(harmless(failure.detail))}", soft_wrap=True
            )
    bad = sum(not report.passed for report in reports)
    seconds = sum(report.seconds for report in reports)
    stdout.print(f"{len(reports) - bad} of {len(reports)} problems passed, {bad} failed, in {seconds:.1f} s")
