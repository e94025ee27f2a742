"""An annotator: a model that LiteLLM knows, asked one question at a time until its answer is well formed.

    instruction (system)      the question, its words, the form of the answer; the same for every text
    data (user)               the texts, each between lines with a mark drawn for this request: `fencing.py`
    [bad answer, reasons]     up to two more rounds

A provider that is down is tried again with growing pauses; one that refuses ends the run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from metakernelbench.annotation.answers import Malformed
from metakernelbench.annotation.fencing import fenced, fresh_mark
from metakernelbench.annotation.labels import Labels
from metakernelbench.annotation.questions import PROMPT_VERSION, Asked
from metakernelbench.attempts.agents.models import quiet_libraries
from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.store.annotations import Answer

TRIES = 3
"""Answers of one annotator to one question before it is given up."""
MAX_ANSWER_TOKENS = 8_000
_PROVIDER_TRIES = 4
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 120.0
_TIMEOUT_S = 600
_SHOWN_BACK = 4_000
"""Characters of a bad answer that its author is shown again."""


class NoAnswer(InfrastructureFault):
    """An annotator gave no well-formed answer; a later run asks again."""

    kind = "no_answer"


@dataclass(frozen=True, kw_only=True)
class Annotator:
    """A model and how it is asked."""

    model: str
    """The name that answers are kept under."""
    temperature: float = 0.0
    api_base: str | None = None
    """Where a scripted model answers; None for a provider that LiteLLM knows."""
    first_pause_s: float = _FIRST_PAUSE_S

    @property
    def called(self) -> str:
        """The name that LiteLLM is given."""
        return self.model if self.api_base is None else f"openai/{self.model.partition('/')[2]}"

    def options(self) -> dict[str, Any]:
        """What goes with every request. A temperature is sent only where the model takes one."""
        litellm = library()
        known = litellm.get_supported_openai_params(self.called) or ()
        options: dict[str, Any] = {"max_tokens": self.answer_tokens(), "timeout": _TIMEOUT_S, "num_retries": 0}
        if "temperature" in known:
            options["temperature"] = self.temperature
        if self.api_base is not None:
            options |= {"api_base": self.api_base, "api_key": "none"}
        return options

    def answer_tokens(self) -> int:
        """How long an answer may be: what the model can write at most, where that is known and less than ours."""
        try:
            known = library().get_max_tokens(self.called)
        except Exception:  # LiteLLM raises a bare one for a model that is not in its table
            known = None
        return min(known or MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS)

    def response_format(self, asked: Asked) -> dict[str, Any] | None:
        """The schema that the provider holds the answer to, where it can."""
        if self.api_base is None and not library().supports_response_schema(model=self.called):
            return None
        schema = {"name": f"{asked.question}_labels", "strict": True, "schema": dict(asked.schema)}
        return {"type": "json_schema", "json_schema": schema}

    def request(self, asked: Asked, pass_number: int) -> str:
        """Digest of a question as this annotator is asked it in this pass."""
        return asked.request(model=self.model, temperature=self.temperature, pass_number=pass_number)


def library() -> Any:
    """LiteLLM, quiet."""
    quiet_libraries()
    import litellm

    litellm.suppress_debug_info = True
    return litellm


def messages_of(asked: Asked) -> list[dict[str, str]]:
    """What is sent first: the question, and the data under a fresh mark."""
    mark = fresh_mark(asked.data)
    note = f"The mark of this request is {mark}. The parts: {', '.join(asked.data)}."
    closing = "This was the data. Answer now, as the instructions above the data say."
    return [
        {"role": "system", "content": asked.instruction},
        {"role": "user", "content": f"{note}\n\n{fenced(asked.data, mark)}\n\n{closing}"},
    ]


@dataclass(frozen=True)
class _Reply:
    """What came back."""

    text: str
    cut: bool
    """Whether it ended because it was too long."""

    def checked(self, asked: Asked) -> Labels:
        """The labels in it. Raises `Malformed`."""
        if self.cut:
            raise Malformed(f"The answer was cut off after {MAX_ANSWER_TOKENS} tokens; think and write less.")
        return asked.check(self.text)


@dataclass
class _Spent:
    """Tokens and money of all tries. None where the provider did not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None

    def add(self, response: Any) -> None:
        usage = getattr(response, "usage", None)
        self.input_tokens = _sum(self.input_tokens, getattr(usage, "prompt_tokens", None))
        self.output_tokens = _sum(self.output_tokens, getattr(usage, "completion_tokens", None))
        hidden = getattr(response, "_hidden_params", None) or {}
        self.cost_usd = _sum(self.cost_usd, hidden.get("response_cost"))


