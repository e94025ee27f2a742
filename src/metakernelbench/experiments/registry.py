"""Finds designs by name, ours and anyone's, through the entry-point group `metakernelbench.designs`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from metakernelbench.errors import MkbError, SpecError, UnknownName, UserError
from metakernelbench.experiments.planned import Plan

GROUP = "metakernelbench.designs"

type DesignFunction = Callable[..., Plan]
"""(problems, DSLs, models, replicates, and options as keywords) → plan."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A design under its name."""

    name: str
    function: DesignFunction
    origin: str
    """Where it is from: `metakernelbench.experiments.designs:cross_dsl`."""

    @property
    def question(self) -> str:
        """The question it answers: the docstring's first sentence."""
        first = " ".join(self.description.split("\n\n")[0].split())
        return first[: first.index("?") + 1] if "?" in first else first

    @property
    def description(self) -> str:
        """The docstring."""
        return inspect.getdoc(self.function) or "It says nothing of itself."

    @cached_property
    def options(self) -> type[BaseModel]:
        """The design's own keywords, as a model that checks them."""
        try:
            parameters = inspect.signature(self.function, eval_str=True).parameters.values()
        except (NameError, TypeError, ValueError) as error:
            raise UserError(f"the options of the design `{self.name}` cannot be read: {error}") from error
        fields: dict[str, Any] = {
            option.name: (
                Any if option.annotation is option.empty else option.annotation,
                ... if option.default is option.empty else option.default,
            )
            for option in parameters
            if option.kind is option.KEYWORD_ONLY
        }
        return create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that the design is called with. Raises `SpecError` for one that is unknown, missing or wrong."""
        try:  # as JSON, so that a list will do for a tuple, and yet strictly: "3" is no number
            checked = self.options.model_validate_json(json.dumps(options, default=str), strict=True)
        except ValidationError as error:
            raise SpecError(
                "\n".join(self._what_is_wrong(mistake) for mistake in error.errors(include_url=False)),
                hint=f"`mkb designs show {self.name}` lists its options",
            ) from error
        return {name: getattr(checked, name) for name in self.options.model_fields}

    def _what_is_wrong(self, mistake: ErrorDetails) -> str:
        table, keys = f"[options.{self.name}]", [str(part) for part in mistake["loc"]]
        if mistake["type"] == "missing":
            return f"the design `{self.name}` needs `{keys[0]}` in {table}"
        if mistake["type"] == "extra_forbidden" and self.options.model_fields:
            return f"{table}: {UnknownName('option', keys[0], self.options.model_fields).message}"
        if mistake["type"] == "extra_forbidden":
            return f"{table}: the design `{self.name}` has no options, so no `{keys[0]}`"
        allowed = mistake["msg"].removeprefix("Input should be ").replace("a valid array", "a list")
        return f"{table}: `{'.'.join(keys)}` is {json.dumps(mistake['input'])}; allowed: {allowed}"

    def plan(
        self,
        problems: Sequence[str],
        dsls: Sequence[str],
        models: Sequence[str],
        replicates: int,
        options: Mapping[str, Any],
    ) -> Plan:
        """What the design asks for. Raises `UserError`, also where the design itself fails."""
        checked = self.checked(options)
        try:
            plan = self.function(problems, dsls, models, replicates, **checked)
        except MkbError:
            raise
        except Exception as error:
            raise UserError(
                f"the design `{self.name}` ({self.origin}) failed: {type(error).__name__}: {error}",
                hint="this is a mistake in the design, not in the experiment file",
            ) from error
        if not isinstance(plan, Plan):
            raise UserError(f"the design `{self.name}` ({self.origin}) returned {type(plan).__name__}, not a Plan")
        return plan


@cache
def _entries() -> dict[str, dict[str, EntryPoint]]:
    """Name → what it stands for → entry point: one each, unless two packages claim the same name."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP)):
        found.setdefault(entry.name, {})[entry.value] = entry
    return found


def design_names() -> list[str]:
    """The names of all installed designs. Imports none."""
    return list(_entries())


def load_design(name: str) -> Design:
    """The design of that name. Raises `UnknownName`, or `UserError` where it cannot be imported."""
    claims = list(_entries().get(name, {}).values())
    if not claims:
        raise UnknownName("design", name, _entries(), hint="`mkb designs list` says what each of them asks")
    if len(claims) > 1:
        raise UserError(
            f"two designs are called `{name}`: {' and '.join(f'`{claim.value}`' for claim in claims)}",
            hint="remove the package that brings the one you do not want",
        )
    entry = claims[0]
    try:
        function = entry.load()
    except Exception as error:
        raise UserError(
            f"the design `{name}` cannot be imported from `{entry.value}`: {type(error).__name__}: {error}",
            hint="update or remove the package that brings it",
        ) from error
    if not callable(function):
        raise UserError(f"the design `{name}` is not a function: `{entry.value}` is a {type(function).__name__}")
    return Design(name=name, function=function, origin=entry.value)
