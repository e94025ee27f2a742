"""The commands of `mkb`: their modules load when they are used, so that `mkb --help` is instant."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from metakernelbench import __version__
from metakernelbench.cli.output import CannotPrint, ExitCode, checked_stdout, report_error
from metakernelbench.errors import MkbError, UnknownName, UserError
from metakernelbench.files import is_state_of_the_machine, refusal

_COMMANDS = {
    "problems": ("problems", "List, show and check the problems of the catalogue."),
    "grade": ("grade", "Grade one kernel.py and say what the verifier makes of it."),
    "redteam": ("redteam", "Try to cheat the verifier in every known way; each must be refused."),
    "witnesses": ("witnesses", "List and grade the honest implementations that this repository ships."),
    "designs": ("designs", "List and show the designs of experiments."),
    "run": ("run", "Run what is missing of an experiment."),
    "status": ("status", "Show how far an experiment has come."),
    "rematch": ("rematch", "Time the kernels of each comparison head to head."),
    "export": ("export", "Write variants as a Harbor dataset, or an experiment as Parquet."),
    "import": ("importing", "Bring experiments of another store into one."),
    "annotate": ("annotate", "Annotate skills and attempts: what they held, how they were used, what went wrong."),
    "report": ("report", "Write an experiment's outcome as one HTML file."),
    "view": ("view", "Serve the same page from a store on this machine, while the experiment runs."),
    "tables": ("tables", "Show an experiment's outcome as tables, or write them as CSV and LaTeX."),
    "figures": ("figures", "Write an experiment's outcome as pictures."),
    "compare": ("compare", "Compare two experiments, or two models of one, variant by variant."),
    "simulate": ("simulate", "Write a study made by chance, of known effect, to try reports and analyses on."),
    "task": ("task", "Write what an agent is given as a folder, or sit in its sandbox."),
    "docs": ("docs", "Make the offline documentation of a DSL."),
    "doctor": ("doctor", "Say what this machine can do, and what is missing for the rest."),
}
"""Command → (module under `metakernelbench.cli` that defines `app`, help line)."""


class _LazyGroup(TyperGroup):
    """A group that knows its commands' help lines and imports a command's module only to run it."""

    listing = False
    """Whether the help of the group is being printed, which needs no command's module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        super().format_help(ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            raise UnknownName("command", cmd_name, _COMMANDS, hint="`mkb --help` lists all of them")
        module, help_line = _COMMANDS[cmd_name]
        sub_app = (
            _help_only(help_line) if self.listing else importlib.import_module(f"metakernelbench.cli.{module}").app
        )
        command = typer.main.get_command(sub_app)
        command.name, command.short_help = cmd_name, help_line
        return command


def _help_only(help_line: str) -> typer.Typer:
    """Stands in for a command in the list that `mkb --help` prints."""
    stand_in = typer.Typer(add_completion=False)
    stand_in.command(help=help_line)(lambda: None)
    return stand_in


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"mkb {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """MetaKernelBench: does what one attempt at a GPU kernel learned help a fresh attempt in another kernel DSL?"""


_Misused: Any = typer.BadParameter.__base__
"""What Typer raises for a missing argument, an unknown option or a value of the wrong kind."""


def run(arguments: list[str]) -> Any:
    """Run the command line and return its exit code. A `MkbError` becomes one message and an exit code, and so does a
    disk that is full; anything else is our bug and shows."""
    try:
        with checked_stdout():
            return _run(arguments, as_json="--json" in arguments)
    except CannotPrint as error:
        with suppress(OSError):  # standard error may be on the same disk
            report_error(error, as_json=False)
        return ExitCode.USAGE


def _check_none_is_empty(arguments: list[str]) -> None:
    """An empty path would be taken for the current folder; most often it is a variable of a shell that is not set."""
    for place, argument in enumerate(arguments):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            command = " ".join(["mkb", *arguments[:place], argument or "''"])
            raise UserError(f"nothing is given at the end of `{command}`", hint="is a variable of the shell not set?")


def _run(arguments: list[str], *, as_json: bool) -> Any:
    try:
        _check_none_is_empty(arguments)
        return app(arguments, standalone_mode=not as_json)  # alone, Typer itself prints what was misused, as text
    except CannotPrint:
        raise
    except MkbError as error:
        return report_error(error, as_json=as_json)
    except _Misused as error:
        return report_error(UserError(error.format_message()), as_json=as_json)
    except OSError as error:
        if not is_state_of_the_machine(error):
            raise
        return report_error(refusal(error), as_json=as_json)
