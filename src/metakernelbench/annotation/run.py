"""Asks what has not been answered yet. What is answered lies in the store, so a run may end at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from metakernelbench.annotation.annotator import Annotator, NoAnswer, ask, library, messages_of
from metakernelbench.annotation.condensing import tokens
from metakernelbench.annotation.questions import Asked
from metakernelbench.errors import InfrastructureFault
from metakernelbench.store.annotations import Annotations, Answer

AT_ONCE = 4
"""Questions that are with a provider at the same time."""
_GIVE_UP_AFTER = 5
"""Questions given up in a row that end a run: then the cause is not the questions'."""


@dataclass(frozen=True, kw_only=True)
class Todo:
    """A question that an annotator has not answered in this pass."""

    annotator: Annotator
    asked: Asked
    pass_number: int

    @property
    def request(self) -> str:
        return self.annotator.request(self.asked, self.pass_number)


@dataclass
class Outcome:
    """What became of a run."""

    kept: int = 0
    """Questions that had their answer already."""
    answered: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Request → why there is no answer."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    """None where no provider named a price."""

    def count(self, answer: Answer) -> None:
        self.answered += 1
        self.input_tokens += answer.input_tokens or 0
        self.output_tokens += answer.output_tokens or 0
        if answer.cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + answer.cost_usd


def todo(asked: Sequence[Asked], annotators: Sequence[Annotator], passes: int, kept: Annotations | None) -> list[Todo]:
    """The questions without an answer, each once: equal texts are asked about once."""
    every: dict[str, Todo] = {}
    for one in asked:
        for annotator in annotators:
            for number in range(1, passes + 1):
                item = Todo(annotator=annotator, asked=one, pass_number=number)
                every.setdefault(item.request, item)
    answered = kept.answered(every) if kept is not None else {}
    return [item for request, item in every.items() if request not in answered]


def count(asked: Sequence[Asked], annotators: Sequence[Annotator], passes: int) -> int:
    """How many answers these questions need."""
    return len({one.request() for one in asked}) * len(annotators) * passes


async def answer_all(
    items: Sequence[Todo],
    kept: Annotations,
    outcome: Outcome,
    done: Callable[[Todo, str | None], None],
    at_once: int = AT_ONCE,
) -> None:
    """Ask them all and keep each answer as it comes. `done` is told of every item, with the reason where it failed.

    Raises `UserError` at once for a provider that refuses, and `InfrastructureFault` where several in a row fail.
    """
    waiting = list(reversed(items))
    in_a_row = 0

    async def work() -> None:
        nonlocal in_a_row
        while waiting:
            item = waiting.pop()
            try:
                answer = await ask(item.annotator, item.asked, item.pass_number)
            except NoAnswer as fault:
                in_a_row += 1
                outcome.failed[item.request] = fault.message
                done(item, fault.message)
                if in_a_row >= _GIVE_UP_AFTER:
                    raise InfrastructureFault(
                        f"{in_a_row} questions in a row had no answer, the last because {fault.message}",
                        hint="what was answered is kept: put this right and run the same command again",
                    ) from fault
            else:
                in_a_row = 0
                kept.save([answer])
                outcome.count(answer)
                done(item, None)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(items))):
                group.create_task(work())
    except* Exception as errors:
        raise errors.exceptions[0] from None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run could cost at most."""

    requests: int
    input_tokens: int
    output_tokens: int
    usd: float | None
    """None where LiteLLM knows no price for one of the models."""


def cost_of(items: Sequence[Todo]) -> Cost:
    """An upper bound for one answer to each item; malformed answers come on top."""
    litellm, usd, sent, received = library(), 0.0, 0, 0
    known = True
    for item in items:
        prompt = sum(tokens(message["content"]) for message in messages_of(item.asked))
        answer = item.annotator.answer_tokens()
        sent, received = sent + prompt, received + answer
        try:
            into, out = litellm.cost_per_token(
                model=item.annotator.called, prompt_tokens=prompt, completion_tokens=answer
            )
        except Exception:  # LiteLLM raises whatever its price table makes of a name that it does not know
            known = False
        else:
            usd += into + out
            known = known and into + out > 0
    return Cost(requests=len(items), input_tokens=sent, output_tokens=received, usd=usd if known else None)
