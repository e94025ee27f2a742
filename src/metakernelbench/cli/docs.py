"""`mkb docs`: the offline documentation that an agent finds in /docs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from metakernelbench.cli import output

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _docs() -> None:
    """Offline documentation of the kernel languages."""


@app.command()
def build(
    dsl: Annotated[str, typer.Option("--dsl", help="The DSL: cute, tirx, triton, ...")],
    again: Annotated[bool, typer.Option("--again", help="Make it anew even where it is in the cache.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (keys: folder, pages, bytes, seconds, fingerprint).")
    ] = False,
) -> None:
    """Make the documentation of a DSL from its installed packages. Attempts do this by themselves where it is
    needed."""
    from metakernelbench.dsls.docs.build import build, fingerprint
    from metakernelbench.dsls.dsl import load

    language = load(dsl)
    with output.stderr.status(f"reading the packages of {language.title}"):
        made = build(language, again=again)
    if as_json:
        facts = {"pages": made.pages, "bytes": made.bytes, "seconds": round(made.seconds, 2)}
        output.print_json({"folder": str(made.folder), **facts, "fingerprint": fingerprint(language)})
        return
    how = f"made in {made.seconds:.1f} s" if made.seconds else "was in the cache"
    output.stdout.print(
        f"{language.title}: {made.pages} pages, {made.bytes / 1e6:.1f} MB, {how}\n"
        f"begin with {escape(str(made.folder / 'index.md'))}",
        soft_wrap=True,
    )
