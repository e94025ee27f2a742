"""What is known of an experiment: every annotator's labels, what they agree on, and what the records decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from metakernelbench.annotation.consensus import Consensus, cause_consensus, skill_consensus, uptake_consensus
from metakernelbench.annotation.labels import CauseLabel, SkillLabels, UptakeLabels
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.annotation.subjects import Subjects
from metakernelbench.store.annotations import Annotations, Answer


@dataclass(frozen=True, kw_only=True)
class Results:
    """The annotations of one experiment. What nobody has annotated is missing here, never empty."""

    subjects: Subjects
    skills: Mapping[str, Consensus[SkillLabels]]
    """Digest of a skill → what it contains."""
    uptakes: Mapping[str, Consensus[UptakeLabels]]
    """Key of a treatment → what it did with its skill."""
    causes: Mapping[str, Consensus[CauseLabel | None]]
    """Key of a harmed treatment → what went wrong."""
    answers: Sequence[Answer] = field(repr=False)
    """The single answers behind all of it."""

    def skill_labels(self, key: str | None) -> SkillLabels | None:
        """The majority's labels of the skill that an attempt kept; None where it kept none or nobody annotated it."""
        digest = self.subjects.skill_of.get(key) if key is not None else None
        found = self.skills.get(digest) if digest is not None else None
        return None if found is None else found.labels


def skill_consensuses(subjects: Subjects, kept: Annotations) -> tuple[dict[str, Consensus[SkillLabels]], list[Answer]]:
    """What the annotators agree on for every skill that has an answer, and their answers."""
    votes = kept.of("skill", subjects.skills, rubric().version)
    found = {
        digest: skill_consensus(subjects.skills[digest], [a.read(SkillLabels.model_validate_json) for a in answers])
        for digest, answers in votes.items()
    }
    return found, [answer for answers in votes.values() for answer in answers]


def results_of(subjects: Subjects, kept: Annotations) -> Results:
    """Everything that a store knows of an experiment's annotations."""
    skills, answers = skill_consensuses(subjects, kept)
    labels = {digest: consensus.labels for digest, consensus in skills.items()}
    uptakes: dict[str, Consensus[UptakeLabels]] = {}
    about_uptake = subjects.about_uptake(labels)
    votes = kept.of("uptake", [asked.subject for asked in about_uptake.values()], taxonomy().version)
    for key, asked in about_uptake.items():
        if given := votes.get(asked.subject):
            uptakes[key] = uptake_consensus([a.read(UptakeLabels.model_validate_json) for a in given])
    answers += [answer for given in votes.values() for answer in given]
    causes: dict[str, Consensus[CauseLabel | None]] = {}
    about_causes = subjects.about_causes(labels)
    votes = kept.of("cause", [a.subject for a in about_causes.values() if isinstance(a, Asked)], taxonomy().version)
    for key, about in about_causes.items():
        if isinstance(about, CauseLabel):
            causes[key] = Consensus(labels=about, votes=0)
        elif given := votes.get(about.subject):
            causes[key] = cause_consensus([a.read(CauseLabel.model_validate_json) for a in given])
    answers += [answer for given in votes.values() for answer in given]
    return Results(subjects=subjects, skills=skills, uptakes=uptakes, causes=causes, answers=tuple(answers))
