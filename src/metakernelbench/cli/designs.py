"""`mkb designs`: which designs there are, what each asks, and what it plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from metakernelbench.cli import output
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.experiments.registry import Design

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List and show the designs of experiments.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_EXAMPLE = {"problems": ("p01", "p02", "p44"), "dsls": ("cute", "tirx"), "models": ("a/model", "b/model")}
"""Two problems of one family and one of another, two DSLs, two models: enough for any of ours."""
_SHOWN = 8


@app.command("list")
def list_designs(as_json: Json = False) -> None:
    """List the designs and the question that each answers."""
    from metakernelbench.experiments.registry import design_names, load_design

    rows = [{"name": name, "question": load_design(name).question} for name in design_names()]
    if as_json:
        return output.print_json(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("design", no_wrap=True)
    table.add_column("question")
    for row in rows:
        table.add_row(*(harmless(cell) for cell in row.values()))
    return output.stdout.print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="DESIGN", help="A design, such as `cross-dsl`.")],
    as_json: Json = False,
) -> None:
    """Show a design: its question, its options, where it is from, and what it plans for one cell."""
    from metakernelbench.experiments.registry import load_design

    described = _described(load_design(name))
    if as_json:
        output.print_json(described)
    else:
        _print(described)


def _described(design: Design) -> dict[str, Any]:
    return {
        "name": design.name,
        "question": design.question,
        "description": design.description,
        "origin": design.origin,
        "options": [
            {
                "name": name,
                "type": _name_of(field.annotation),
                "required": field.is_required(),
                "default": None if field.is_required() else field.default,
            }
            for name, field in design.options.model_fields.items()
        ],
        "example": _example(design),
    }


def _name_of(annotation: Any) -> str:
    return annotation.__name__ if type(annotation) is type else str(annotation)


def _example(design: Design) -> dict[str, Any] | None:
    """What the design plans for the first of the example's problems; None where it needs options or something else."""
    from metakernelbench.errors import UserError
    from metakernelbench.experiments.planned import merged

    try:
        plan = merged([design.plan(**_EXAMPLE, replicates=1, options={})])
    except UserError:
        return None
    comparisons = [c for c in plan.comparisons if c.problem == "p01" and c.model == "a/model"]
    return {
        **{name: list(values) for name, values in _EXAMPLE.items()},
        "attempts": len(plan.attempts),
        "comparisons": [
            {"arm": c.arm, "source": c.source, "baseline": c.baseline, "treatment": c.treatment} for c in comparisons
        ],
    }


def _print(described: dict[str, Any]) -> None:
    def say(text: str = "", **style: Any) -> None:
        output.stdout.print(harmless(text), markup=False, soft_wrap=True, **style)

    say(described["name"], style="bold")
    say(described["description"])
    say()
    say(f"from {described['origin']}")
    for option in described["options"]:
        value = "needed" if option["required"] else f"{option['default']!r} where it is left out"
        say(f"option of [options.{described['name']}]: {option['name']} ({option['type']}), {value}")
    if (example := described["example"]) is None:
        return
    say()
    say(
        f"For {len(example['problems'])} problems, {len(example['dsls'])} DSLs and {len(example['models'])} models it "
        f"plans {example['attempts']} attempts. Comparisons at p01 by a/model:"
    )
    for comparison in example["comparisons"][:_SHOWN]:
        say(f"  {comparison['arm']}")
        for role in ("source", "baseline", "treatment"):
            say(f"    {role:<10} {comparison[role] or 'none'}")
    if len(example["comparisons"]) > _SHOWN:
        say(f"  ... and {len(example['comparisons']) - _SHOWN} more; --json lists them")