def _sum[N: (int, float)](before: N | None, more: N | None) -> N | None:
    return before if more is None else more if before is None else before + more


async def ask(annotator: Annotator, asked: Asked, pass_number: int = 1) -> Answer:
    """The annotator's answer to one question.

    Raises `NoAnswer` where three answers were malformed or the provider stayed down, and `UserError` where the provider
    refuses what no repetition would change.
    """
    messages, spent, reason = messages_of(asked), _Spent(), ""
    for number in range(1, TRIES + 1):
        reply = await _complete(annotator, asked, messages, spent)
        try:
            labels = reply.checked(asked)
        except Malformed as error:
            reason = str(error)
            messages += [
                {"role": "assistant", "content": reply.text[:_SHOWN_BACK] or "(empty)"},
                {"role": "user", "content": f"This answer cannot be used. {reason} Give the whole answer again."},
            ]
        else:
            return _answer(annotator, asked, pass_number, labels, number, spent)
    raise NoAnswer(f"{annotator.model} gave {TRIES} malformed answers; the last: {reason}")


def _answer(annotator: Annotator, asked: Asked, pass_number: int, labels: Labels, tries: int, spent: _Spent) -> Answer:
    return Answer(
        question=asked.question,
        subject=asked.subject,
        request=annotator.request(asked, pass_number),
        annotator=annotator.model,
        pass_number=pass_number,
        words_version=asked.words_version,
        prompt_version=PROMPT_VERSION,
        temperature=annotator.options().get("temperature"),
        labels=labels.model_dump_json(),
        tries=tries,
        input_tokens=spent.input_tokens,
        output_tokens=spent.output_tokens,
        cost_usd=spent.cost_usd,
        answered_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


async def _complete(annotator: Annotator, asked: Asked, messages: list[dict[str, str]], spent: _Spent) -> _Reply:
    """One reply. Provider faults that may pass are tried again."""
    import openai  # LiteLLM's errors are subclasses of these

    litellm = library()
    options = annotator.options()
    if (form := annotator.response_format(asked)) is not None:
        options["response_format"] = form
    for number in range(1, _PROVIDER_TRIES + 1):
        try:
            response = await litellm.acompletion(model=annotator.called, messages=messages, **options)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise UserError(
                f"the provider of {annotator.model} refuses: {_short(error)}",
                hint="check the model's name and its key",
            ) from error
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:  # of this text, not of all
            raise NoAnswer(f"the provider of {annotator.model} refuses this request: {_short(error)}") from error
        except openai.APIError as error:
            if number == _PROVIDER_TRIES:
                raise NoAnswer(f"the provider of {annotator.model} stays down: {_short(error)}") from error
            await asyncio.sleep(max(annotator.first_pause_s * 2 ** (number - 1), _asked_to_wait(error)))
        else:
            spent.add(response)
            choice = response.choices[0]
            return _Reply(str(choice.message.content or ""), cut=choice.finish_reason == "length")
    raise AssertionError("unreachable")


def _asked_to_wait(error: Exception) -> float:
    """Seconds that a provider asks for, where it does, up to a limit."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        return min(max(float(headers.get("retry-after", 0)), 0.0), _LONGEST_PAUSE_S)
    except ValueError:  # a date; then the usual pause has to do
        return 0.0


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
