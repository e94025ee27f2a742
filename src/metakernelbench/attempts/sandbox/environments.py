"""Whether one of Harbor's own environment types can be used here, said in one sentence before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from metakernelbench.errors import UnknownName, UserError

_GIVEN_BY_US = frozenset(
    {"self", "environment_dir", "environment_name", "session_id", "trial_paths", "task_env_config", "logger"}
)


def check_environment(kind: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` where its packages, programs or keys are missing, or it has no such option."""
    from harbor.environments import factory
    from harbor.models.environment_type import EnvironmentType

    try:
        # Harbor makes this class by name and has no public way to ask for it.
        environment = factory._load_environment_class(EnvironmentType(kind))
        factory.EnvironmentFactory.run_preflight(EnvironmentType(kind))
    except (Exception, SystemExit) as error:  # a preflight leaves the program where something is missing
        raise UserError(
            f"the sandbox `{kind}` cannot be used here: {_first_line(error)}",
            hint=f"pip install 'harbor[{extra}]'"
            if (extra := getattr(error, "extra", None))
            else "Harbor's documentation says what this environment type needs",
        ) from error
    known = _options_of(environment)
    for name in options:
        if name not in known:  # Harbor would ignore it without a word
            raise UnknownName(f"option of the sandbox `{kind}`", name, known)


def _options_of(environment: type) -> set[str]:
    """Keywords that the class or one that it is built on takes."""
    known: set[str] = set()
    for base in environment.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            known |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return known - _GIVEN_BY_US


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
