"""`mkb task`: what an agent is given, as a folder or as a sandbox to sit in."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from metakernelbench.cli import output
from metakernelbench.cli.devices import check_device
from metakernelbench.cli.output import ExitCode
from metakernelbench.cli.submissions import read_kernel
from metakernelbench.errors import UnknownName, UserError
from metakernelbench.files import replaced_folder, writing
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.attempts.settings import AttemptSettings

app = typer.Typer(add_completion=False, no_args_is_help=True)

Problem = Annotated[str, typer.Argument(help="Problem id, such as p28.")]
Dsl = Annotated[str, typer.Option("--dsl", help="The DSL: cute, tirx, triton, ...")]
Device = Annotated[
    str | None, typer.Option(help="Where submissions are graded, cpu (smoke workload) or cuda (full workload).")
]


@app.callback()
def _task() -> None:
    """What an agent is given."""


@app.command()
def build(
    problem: Problem,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder, or that of an older task.")],
    dsl: Dsl,
    device: Device = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (keys: folder, files, bytes, digest).")] = False,
) -> None:
    """Write the Harbor task of a variant, with its documentation: `harbor run -p DIR` takes it."""
    from metakernelbench.attempts.task import digest, task_files, write_task
    from metakernelbench.dsls import dsl as dsls
    from metakernelbench.dsls.docs import build as docs

    settings = _settings(dsl, device or "cuda")
    files = task_files(problem, dsl, settings, None)
    _check_replaceable(folder, {name.partition("/")[0] for name in files})
    with output.stderr.status("making the documentation"):
        documentation = docs.build(dsls.load(dsl)).folder
    with writing(folder, hint="name another folder"), replaced_folder(folder) as unfinished:
        write_task(files, unfinished, documentation, copy=True)
    written = [path for path in folder.rglob("*") if path.is_file()]
    facts = {"files": len(written), "bytes": sum(path.stat().st_size for path in written)}
    if as_json:
        output.print_json({"folder": str(folder), **facts, "digest": digest(files)})
        return
    output.stdout.print(
        f"{problem} in {dsls.load(dsl).title}: {facts['files']} files, {facts['bytes'] / 1e6:.1f} MB in "
        f"{escape(harmless(str(folder)))}\nread {escape(harmless(str(folder / 'instruction.md')))} first",
        soft_wrap=True,
    )


@app.command(name="try")
def try_(
    problem: Problem,
    dsl: Dsl,
    device: Device = None,
    kernel: Annotated[Path | None, typer.Option(help="A file to begin with, as /app/kernel.py.")] = None,
    run: Annotated[
        str | None, typer.Option(help="Run this command line instead of a shell, and leave with its exit status.")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="bubblewrap, or host, which isolates nothing.")] = "bubblewrap",
) -> None:
    """Sit in the sandbox of a variant as an agent does: same files, tools, limits and clock. Leave with `exit`."""
    if kernel is not None and not kernel.is_file():
        raise UserError(f"`{kernel}` is no file")
    from metakernelbench.attempts.agents.models import OWN_SANDBOXES

    if sandbox not in OWN_SANDBOXES:
        raise UnknownName("sandbox of ours", sandbox, OWN_SANDBOXES)
    settings = _settings(dsl, device or _default_device(dsl), sandbox=sandbox)
    source = None if kernel is None else read_kernel(kernel)
    raise typer.Exit(asyncio.run(_try(problem, dsl, settings, source, run)))


async def _try(problem: str, dsl: str, settings: AttemptSettings, kernel: bytes | None, command: str | None) -> int:
    from metakernelbench.attempts.agents.models import check_sandbox
    from metakernelbench.attempts.trying import interact, opened
    from metakernelbench.judging.local import LocalJudge

    check_sandbox(settings)
    with tempfile.TemporaryDirectory(prefix="mkb-try-") as folder:
        async with (
            LocalJudge(settings.device) as judge,
            opened(problem, dsl, settings=settings, judge=judge, kernel=kernel, folder=Path(folder)) as environment,
        ):
            if command is not None:
                done = await environment.exec(command)
                output.stdout.print(harmless(f"{done.stdout}{done.stderr}"), markup=False, end="", soft_wrap=True)
                return int(done.return_code)
            output.stderr.print(
                f"{problem} in {dsl}: the sandbox of an agent, on the {settings.workload} workload, graded on "
                f"{settings.device}. Its files go when you leave."
            )
            await interact(environment)
            return ExitCode.OK


def _default_device(dsl: str) -> str:
    """A GPU where there is one, or where the DSL needs one: without it a person can look, and not submit."""
    from metakernelbench.dsls.dsl import load

    return "cuda" if Path("/dev/nvidiactl").exists() or "cpu" not in load(dsl).devices else "cpu"


def _settings(dsl: str, device: str, **settings: str) -> AttemptSettings:
    from metakernelbench.attempts.settings import AttemptSettings
    from metakernelbench.dsls.dsl import load

    check_device(device)
    language = load(dsl)
    if device not in language.devices:
        runs_on = " and ".join(sorted(language.devices))
        raise UserError(f"{language.title} kernels run on {runs_on}, not on {device}")
    workload = "full" if device == "cuda" else "smoke"
    return AttemptSettings.model_validate({"device": device, "workload": workload, **settings})


def _check_replaceable(folder: Path, parts: Set[str]) -> None:
    """A folder that holds anything but an older task of ours, of these `parts`, is not touched."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"`{folder}` is no folder")
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if held and not _is_task(folder / "task.toml"):
        raise UserError(f"`{folder}` holds something that is no task of ours", hint="name a new or empty folder")
    if added := sorted(held - parts):
        raise UserError(f"`{folder}` holds `{added[0]}`, which is no part of a task", hint="name a new or empty folder")


def _is_task(path: Path) -> bool:
    return path.is_file() and 'name = "metakernelbench/' in path.read_text(errors="replace")
