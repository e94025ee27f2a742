"""A table: a frame, the columns to show of it and how, and its forms for a page, a terminal, a spreadsheet and a paper.

Numbers stay unrounded in the frame and in JSON and CSV; rounding happens where text for people is made, and only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from metakernelbench.analysis.metrics import Metric
from metakernelbench.analysis.resampling import Estimate, Request, estimate_all
from metakernelbench.text import harmless

type Kind = Literal["text", "count", "share", "lift", "factor", "number", "correlation", "p"]

MISSING = "–"
"""Shown for what is undefined or not known: never a zero."""
_PERCENT = "\u00a0%"
"""With a space that does not break."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table as people see it."""

    name: str
    title: str
    kind: Kind = "text"
    interval: bool = False
    """Whether `<name>_low` and `<name>_high` are its 95 % interval."""
    meaning: str = ""
    optional: bool = False
    """Whether it is left out where it is zero or missing throughout."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of the outcome."""

    name: str
    title: str
    note: str
    columns: tuple[Column, ...]
    frame: pl.DataFrame

    def cells(self) -> list[list[str]]:
        """What people read, row by row: the estimate, and its interval in brackets."""
        return [[cell(column, row) for column in self.shown] for row in self.frame.iter_rows(named=True)]

    @property
    def shown(self) -> tuple[Column, ...]:
        """The columns without the optional ones that say nothing in any row."""
        return tuple(c for c in self.columns if not c.optional or self.frame[c.name].fill_null(0).sum() != 0)

    def first(self, rows: int) -> Table:
        """The table cut off after so many rows, and saying so."""
        left_out = self.frame.height - rows
        if left_out <= 0:
            return self
        return replace(self, frame=self.frame.head(rows), note=f"{self.note} {left_out:,} more rows are not shown.")

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every number unrounded, None where undefined."""
        return {"name": self.name, "title": self.title, "note": self.note, "rows": self.frame.to_dicts()}

    def to_csv(self) -> str:
        return self.frame.write_csv()

    def to_rich(self, width: int | None = None) -> Any:
        """For a terminal: title above, note below, numbers to the right. Where a line would be longer than `width`
        characters, intervals stand below their estimates; None is for where lines may have any length."""
        from rich.table import Table as RichTable
        from rich.text import Text

        rows = [[harmless(text) for text in row] for row in self.cells()]
        heads = [harmless(column.title) for column in self.shown]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        needed = sum(widths) + 2 * (len(widths) - 1)
        if width is not None and needed > width:
            rows = [[text.replace(" [", "\n[") for text in row] for row in rows]
        shown = RichTable(
            title=Text(harmless(self.title), style="bold"),
            caption=Text(harmless(self.note)),
            box=None,
            pad_edge=False,
            title_justify="left",
            caption_justify="left",
            width=needed if width is None else None,
        )
        for column, head in zip(self.shown, heads, strict=True):
            shown.add_column(Text(head), justify="left" if column.kind == "text" else "right")
        for row in rows:
            shown.add_row(*map(Text, row))
        return shown

    def to_latex(self) -> str:
        """A booktabs table with caption and label; the note is its last row."""
        alignment = "".join("l" if column.kind == "text" else "r" for column in self.shown)
        head = " & ".join(_latex(column.title) for column in self.shown)
        body = [" & ".join(map(_latex, row)) + r" \\" for row in self.cells()]
        return "\n".join(
            [
                "% needs booktabs and UTF-8",
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(self.title)}. {_latex(self.note)}}}",
                rf"\label{{tab:{self.name}}}",
                rf"\begin{{tabular}}{{{alignment}}}",
                r"\toprule",
                head + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


_LATEX = str.maketrans(
    {c: rf"\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "\u00a0": "~",
        "^": r"\textasciicircum{}",
        "−": "$-$",
        "×": r"$\times$",
        "<": "$<$",
        ">": "$>$",
        "Δ": r"$\Delta$",
        "ρ": r"$\rho$",
        "→": r"$\to$",
        "⇄": r"$\leftrightarrow$",
        "–": "--",
    }
)


def _latex(text: str) -> str:
    return harmless(text).replace("\n", " ").translate(_LATEX)


def cell(column: Column, row: dict[str, Any]) -> str:
    """The text of one cell: `12.5 % [8.1, 17.0]`, the unit once."""
    shown = number(row[column.name], column.kind)
    low, high = row.get(f"{column.name}_low"), row.get(f"{column.name}_high")
    if not column.interval or low is None or high is None:
        return shown
    bounds = ", ".join(number(bound, column.kind).removesuffix(_PERCENT).removesuffix("×") for bound in (low, high))
    return f"{shown} [{bounds}]"


def number(value: Any, kind: Kind) -> str:  # noqa: PLR0911 (one line a kind)
    """A value as people read it: 0.125 as a lift is `+12.5 %`, as a share `12.5 %`, as a factor `0.125×`."""
    match kind:
        case _ if value is None:
            return MISSING
        case "text":
            return str(value)
        case "count":
            return f"{value:,}"
        case "share":
            return f"{100 * value:.1f}{_PERCENT}"
        case "lift":
            return f"{100 * value:+.1f}{_PERCENT}".replace("-", "−")
        case "factor":
            return f"{value:.3g}×"
        case "correlation":
            return f"{value:+.2f}".replace("-", "−")
        case "p":
            return "< 0.001" if value < 0.001 else f"{value:.3f}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def estimates(
    frame: pl.DataFrame, column: str, metrics: Sequence[Metric], by: Sequence[str] = (), *, count: str = "n"
) -> pl.DataFrame:
    """The metrics of a column for every group: value, interval, and from how many rows and problems.

    `frame` has judged rows only. A null in `column` becomes NaN, which is how the metrics know a fail. Groups come in
    the order of their first row.
    """
    groups = frame.partition_by(by, as_dict=True, maintain_order=True) if by else {(): frame}
    found = iter(estimate_all([request for group in groups.values() for request in _requests(group, column, metrics)]))
    rows = []
    for key, group in groups.items():
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        row |= {count: group.height, "problems": group["problem"].n_unique()}
        for metric in metrics:
            row |= _flat(metric.name, next(found))
        rows.append(row)
    return pl.DataFrame(rows, schema=_schema(by, count, metrics))


def _requests(group: pl.DataFrame, column: str, metrics: Sequence[Metric]) -> list[Request]:
    values = group[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    problems = problem_codes(group)
    return [Request(metric=metric, column=values, problem=problems) for metric in metrics]


def _schema(by: Sequence[str], count: str, metrics: Sequence[Metric]) -> dict[str, type[pl.DataType]]:
    names = [f"{metric.name}{part}" for metric in metrics for part in ("", "_low", "_high")]
    return dict.fromkeys(by, pl.String) | {count: pl.Int64, "problems": pl.Int64} | dict.fromkeys(names, pl.Float64)


def problem_codes(frame: pl.DataFrame) -> npt.NDArray[np.int64]:
    """The problems as integers, in the order of their names."""
    return frame["problem"].rank("dense").cast(pl.Int64).to_numpy()


def _flat(name: str, result: Estimate) -> dict[str, float | None]:
    return {name: result.value, f"{name}_low": result.low, f"{name}_high": result.high}


def metric_columns(metrics: Sequence[Metric]) -> tuple[Column, ...]:
    """The columns of `estimates`, with the kind that each metric is shown as."""
    kinds: dict[str, Kind] = {"GM": "factor", "lift": "lift"}
    return tuple(
        Column(
            name=metric.name,
            title=metric.title,
            kind=kinds.get(metric.name, "share"),
            interval=True,
            meaning=metric.meaning,
        )
        for metric in metrics
    )
