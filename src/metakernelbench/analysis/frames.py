"""A study as frames: everything that tables and pictures are made from, small enough to keep, filter and send.

frames_of(plan, records)         from records in memory
frames_from_store(store, name)   from a store, without reading its large texts
write_parquet / read_parquet     three files: attempts, comparisons, submissions
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import polars as pl

from metakernelbench.analysis.comparisons import (
    MEASURED,
    attempts_frame,
    comparisons_frame,
    forgiving,
    judge,
    submissions_frame,
)
from metakernelbench.analysis.metrics import BAND
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.errors import UserError
from metakernelbench.experiments.designs import Plan
from metakernelbench.files import write_whole
from metakernelbench.problems import catalog
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.rematches import Rematch

if TYPE_CHECKING:
    from metakernelbench.store.store import Store

type Ratios = Literal["measured", "medians"]


@dataclass(frozen=True, kw_only=True)
class Frames:
    """An experiment as it stands. `analysis/comparisons.py` says what the columns are."""

    name: str
    attempts: pl.DataFrame
    comparisons: pl.DataFrame
    submissions: pl.DataFrame
    band: float = BAND

    @cached_property
    def contrasts(self) -> list[tuple[str, str]]:
        """The questions asked, as (design, arm), the main one first: a skill from another DSL, where that is asked."""
        found = list(self.comparisons.select("design", "arm").unique(maintain_order=True).iter_rows())
        return sorted(found, key=lambda contrast: (contrast != MAIN, contrast[0] == "retry"))

    @cached_property
    def main(self) -> pl.DataFrame:
        """The comparisons of the main question."""
        return self.contrast(*self.contrasts[0]) if self.contrasts else self.comparisons

    def contrast(self, design: str, arm: str) -> pl.DataFrame:
        """The comparisons that answer one question."""
        return self.comparisons.filter((pl.col("design") == design) & (pl.col("arm") == arm))

    def asking(self, design: str, arm: str | None = None) -> Self:
        """Only the comparisons of one design, or of one of its arms."""
        asked = pl.col("design") == design
        if arm is not None:
            asked &= pl.col("arm") == arm
        return replace(self, comparisons=self.comparisons.filter(asked))

    def of_model(self, model: str) -> Self:
        """Only the attempts of one model, and the comparisons of its attempts."""
        attempts = self.attempts.filter(pl.col("model") == model)
        return replace(
            self,
            attempts=attempts,
            comparisons=self.comparisons.filter(pl.col("model") == model),
            submissions=self.submissions.join(attempts.select("key"), on="key", how="semi"),
        )

    def forgiving(self, codes: frozenset[str]) -> Self:
        """The study with violations of these rules counted as passes."""
        attempts = forgiving(self.attempts, codes)
        return replace(self, attempts=attempts, comparisons=judge(self.comparisons, attempts))

    def with_ratios(self, ratios: Ratios) -> Self:
        """The study with every paired ratio from the two gradings, or measured head to head where it was."""
        column = "rho" if ratios == "measured" else "rho_medians"
        return replace(self, comparisons=self.comparisons.with_columns(rho=pl.col(column)))

    @property
    def measured(self) -> int:
        """How many of the main comparisons have their ratio from a head-to-head measurement."""
        return int((self.main["rho_from"] == MEASURED).sum())

    @property
    def violations(self) -> list[str]:
        """The rules that somebody broke with a kernel that was right and timed."""
        broken = self.attempts["violations"].drop_nulls()
        return sorted({code for each in broken for code in each.split(",")})


MAIN = ("cross-dsl", "skill")


def frames_of(
    plan: Plan,
    records: Mapping[str, AttemptRecord],
    *,
    name: str = "study",
    rematches: Iterable[Rematch] = (),
    kernels: Mapping[str, str | None] | None = None,
    band: float = BAND,
    family_of: Callable[[str], str] = catalog.family_of,
) -> Frames:
    """The frames of a plan and of what its attempts have left.

    Rematches of kernels that are no longer there, because an attempt ran again, are left out; `kernels` are the digests
    of the present ones, where the records hold none.
    """
    rematches = list(rematches)
    if kernels is None:
        compared = {key for rematch in rematches for key in (rematch.baseline, rematch.treatment)}
        texts = {key: records[key].kernel for key in compared if key in records}
        kernels = {key: None if text is None else digest_of(text) for key, text in texts.items()}
    attempts = attempts_frame(plan, records, family_of)
    return Frames(
        name=name,
        attempts=attempts,
        comparisons=comparisons_frame(plan, attempts, [each for each in rematches if _fits(each, kernels)]),
        submissions=submissions_frame(records),
        band=band,
    )


def _fits(rematch: Rematch, kernels: Mapping[str, str | None]) -> bool:
    present = kernels.get(rematch.baseline), kernels.get(rematch.treatment)
    return present == (rematch.baseline_sha256, rematch.treatment_sha256)


def frames_from_store(store: Store, name: str) -> Frames:
    """The frames of an experiment in a store; its large texts are not read. Raises `UnknownName`."""
    experiment = store.experiment(name)
    rematches = list(store.rematches.of(name).values())
    compared = {key for rematch in rematches for key in (rematch.baseline, rematch.treatment)}
    return frames_of(
        experiment.plan,
        dict(store.outlines(name)),
        name=name,
        rematches=rematches,
        kernels=store.digests(name, "kernel", compared),
        band=experiment.spec.indifference_band,
    )


_FILES = ("attempts", "comparisons", "submissions")
_ABOUT = "study.json"


def write_parquet(study: Frames, folder: Path) -> list[Path]:
    """The frames as files in a folder: attempts, comparisons and submissions as Parquet, name and band as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        write_frame(getattr(study, name), folder / f"{name}.parquet")
    write_whole(folder / _ABOUT, f"{json.dumps({'name': study.name, 'band': study.band})}\n".encode())
    return [folder / f"{name}.parquet" for name in _FILES] + [folder / _ABOUT]


def write_frame(frame: pl.DataFrame, path: Path) -> None:
    """A frame as Parquet, whole or not at all."""
    written = io.BytesIO()  # Polars itself would leave half a file, and say of a full disk that it cannot compute
    frame.write_parquet(written)
    write_whole(path, written.getvalue())


def _check_columns(study: Frames) -> None:
    """Raise `ValueError` for frames that lack a column, or have one of another type."""
    empty = frames_of(Plan(attempts=(), comparisons=()), {})
    for name in _FILES:
        columns = getattr(study, name).schema
        for column, kind in getattr(empty, name).schema.items():
            if column not in columns:
                raise ValueError(f"{name}.parquet has no column `{column}`")
            if columns[column] != kind:
                raise ValueError(f"`{column}` in {name}.parquet is {columns[column]}, not {kind}")


def read_parquet(folder: Path) -> Frames:
    """What `write_parquet` wrote. Raises `UserError` for a folder that does not hold it."""
    try:
        about = json.loads((folder / _ABOUT).read_text())
        frames = {name: pl.read_parquet(folder / f"{name}.parquet") for name in _FILES}
        found = Frames(name=str(about["name"]), band=float(about["band"]), **frames)
        _check_columns(found)
        return found
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise UserError(
            f"{folder} holds no exported study: {error}", hint="`mkb export parquet DIR EXPERIMENT` writes one"
        ) from error
