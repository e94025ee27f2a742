"""What annotators have answered. An answer belongs to the text it is about, not to an experiment: the same skill in
another experiment, or a second run over the same one, finds it again and costs nothing.

Here labels are JSON text; `annotation/labels.py` says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import batched

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from metakernelbench.errors import StoreError
from metakernelbench.store.database import DAMAGED, Database
from metakernelbench.store.schema import answers

_AT_ONCE = 500
_SAID = 200
"""Characters of why something cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one annotator said of one text in one pass."""

    question: str
    """`skill`, `uptake` or `cause`."""
    subject: str
    """Digest of the text that was annotated; for a skill the digest by which its attempt's row names it."""
    request: str
    """Digest of everything that was sent and of how: instruction, text, model, temperature, pass."""
    annotator: str
    """The model's name, or `human:<name>`."""
    pass_number: int
    """1 for an annotator's first look, 2 for its second, ..."""
    words_version: int
    """Version of the rubric (of the taxonomy, for uptake and cause) that the labels are in."""
    prompt_version: str | None
    """Version of the instruction; None for a human."""
    temperature: float | None
    """What was asked of the model; None for a human."""
    labels: str
    """JSON."""
    tries: int = 1
    """Answers until one was well formed."""
    input_tokens: int | None = None
    """Over all tries; None where the provider did not say."""
    output_tokens: int | None = None
    cost_usd: float | None = None
    answered_at: str
    """UTC, ISO 8601."""

    def read[T](self, reading: Callable[[str], T]) -> T:
        """The labels, by what knows their shape. Raises `StoreError` where they are not what that takes."""
        try:
            return reading(self.labels)
        except ValueError as error:
            said = " ".join(str(error).split())[:_SAID]
            raise StoreError(
                f"the labels that {self.annotator} gave of {self.subject} cannot be read: {said}", hint=DAMAGED
            ) from error


_COLUMNS = [answers.c[field.name] for field in fields(Answer)]


class Annotations:
    """The answers in one store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, given: Iterable[Answer]) -> None:
        """Keep answers, all or none; one to the same request goes. Where another run keeps one to the same request at
        this moment, its answer stays."""
        rows = [asdict(answer) for answer in given]
        with suppress(IntegrityError), self._database.writing() as connection:
            for row in rows:
                connection.execute(delete(answers).where(answers.c.request == row["request"]))
                connection.execute(insert(answers).values(row))

    def answered(self, requests: Iterable[str]) -> dict[str, Answer]:
        """Request → its answer, for those that have one."""
        return {answer.request: answer for answer in self._where_in("request", requests)}

    def of(self, question: str, subjects: Iterable[str], words_version: int) -> dict[str, list[Answer]]:
        """Subject → its answers under this version of the words; the newest of each annotator's pass, in the order of
        annotator and pass."""
        newest: dict[tuple[str, str, int], Answer] = {}
        for answer in self._where_in("subject", subjects):
            if answer.question == question and answer.words_version == words_version:
                newest[answer.subject, answer.annotator, answer.pass_number] = answer
        found: dict[str, list[Answer]] = {}
        for (subject, _, _), answer in sorted(newest.items()):
            found.setdefault(subject, []).append(answer)
        return found

    def _where_in(self, column: str, values: Iterable[str]) -> Iterator[Answer]:
        """Oldest first."""
        for some in batched(dict.fromkeys(values), _AT_ONCE):
            query = select(*_COLUMNS).where(answers.c[column].in_(some)).order_by(answers.c.id)
            with self._database.reading() as connection:
                rows = connection.execute(query).all()
            yield from (Answer(**row._mapping) for row in rows)
