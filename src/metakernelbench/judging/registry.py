"""Finds judges by name, ours and anyone's, through the entry-point group `metakernelbench.judges`.

An entry is called with `device` (`cpu` or `cuda`) and the judge's own options, all by keyword, and returns a `Judge`.
Nothing of a judge is imported before it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from metakernelbench.errors import MkbError, UnknownName, UserError
from metakernelbench.judging.judge import Judge
from metakernelbench.judging.steadfast import Steadfast

GROUP = "metakernelbench.judges"


@cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def judge_names() -> list[str]:
    """The names of all installed judges. Imports none."""
    return sorted(_entries())


def check_judge(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` where there is no such judge, it lacks a package, or it has no such option."""
    if name not in _entries():
        raise UnknownName("judge", name, judge_names(), hint="docs/judges.md says how one is added")
    maker = _maker(name)
    parameters = inspect.signature(maker).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("device", "contract")]
    for option in options:
        if option not in known:
            if not known:
                raise UserError(f"the judge `{name}` has no options, so no `{option}`")
            raise UnknownName(f"option of the judge `{name}`", option, known)


def open_judge(name: str, *, device: str, options: Mapping[str, Any] | None = None) -> Steadfast:
    """The judge of that name, for gradings on `device`; close it when it is no longer needed. Raises `UserError`."""
    options = options or {}
    check_judge(name, options)
    try:
        return Steadfast(_maker(name)(device=device, **options))
    except MkbError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"the judge `{name}` cannot be made with these options: {error}") from error


def _maker(name: str) -> Callable[..., Judge]:
    entry = _entries()[name]
    try:
        maker: Callable[..., Judge] = entry.load()
    except ImportError as error:
        raise UserError(
            f"the judge `{name}` cannot be imported from `{entry.value}`: {error}",
            hint=f"pip install 'metakernelbench[{name}]'" if name in ("ray", "modal") else "mend its package",
        ) from error
    return maker
