"""Renders what the agent is told, from one template for all variants and both arms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.dsls import dsl as dsls
from metakernelbench.errors import UnknownName
from metakernelbench.experiments.planned import SkillForm
from metakernelbench.grading import policy
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.problems.roofline import gpu_named

if TYPE_CHECKING:
    from jinja2 import Environment


REFUSED = ("numpy", "os", "sys", "threading", "subprocess")
"""Imports that agents often try, as examples of what the rules refuse."""


@dataclass(frozen=True, kw_only=True)
class NamedDsl:
    """All that a prompt says of a DSL."""

    title: str
    packages: str


def named(dsl: dsls.Dsl) -> NamedDsl:
    """What prompts say of `dsl`: its title, and the modules that a submission may import."""
    return NamedDsl(title=dsl.title, packages=_listed(dsl.imports))


def instruction(
    subject: str, dsl: NamedDsl, settings: AttemptSettings, skill: str | None, skill_form: SkillForm = "free"
) -> str:
    """The whole instruction, with the source skill attached verbatim where there is one. `skill_form` is how the
    attempt's own skill is asked for."""
    return (
        _templates()
        .get_template("instruction.md.j2")
        .render(
            subject=subject,
            dsl=dsl,
            contract=CONTRACT,
            skill=skill,
            skill_form=skill_form,
            workload_name=settings.workload.upper(),
            device=settings.device,
            gpu=settings.gpu,
            arch=_arch(settings.gpu),
            allowed=_listed(policy.ALLOWED_MODULES - {"torch", "__future__"}),
            refused=_listed(REFUSED),
            builtins=_listed(policy.DANGEROUS_BUILTINS),
            cpus=settings.cpus,
            memory_gb=f"{settings.memory_mb / 1024:g}",
            budget=_duration(settings.budget_s),
            max_submissions=settings.max_submissions,
        )
    )


def contract_text() -> str:
    """The grading contract, as it also stands in the instruction."""
    return _templates().get_template("contract.md.j2").render(contract=CONTRACT)


def rules_text(dsl: dsls.Dsl) -> str:
    """The static rules in full, as a submission in `dsl` is held to them."""
    reasons: dict[str, list[str]] = {}
    for name, (_, why) in policy.FORBIDDEN_NAMES.items():
        reasons.setdefault(why, []).append(name)
    return (
        _templates()
        .get_template("rules.md.j2")
        .render(
            dsl=named(dsl),
            allowed=_listed(policy.ALLOWED_MODULES),
            smuggled=_listed(policy.SMUGGLED_MODULES),
            streams=_listed(policy.STREAM_HANDLES),
            forbidden=sorted(dsl.forbidden.items()),
            by_reason=[(why, _listed(names)) for why, names in reasons.items()],
            builtins=_listed(policy.DANGEROUS_BUILTINS),
            dunders=_listed(policy.HARMLESS_DUNDERS),
            hooks=_listed(policy.HOOK_METHODS),
            telltale=_listed(policy.TELLTALE_ATTRIBUTES),
            assignable=_listed(policy.ASSIGNABLE),
        )
    )


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("metakernelbench.attempts", "")
    return Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _arch(gpu: str) -> str | None:
    """What kernels for a GPU are compiled for, where that is known."""
    try:
        return gpu_named(gpu).arch
    except UnknownName:
        return None


def _duration(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 120 else f"{seconds:g} seconds"
