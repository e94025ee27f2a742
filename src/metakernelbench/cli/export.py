"""`mkb export`: what we have, in the forms that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from metakernelbench.cli import output
from metakernelbench.cli.devices import check_device
from metakernelbench.errors import UnknownName
from metakernelbench.files import writing
from metakernelbench.text import harmless

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _export() -> None:
    """Write variants as a Harbor dataset, or an experiment as Parquet."""


@app.command()
def harbor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    problem: Annotated[
        list[str] | None, typer.Option("--problem", help="An id or a family; may be repeated. By default all.")
    ] = None,
    dsl: Annotated[list[str] | None, typer.Option("--dsl", help="May be repeated. By default cute and tirx.")] = None,
    device: Annotated[str, typer.Option(help="Where kernels are graded in place: cuda or cpu.")] = "cuda",
    workload: Annotated[str | None, typer.Option(help="full or smoke; by default full on cuda, smoke on cpu.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The name of the GPU that the instruction gives.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (keys: folder, tasks).")] = False,
) -> None:
    """Write variants as a Harbor dataset: `harbor run -p DIR` takes it, its verifier grades in place."""
    from metakernelbench.attempts.dataset import write_dataset
    from metakernelbench.attempts.settings import AttemptSettings

    check_device(device)
    workload = workload or ("full" if device == "cuda" else "smoke")
    if workload not in ("full", "smoke"):
        raise UnknownName("workload", workload, ["full", "smoke"])
    settings = AttemptSettings.model_validate(
        {"device": device, "workload": workload, **({} if gpu is None else {"gpu": gpu})}
    )
    problems = _problems(problem or ["all"])
    with writing(folder, hint="choose another DIR"), output.stderr.status("writing tasks") as status:
        tasks = write_dataset(
            folder, problems, dsl or ["cute", "tirx"], settings, lambda task: status.update(task.folder.name)
        )
    if as_json:
        output.print_json({"folder": str(folder), "tasks": [_as_json(task) for task in tasks]})
        return
    solved = sum(task.has_solution for task in tasks)
    written = f"{len(tasks)} task{'' if len(tasks) == 1 else 's'}"
    for line in (
        f"{written} in {folder}, {solved} of them with a solution to try them out",
        f"harbor run -p {folder} -a AGENT -m MODEL -e ENVIRONMENT",
    ):
        output.stdout.print(harmless(line), markup=False, soft_wrap=True)


def _as_json(task: Any) -> dict[str, Any]:
    return {"name": task.folder.name, "problem": task.problem, "dsl": task.dsl, "has_solution": task.has_solution}


def _problems(names: list[str]) -> list[str]:
    """Ids for ids, families and `all`. Raises `UnknownName`."""
    from metakernelbench.problems.catalog import family_of, problem_ids

    families = dict.fromkeys(family_of(id) for id in problem_ids())
    found: list[str] = []
    for name in names:
        if name == "all":
            found += problem_ids()
        elif name in families:
            found += problem_ids(name)
        elif name in problem_ids():
            found.append(name)
        else:
            raise UnknownName("problem", name, [*problem_ids(), *families, "all"], hint="see `mkb problems list`")
    return list(dict.fromkeys(found))


@app.command()
def parquet(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to; made where there is none.")],
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="The experiment's TOML file, or its name in --store.")
    ],
    store: Annotated[
        str | None, typer.Option(help="Folder or database URL of the store; by default the one the file names.")
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts/--no-texts", help="Also instructions, kernels and skills, in texts.parquet.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (keys: experiment, files).")] = False,
) -> None:
    """Write an experiment as Parquet: attempts, comparisons with measured ratios, submissions, texts."""
    from metakernelbench.analysis.frames import frames_from_store, write_parquet
    from metakernelbench.analysis.texts import write_texts
    from metakernelbench.cli.report import opened

    found, name = opened(experiment, store)
    with found, writing(folder, hint="choose another DIR"), output.stderr.status("writing Parquet"):
        files = write_parquet(frames_from_store(found, name), folder)
        if texts:
            files.append(write_texts(found, name, folder / "texts.parquet"))
    if as_json:
        output.print_json({"experiment": name, "files": [str(path) for path in files]})
        return
    for path in files:
        output.stdout.print(harmless(str(path)), markup=False, soft_wrap=True)
