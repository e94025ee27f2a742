"""`mkb simulate`: a study made by chance, in a store, to try reports and analyses on."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from metakernelbench.cli import output
from metakernelbench.errors import UserError

app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    store: Annotated[str, typer.Argument(help="Folder of the store to write to; made where it is missing.")],
    name: Annotated[str, typer.Option(help="Name of the experiment.")] = "simulated",
    problems: Annotated[int, typer.Option(min=1, max=74, help="How many problems of the catalogue.")] = 74,
    models: Annotated[int, typer.Option(min=1, max=26)] = 6,
    replicates: Annotated[int, typer.Option(min=1, max=1000)] = 1,
    designs: Annotated[
        list[str] | None, typer.Option("--design", help="May be repeated; by default `cross-dsl` alone.")
    ] = None,
    effect: Annotated[float, typer.Option(min=-3, max=3, help="Mean of ln ρ where both arms pass.")] = 0.1,
    noise: Annotated[
        float, typer.Option(min=0, max=3, help="Standard deviation of ln time between attempts at one variant.")
    ] = 0.2,
    fail: Annotated[float, typer.Option(min=0, max=0.99, help="Share of attempts that fail.")] = 0.3,
    skip: Annotated[float, typer.Option(min=0, max=1, help="Share of solo attempts that keep no skill.")] = 0.05,
    unfinished: Annotated[float, typer.Option(min=0, max=1, help="Share of attempts without a record.")] = 0.0,
    rematched: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the comparisons of two passing kernels timed head to head.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same study.")] = 1,
) -> None:
    """Write a study of known effect, noise and skip rate, with texts of a realistic size; every verdict says so."""
    from rich.progress import Progress

    from metakernelbench.analysis.simulate import World, write_study
    from metakernelbench.attempts.attempt import fingerprint
    from metakernelbench.store.store import Store

    world = World(
        problems=problems,
        models=models,
        replicates=replicates,
        designs=tuple(designs or ["cross-dsl"]),
        effect=effect,
        problem_effect=abs(effect),
        noise=noise,
        fail=fail,
        skip=skip,
        unfinished=unfinished,
        rematched=rematched,
        texts=True,
    )
    with Store.open(store, create=True) as opened, Progress(console=output.stderr, transient=True) as progress:
        if name in opened.experiments():
            raise UserError(f"{store} already has an experiment `{name}`", hint="give another --name")
        task = progress.add_task("writing attempts", total=None)
        write_study(
            world,
            seed,
            opened,
            name,
            fingerprint=fingerprint,
            saved=lambda done, of: progress.update(task, completed=done, total=of),
        )
    output.stdout.print(shlex.join(["mkb", "report", name, "--store", store]), markup=False, soft_wrap=True)
