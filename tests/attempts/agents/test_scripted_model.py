import asyncio
import json
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metakernelbench.attempts.agents.script import Script, Turn
from metakernelbench.attempts.agents.scripted_model import ScriptedModel
from tests.attempts.support import run


def post(url: str, seen: str) -> Any:
    """One request as a model's client makes it."""
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": seen}]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def replies(script: Script, *screens: str) -> list[Any]:
    """What the model answers, in order, to an agent that sees these screens. Errors stand as their status code."""

    async def talk() -> list[Any]:
        said: list[Any] = []
        async with ScriptedModel(script) as model:
            for screen in screens:
                try:
                    answer = await asyncio.to_thread(post, f"{model.api_base}/chat/completions", screen)
                    said.append(answer["choices"][0]["message"]["content"])
                except urllib.error.HTTPError as error:
                    said.append(error.code)
        return said

    answers: list[Any] = run(talk())
    return answers


def typed(reply: str) -> str:
    return "".join(command["keystrokes"] for command in json.loads(reply)["commands"])


def test_turns_are_replayed_in_order_and_then_the_work_is_done() -> None:
    first, second, third = replies(Script(match="*", turns=(Turn(run="one"), Turn(run="two"))), "", "", "")
    assert (typed(first), typed(second)) == ("one\n", "two\n")
    assert json.loads(third)["task_complete"] is True


def test_a_turn_waits_until_the_screen_shows_what_it_waits_for() -> None:
    script = Script(match="*", turns=(Turn(run="task submit", until=r"^\[task\] "), Turn(run="next")))
    said = replies(script, "", "$ task submit\nSent", "Sent\nstill", "passed\n[task] 9 left", "")
    assert [typed(reply) for reply in said[:4]] == ["task submit\n", "", "", "next\n"]


def test_what_an_earlier_command_left_on_the_screen_is_not_taken_for_the_answer() -> None:
    script = Script(match="*", turns=(Turn(run="task submit", until=r"^\[task\] "), Turn(run="next")))
    said = replies(script, "", "[task] from the last time\n$ task submit\nSent")
    assert typed(said[1]) == ""


def test_a_turn_gives_up_waiting_after_its_time() -> None:
    script = Script(match="*", turns=(Turn(run="sleep", until="never", within=0.0), Turn(run="next")))
    assert typed(replies(script, "", "")[1]) == "next\n"


def test_failures_are_sent_as_often_as_prepared() -> None:
    script = Script(match="*", turns=(Turn(http_error=503, times=2), Turn(raw="not JSON")))
    assert replies(script, "", "", "") == [503, 503, "not JSON"]


def test_nothing_is_served_to_those_who_do_not_know_the_path() -> None:
    async def knock() -> int:
        async with ScriptedModel(Script(match="*")) as model:
            url = model.api_base.rsplit("/", 2)[0] + "/v1/chat/completions"
            with pytest.raises(urllib.error.HTTPError) as error:
                await asyncio.to_thread(post, url, "")
            return error.value.code

    assert run(knock()) == 404


def test_it_listens_on_the_loopback_address_only() -> None:
    async def address() -> str:
        async with ScriptedModel(Script(match="*")) as model:
            return model.api_base

    assert run(address()).startswith("http://127.0.0.1:")


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=200)


@settings(max_examples=40, deadline=None)
@given(text=TEXTS | st.sampled_from(["a\tb\n", "!x\n", "END_OF_FILE\n", "no newline", "$(id) `id` \\\n", "'\"\n"]))
def test_a_shell_that_runs_the_keystrokes_ends_up_with_the_file(text: str) -> None:
    keys = typed(replies(Script(match="*", turns=(Turn(write={"kernel.py": text}),)), "")[0])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["bash"], input=keys.encode(), cwd=folder, check=True)
        assert (Path(folder) / "kernel.py").read_bytes() == text.encode()
