"""How commands that read an outcome are told which: an experiment's file, its name and its store, or an export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metakernelbench.errors import UnknownName, UserError

if TYPE_CHECKING:
    from metakernelbench.analysis.frames import Frames

EXPERIMENT_HELP = "The experiment's TOML file, its name in --store, or a folder that `mkb export parquet` wrote."
StoreOption = Annotated[
    str | None, typer.Option("--store", help="Folder or database URL of the store; by default the one the file names.")
]
DesignOption = Annotated[
    str | None,
    typer.Option("--design", help="Of several designs, the one to read: DESIGN, or DESIGN:ARM for one of its arms."),
]
RatiosOption = Annotated[
    str, typer.Option("--ratios", help="`measured`: head to head where that was measured; `medians`: never.")
]
ForgiveOption = Annotated[
    list[str] | None,
    typer.Option("--forgive", help="Count violations of this rule as passes; `all` for every rule. May be repeated."),
]


def study(
    experiment: str,
    store: str | None,
    *,
    design: str | None = None,
    ratios: str = "measured",
    forgive: list[str] | None = None,
) -> Frames:
    """The outcome as it is asked for. Raises `UserError` for what does not exist."""
    found = frames(experiment, store)
    if design is not None:
        found = _asking(found, design)
    if forgive:
        found = found.forgiving(_codes(forgive, found))
    match ratios:
        case "measured" | "medians":
            return found.with_ratios(ratios)
    raise UserError(f"--ratios is `{ratios}`; allowed: `measured`, `medians`")


def _asking(found: Frames, question: str) -> Frames:
    design, _, arm = question.partition(":")
    designs = {name for name, _ in found.contrasts}
    if design not in designs:
        raise UnknownName("design of this experiment", design, designs)
    arms = {name for of, name in found.contrasts if of == design}
    if arm and arm not in arms:
        raise UnknownName(f"arm of `{design}`", arm, arms, hint="the table `questions` lists all")
    return found.asking(design, arm or None)


def frames(experiment: str, store: str | None) -> Frames:
    """The outcome as it stands."""
    from metakernelbench.analysis.frames import frames_from_store, read_parquet
    from metakernelbench.cli.report import opened

    if store is None and Path(experiment).is_dir():
        return read_parquet(Path(experiment))
    source, name = opened(experiment, store)
    with source:
        return frames_from_store(source, name)


def _codes(forgive: list[str], found: Frames) -> frozenset[str]:
    from metakernelbench.grading.codes import DEPENDENCE_CODES, RULE_CODES

    if "all" in forgive:
        return frozenset(found.violations)
    known = RULE_CODES.keys() | DEPENDENCE_CODES.keys()
    for code in forgive:
        if code not in known:
            raise UnknownName(
                "rule", code, known, hint="`mkb tables EXPERIMENT rules` lists those that decide anything"
            )
    return frozenset(forgive)
