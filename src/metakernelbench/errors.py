"""The errors of the whole package, in one tree.

    MkbError
    ├── UserError            something the user can put right; shown without a traceback
    │   ├── UnknownName      a problem, DSL, model, ... that does not exist; lists the nearest ones
    │   └── SpecError        an experiment file that cannot be read: names the key, the line and what is allowed
    ├── InfrastructureFault  ours, not the submission's: never becomes a verdict, may be tried again
    │   ├── TriedEnough      ... but not at once: all tries of a phase are used up
    │   └── RateLimited      ... when the model's provider has been left alone for a while
    └── StoreError           a store that cannot be opened safely

A submission's own faults are not errors: they are verdicts (`grading/verdict.py`).
"""

from collections.abc import Iterable
from difflib import get_close_matches


class MkbError(Exception):
    """Base of everything this package raises on purpose. `kind` is the stable name for scripts, `hint` what to do."""

    kind = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(MkbError):
    """A mistake in what the user asked for."""

    kind = "usage"


class UnknownName(UserError):
    """A name that is not among the known ones. The message lists the nearest known names, or all of a short list."""

    kind = "unknown_name"

    def __init__(self, what: str, name: str, known: Iterable[str], *, hint: str | None = None) -> None:
        choices = sorted(known)
        nearest = get_close_matches(name, choices, n=3, cutoff=0.3) or choices[:8]
        named = f"nearest: {', '.join(f'`{n}`' for n in nearest)}" if nearest else "there is none"
        super().__init__(f"unknown {what} `{name}`; {named}", hint=hint)
        self.name = name
        self.nearest = tuple(nearest)


class SpecError(UserError):
    """An experiment file that cannot be used."""

    kind = "spec"


class InfrastructureFault(MkbError):
    """A failure of the machine, the judge, the sandbox or the provider. It never counts against a submission."""

    kind = "infrastructure"


class TriedEnough(InfrastructureFault):
    """A phase of an attempt that has failed as often as it is tried in one run."""


class RateLimited(InfrastructureFault):
    """A model provider that asks for fewer requests."""


class StoreError(UserError):
    """A store that cannot be opened without risk to what it holds."""

    kind = "store"
