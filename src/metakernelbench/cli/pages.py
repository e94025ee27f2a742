"""Pages of docs/ of which a part is generated: bring one up to date, or say whether it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from metakernelbench.cli.output import ExitCode, stderr
from metakernelbench.errors import UserError
from metakernelbench.files import write_whole


def bring_up_to_date(page: Path, renewed: Callable[[str], str], command: str, *, check_only: bool) -> None:
    """Write a page anew where it differs; with `check_only` leave it, and leave with 1. `command` does the writing."""
    if not page.exists():
        raise UserError(f"{page} does not exist", hint="run this from a checkout of the repository")
    before, name = page.read_text(encoding="utf-8"), f"docs/{page.name}"
    after = renewed(before)
    if before == after:
        stderr.print(f"{name} is up to date")
    elif check_only:
        stderr.print(f"{name} is out of date: run `{command}`")
        raise typer.Exit(ExitCode.FAILED)
    else:
        write_whole(page, after.encode())
        stderr.print(f"{name} is written")
