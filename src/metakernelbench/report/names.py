"""The addresses of a report's pages: what stands after `#`, and in which part of the report the page is kept.

    overview  comparisons  tables  pictures
    model-<words>-<digest>       family-<words>-<digest>       model-<…>--family-<…>
    problem-p03
    variant-p03-cute-<digest>    what every attempt at a variant was told
    p03-<model>-0-<digest>.cute-to-tirx-<digest>      a comparison, kept in the part of its cell
    p03-<model>-0-<digest>.cute-solo-<digest>         an attempt

What stands before the first dot names the part. Words are for people; digests keep apart what the words do not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metakernelbench.experiments.designs import PlannedAttempt


@dataclass(frozen=True, kw_only=True)
class Link:
    """A page, by its address, and what to call it."""

    anchor: str
    text: str


def words(text: str) -> str:
    """The letters and digits of a name, joined by hyphens; never empty, at most 40 characters."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40].strip("-") or "x"


def digest(text: str) -> str:
    """Six hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:6]


def problem(name: str) -> str:
    """The page of a problem."""
    return f"problem-{words(name)}"


def model(name: str) -> str:
    """The page of a model."""
    return f"model-{words(name.rsplit('/', 1)[-1])}-{digest(name)}"


def family(name: str) -> str:
    """The page of a family."""
    return f"family-{words(name)}-{digest(name)}"


def scope(of_model: str | None, of_family: str | None) -> str:
    """The page of a model, of a family, or of a family with one model; the overview for neither."""
    pages = ([model(of_model)] if of_model is not None else []) + ([family(of_family)] if of_family is not None else [])
    return "--".join(pages) or "overview"


def cell(problem: str, model: str, replicate: int) -> str:
    """The part that holds what one model did at one problem once."""
    short = words(model.rsplit("/", 1)[-1])
    return f"{words(problem)}-{short}-{replicate}-{digest(f'{problem} {model} {replicate}')}"


def variant(problem: str, dsl: str) -> str:
    """The part that holds what every attempt at a variant was told."""
    return f"variant-{words(problem)}-{words(dsl)}-{digest(f'{problem} {dsl}')}"


def attempt(planned: PlannedAttempt) -> str:
    """The page of an attempt."""
    place = cell(planned.problem, planned.model, planned.replicate)
    return f"{place}.{words(planned.dsl)}-{words(planned.label)}-{digest(planned.key)}"


def comparison(row: Mapping[str, Any]) -> str:
    """The page of a comparison, from its row in the frame of comparisons."""
    place = cell(row["problem"], row["model"], row["replicate"])
    ends = f"{words(row['source_dsl'])}-to-{words(row['target_dsl'])}"
    asked = " ".join(row[name] for name in ("design", "arm", "baseline", "treatment"))
    return f"{place}.{ends}-{digest(asked)}"


def part_of(anchor: str) -> str:
    """The part of the report that holds a page."""
    return anchor.split(".", 1)[0]
