"""What a store knows of a skill, by the digest of its text: the way in for designs and for whoever has only that."""

from __future__ import annotations

from metakernelbench.annotation.consensus import skill_consensus
from metakernelbench.annotation.labels import SkillLabels
from metakernelbench.annotation.removal import without_category
from metakernelbench.annotation.rubric import rubric
from metakernelbench.errors import UnknownName, UserError
from metakernelbench.store.store import Store


def skill_labels(store: Store, digest: str) -> SkillLabels | None:
    """The statements of a skill with their categories, by the majority of its annotators; None where it has none.

    `digest` is `digest_of(skill)`, as `Standing.skill` gives it.
    """
    answers = store.annotations.of("skill", [digest], rubric().version).get(digest)
    if not answers:
        return None
    votes = [answer.read(SkillLabels.model_validate_json) for answer in answers]
    return skill_consensus(store.text(digest), votes).labels


def ablated_skill(store: Store, digest: str, category: str) -> str:
    """The skill with the statements of a category removed, unchanged where it has none.

    Raises `UnknownName` for a category that the rubric does not have, and `UserError` where nobody has annotated the
    skill: an unannotated skill is not one without the category.
    """
    if category not in rubric().ids:
        raise UnknownName("category", category, rubric().ids)
    labels = skill_labels(store, digest)
    if labels is None:
        raise UserError(
            f"the skill {digest[:12]} is not annotated, so what is to be removed from it is not known",
            hint="annotate the experiment first: `mkb annotate EXPERIMENT --model ...`",
        )
    return without_category(store.text(digest), labels.statements, category)
