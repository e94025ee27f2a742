"""Designs: pure functions from what is to be compared to the attempts and comparisons that compare it.

Each takes problems, DSLs, models and a number of replicates, plus options of its own as keywords, and returns a `Plan`.
The first sentence of its docstring is the question it answers. They share what they can: the solo attempts, and every
attempt that is given the same, have one key in all designs, so that an experiment of several designs runs them once.

`docs/designs.md` says how to add one; `experiments/registry.py` finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from metakernelbench.errors import UnknownName, UserError
from metakernelbench.experiments.drafting import (
    Draft,
    cells,
    other_of_another_family,
    others_of_the_family,
)
from metakernelbench.experiments.planned import Arm, Material, Plan, PlannedAttempt, PlannedComparison

__all__ = [
    "Arm",
    "Plan",
    "PlannedAttempt",
    "PlannedComparison",
    "ablate",
    "chain",
    "content",
    "cross_dsl",
    "cross_model",
    "placebo",
    "related",
    "retry",
    "same_dsl",
    "skill_format",
]

_MOST_ROUNDS = 1000
"""As many as there may be replicates."""


def cross_dsl(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """Does a skill from one DSL help a fresh attempt at the same problem in another? The benchmark's own design.

    Every (problem, model, replicate) is attempted alone in each DSL; then, for every ordered pair of DSLs, a fresh
    attempt in the second is given the skill of the solo attempt in the first. Baseline: the second DSL's solo attempt.
    With one DSL only the solo attempts are left.
    """
    draft = Draft("cross-dsl")
    for cell in cells(problems, models, replicates):
        solo = {dsl: draft.solo(cell, dsl) for dsl in dsls}
        for source, target in permutations(dsls, 2):
            draft.compare("skill", solo[source], solo[target], draft.given(solo[source], cell, target))
    return draft.plan()


def retry(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """How far apart are two attempts that nothing distinguishes? The null distribution of the paired ratio.

    Every variant is attempted alone twice. Baseline: the first; treatment: the second, which is given nothing.
    """
    draft = Draft("retry")
    for cell in cells(problems, models, replicates):
        for dsl in dsls:
            draft.compare("again", None, draft.solo(cell, dsl), draft.again(cell, dsl))
    return draft.plan()


def same_dsl(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """Does a skill help a fresh attempt in the DSL that it comes from? What transfer could bring at best.

    The skill of a solo attempt goes to a fresh attempt at the same variant. Baseline: a second solo attempt and not the
    source, so that a lucky source is not also the yardstick that it is measured by.
    """
    draft = Draft("same-dsl")
    for cell in cells(problems, models, replicates):
        for dsl in dsls:
            source = draft.solo(cell, dsl)
            draft.compare("skill", source, draft.again(cell, dsl), draft.given(source, cell, dsl))
    return draft.plan()


def placebo(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """Does the skill of an unrelated problem do the same? What having any notes at all brings or costs.

    As `cross-dsl`, but the skill is that of another family's problem. Which one follows from the problem's name and
    from what else is listed, and changes for few problems only when the list grows.
    """
    draft = Draft("placebo")
    donor = {problem: other_of_another_family(problem, problems) for problem in problems}
    if None in donor.values():
        raise UserError("the design `placebo` needs problems of two families", hint="list more `problems`")
    for cell in cells(problems, models, replicates):
        other = cell._replace(problem=str(donor[cell.problem]))
        for source_dsl, target in draft.pairs(dsls):
            source = draft.solo(other, source_dsl)
            treatment = draft.given(source, cell, target, label=f"placebo-{source_dsl}-{other.problem}")
            draft.compare("placebo", source, draft.solo(cell, target), treatment)
    return draft.plan()


def related(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """Does the skill of a related problem help? Whether what was learned reaches beyond its own problem.

    As `cross-dsl`, but the skill is that of the next listed problem of the same family. Problems that are alone in
    their family are left out.
    """
    draft = Draft("related")
    donor = others_of_the_family(problems)
    if not donor:
        raise UserError("the design `related` needs two problems of one family", hint="list more `problems`")
    for cell in cells([problem for problem in problems if problem in donor], models, replicates):
        other = cell._replace(problem=donor[cell.problem])
        for source_dsl, target in draft.pairs(dsls):
            source = draft.solo(other, source_dsl)
            treatment = draft.given(source, cell, target, label=f"related-{source_dsl}-{other.problem}")
            draft.compare("related", source, draft.solo(cell, target), treatment)
    return draft.plan()


def cross_model(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """Does a skill that another model wrote help? Whether skills speak to other models than their author.

    As `cross-dsl`, but the source is another model's attempt: one treatment for every other model listed.
    """
    if len(models) < 2:
        raise UserError("the design `cross-model` needs two models", hint="list more `models`")
    draft = Draft("cross-model")
    for cell in cells(problems, models, replicates):
        for author in (model for model in models if model != cell.model):
            for source_dsl, target in draft.pairs(dsls):
                source = draft.solo(cell._replace(model=author), source_dsl)
                label = f"from-{source_dsl}-by-{author.replace('/', '~')}"
                treatment = draft.given(source, cell, target, label=label)
                draft.compare(f"by {author}", source, draft.solo(cell, target), treatment)
    return draft.plan()


def chain(
    problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int, *, rounds: int = 3
) -> Plan:
    """What becomes of a skill that is handed on again and again? Whether knowledge grows, or errors do.

    For each DSL listed, a chain that begins with its solo attempt: each round's attempt is in the next DSL of the list,
    and is given the skill that the round before kept. Baseline: the solo attempt of the round's DSL. The first round is
    `cross-dsl`'s treatment. A round without a skill ends its chain.
    """
    if not 1 <= rounds <= _MOST_ROUNDS:
        raise UserError(
            f"the design `chain` needs at least one round and takes at most {_MOST_ROUNDS}, not {rounds}",
            hint="set `rounds` of [options.chain]",
        )
    draft = Draft("chain")
    draft.pairs(dsls)
    for cell in cells(problems, models, replicates):
        for start, first in enumerate(dsls):
            source = draft.solo(cell, first)
            for number in range(1, rounds + 1):
                target = dsls[(start + number) % len(dsls)]
                label = "" if number == 1 else f"chain-{first}-{number}"
                treatment = draft.given(source, cell, target, label=label)
                draft.compare(f"round {number}", source, draft.solo(cell, target), treatment)
                source = treatment
    return draft.plan()


def ablate(
    problems: Sequence[str],
    dsls: Sequence[str],
    models: Sequence[str],
    replicates: int,
    *,
    categories: tuple[str, ...],
) -> Plan:
    """Which statements of a skill make the difference? A skill against itself with one kind of statement taken out.

    As `cross-dsl`, and for each of `categories` one more treatment whose skill lacks the statements of that category.
    Baseline: the attempt with the whole skill. Which statements those are is read from the store's annotations of the
    source's skill, so that these treatments wait until `mkb annotate` has been there. Where a skill has no statement of
    the category, nothing runs and the comparison inherits its baseline.
    """
    _check_categories(categories)
    draft = Draft("ablate")
    for cell in cells(problems, models, replicates):
        for source_dsl, target in draft.pairs(dsls):
            source = draft.solo(cell, source_dsl)
            whole = draft.given(source, cell, target)
            for category in categories:
                label = f"from-{source_dsl}-without-{category}"
                part = draft.given(source, cell, target, without=category, label=label)
                draft.compare(f"without {category}", source, whole, part)
    return draft.plan()


def _check_categories(categories: Sequence[str]) -> None:
    from metakernelbench.annotation.rubric import rubric

    if not categories:
        raise UserError("the design `ablate` needs at least one category", hint="set `categories` of [options.ablate]")
    for category in categories:
        if category not in rubric().ids:
            raise UnknownName("category", category, rubric().ids, hint="set `categories` of [options.ablate]")


def content(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """Is it the skill that helps, or would the code or the log have done? Four kinds of material against each other.

    As `cross-dsl`, with one treatment each for the source's skill, its implementation and its trajectory, and a second
    solo attempt as the treatment that is given nothing. Baseline of all: the solo attempt.
    """
    materials: tuple[Material, ...] = ("skill", "implementation", "trajectory")
    draft = Draft("content")
    for cell in cells(problems, models, replicates):
        for source_dsl, target in draft.pairs(dsls):
            source, baseline = draft.solo(cell, source_dsl), draft.solo(cell, target)
            for material in materials:
                label = "" if material == "skill" else f"from-{source_dsl}-{material}"
                draft.compare(material, source, baseline, draft.given(source, cell, target, material, label=label))
        for dsl in dsls:
            draft.compare("none", None, draft.solo(cell, dsl), draft.again(cell, dsl))
    return draft.plan()


def skill_format(problems: Sequence[str], dsls: Sequence[str], models: Sequence[str], replicates: int) -> Plan:
    """Does it matter how a skill is written down? Free prose against a fixed form.

    As `cross-dsl`, with two sources in each DSL: one that is asked for a skill in its own words, and one that is asked
    to fill in a form. Baseline of both treatments: the solo attempt that writes freely.
    """
    draft = Draft("format")
    for cell in cells(problems, models, replicates):
        for source_dsl, target in draft.pairs(dsls):
            baseline = draft.solo(cell, target)
            free, structured = draft.solo(cell, source_dsl), draft.structured(cell, source_dsl)
            draft.compare("free", free, baseline, draft.given(free, cell, target))
            label = f"from-{source_dsl}-structured"
            draft.compare("structured", structured, baseline, draft.given(structured, cell, target, label=label))
    return draft.plan()
