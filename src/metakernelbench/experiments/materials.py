"""What a planned attempt is given of its source: found in the store, named by digest, and read when it is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from metakernelbench.attempts.material import presented
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.store import Standing, Store


class NotAnnotated(Exception):
    """What is to be taken out of a skill is not known, because nobody has annotated it. For a person, `str` of it."""

    def __init__(self, source: str, category: str) -> None:
        super().__init__(
            f"the skill of `{source}` is not annotated, so what to take out of it for `{category}` is not known: "
            "run `mkb annotate`, then `mkb run` again"
        )


@dataclass
class Materials:
    """What one experiment's attempts have left for later ones. Digests are of what is attached, before it is laid out
    for the instruction."""

    store: Store
    experiment: str
    _ablated: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    _parts: dict[tuple[str, str], str | None] = field(default_factory=dict[tuple[str, str], str | None])

    def expect(self, attempts: Iterable[PlannedAttempt]) -> None:
        """Look up at once what `digest` will be asked for; from then on these sources count as they are now."""
        wanted: dict[str, list[str]] = {}
        for attempt in attempts:
            if attempt.source is not None and attempt.material != "skill":
                wanted.setdefault(_FIELD[attempt.material], []).append(attempt.source)
        for name, keys in wanted.items():
            found = self.store.digests(self.experiment, name, dict.fromkeys(keys))
            self._parts |= {(key, name): digest for key, digest in found.items()}

    def digest(self, attempt: PlannedAttempt, source: Standing | None) -> str | None:
        """Digest of what an attempt is to be given; None where there is nothing of it, or nothing to take out of it.

        `source` is how its source stands. Raises `NotAnnotated`.
        """
        if source is None or attempt.source is None:
            return None
        if attempt.material != "skill":
            return self._part(attempt.source, _FIELD[attempt.material])
        if source.skill is None or attempt.without is None:
            return source.skill
        text = self._without(attempt.source, source.skill, attempt.without)
        digest = digest_of(text)
        return None if digest == source.skill or not text.strip() else digest

    def attachment(self, attempt: PlannedAttempt, source: Standing | None) -> str | None:
        """What is attached to an attempt's instruction; None where there is nothing. Raises `NotAnnotated`."""
        if self.digest(attempt, source) is None or attempt.source is None or source is None:
            return None
        if attempt.material != "skill":
            text = self.store.part(self.experiment, attempt.source, _FIELD[attempt.material])
            return None if text is None else presented(attempt.material, text)
        assert source.skill is not None
        if attempt.without is None:
            return self.store.text(source.skill)
        return self._without(attempt.source, source.skill, attempt.without)

    def _part(self, key: str, name: str) -> str | None:
        if (key, name) in self._parts:
            return self._parts[key, name]
        return self.store.digests(self.experiment, name, [key]).get(key)

    def _without(self, source: str, skill: str, category: str) -> str:
        if (skill, category) not in self._ablated:
            from metakernelbench.annotation.lookup import ablated_skill, skill_labels

            if skill_labels(self.store, skill) is None:
                raise NotAnnotated(source, category)
            self._ablated[skill, category] = ablated_skill(self.store, skill, category)
        return self._ablated[skill, category]


_FIELD = {"implementation": "kernel", "trajectory": "trajectory"}
"""Material → the field of a record that holds it."""
