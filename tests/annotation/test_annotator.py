"""A real annotator, over HTTP: forms, retries, what is recorded, faults of the provider."""

from __future__ import annotations

import json

import pytest

from metakernelbench.annotation.annotator import MAX_ANSWER_TOKENS, Annotator, NoAnswer
from metakernelbench.annotation.labels import SkillLabels
from metakernelbench.annotation.questions import PROMPT_VERSION, about_skill
from metakernelbench.annotation.rubric import rubric
from metakernelbench.annotation.scripted import Reply
from metakernelbench.errors import UserError
from metakernelbench.store.artifacts import digest_of
from tests.annotation.support import NOTE, asked_of, labels_reply, sent

GOOD = labels_reply(
    ("workload_fact", "The last page is ragged, the others are full.", False),
    ("verified_reformulation", "A running softmax needs one pass", True),
)


def test_an_answer_is_kept_with_everything_that_it_depends_on() -> None:
    answer, server = asked_of([GOOD], about_skill(NOTE), temperature=0.3)
    assert answer.annotator == "scripted/judge"
    assert answer.subject == digest_of(NOTE)
    assert (answer.temperature, answer.prompt_version, answer.words_version) == (0.3, PROMPT_VERSION, rubric().version)
    assert (answer.tries, answer.pass_number) == (1, 1)
    assert answer.input_tokens is not None
    assert answer.input_tokens > 500
    statements = SkillLabels.model_validate_json(answer.labels).statements
    assert [(s.category, s.supported, NOTE[s.start : s.end] == s.quote) for s in statements] == [
        ("workload_fact", False, True),
        ("verified_reformulation", True, True),
    ]
    body = server.requests[0]
    assert body["temperature"] == 0.3
    schema = body["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["$defs"]["LabelAnswer"]["properties"]["category"]["enum"] == list(rubric().ids)


def test_the_instruction_states_every_category_with_its_examples() -> None:
    _, server = asked_of([GOOD], about_skill(NOTE))
    instruction = server.requests[0]["messages"][0]["content"]
    for category in rubric().category:
        for text in (category.id, category.definition, category.criterion, category.positive, category.negative):
            assert text in instruction


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("The note looks fine.", "not one JSON object"),
        ('{"labels": [{"category": "workload_fact"}]}', "labels.0.quote: Field required"),
        ('{"labels": [], "verdict": "good"}', "verdict: Extra inputs are not permitted"),
        (
            '{"labels": [{"category": "praise", "quote": "The last page is ragged", "supported": false}]}',
            "the category `praise` is none of workload_fact",
        ),
        (
            '{"labels": [{"category": "workload_fact", "quote": "The last page is full", "supported": false}]}',
            'the quote "The last page is full" does not stand in the part `note`',
        ),
        (
            '{"labels": [{"category": "workload_fact", "quote": "page", "supported": false}]}',
            "has fewer than 3 words",
        ),
    ],
)
def test_a_malformed_answer_is_sent_back_with_the_reason(raw: str, reason: str) -> None:
    answer, server = asked_of([Reply(raw=raw, times=1), GOOD], about_skill(NOTE))
    assert answer.tries == 2
    messages = server.requests[1]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == raw
    assert reason in messages[3]["content"]


def test_a_short_quote_counts_where_it_is_a_whole_sentence() -> None:
    note = f"{NOTE}\nBoth forms of GELU differ. Use erf.\n"
    answer, _ = asked_of([labels_reply(("numerics_guidance", "Use erf.", False))], about_skill(note))
    assert answer.tries == 1
    with pytest.raises(NoAnswer, match="fewer than 3 words"):
        asked_of([labels_reply(("numerics_guidance", "Use", False))], about_skill(note))


def test_an_answer_that_was_cut_off_is_sent_back_as_such() -> None:
    cut = Reply(raw='{"labels": [{"category": "workl', cut=True, times=1)
    answer, server = asked_of([cut, GOOD], about_skill(NOTE))
    assert answer.tries == 2
    assert "was cut off after 8000 tokens" in server.requests[1]["messages"][3]["content"]


def test_an_answer_is_asked_to_be_no_longer_than_the_model_can_write() -> None:
    assert Annotator(model="gpt-4").answer_tokens() == 4096
    assert Annotator(model="no-such/model").answer_tokens() == MAX_ANSWER_TOKENS


def test_three_malformed_answers_are_given_up() -> None:
    with pytest.raises(NoAnswer, match="gave 3 malformed answers"):
        asked_of([Reply(raw="no")], about_skill(NOTE))


def test_an_answer_in_a_fence_is_read() -> None:
    answer, _ = asked_of([Reply(raw=f"```json\n{GOOD.text({})}\n```")], about_skill(NOTE))
    assert answer.tries == 1


def test_tokens_of_all_tries_are_counted() -> None:
    once, _ = asked_of([GOOD], about_skill(NOTE))
    twice, _ = asked_of([Reply(raw="no", times=1), GOOD], about_skill(NOTE))
    assert once.input_tokens is not None
    assert twice.input_tokens is not None
    assert twice.input_tokens > 2 * once.input_tokens


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_provider_that_is_down_for_a_moment_is_asked_again(status: int) -> None:
    answer, server = asked_of([Reply(http_error=status, times=2), GOOD], about_skill(NOTE))
    assert answer.tries == 1
    assert len(server.requests) == 3


def test_a_provider_that_stays_down_gives_no_answer() -> None:
    with pytest.raises(NoAnswer, match="stays down"):
        asked_of([Reply(http_error=503)], about_skill(NOTE))


@pytest.mark.parametrize("status", [401, 404])
def test_a_provider_that_refuses_is_the_users_to_put_right(status: int) -> None:
    with pytest.raises(UserError, match="refuses"):
        asked_of([Reply(http_error=status)], about_skill(NOTE))


def test_the_annotator_of_a_skill_sees_the_text_and_nothing_else() -> None:
    """The same skill, kept by a solo attempt that passed and by a conditioned one that failed, is asked about in the
    very same words."""
    _, server = asked_of([GOOD], about_skill(NOTE))
    whole = sent(server)
    for word in ("p28", "tirx", "solo", "conditioned", "from-", "secret-model", "ρ", "speedup", "harmed", "helped"):
        assert word not in whole.lower().replace(NOTE.lower(), "")
    user = server.requests[0]["messages"][1]["content"]
    mark = user.split("The mark of this request is ")[1].split(".")[0]
    outside = user.replace(json.loads(json.dumps(NOTE)), "").replace(mark, "MARK")
    assert outside == (
        "The mark of this request is MARK. The parts: note.\n\n[MARK begin note]\n\n[MARK end note]\n\n"
        "This was the data. Answer now, as the instructions above the data say."
    )
