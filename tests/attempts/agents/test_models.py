import os
from pathlib import Path

import pytest

from metakernelbench.attempts.agents.models import agent_options, check_model, obstacles
from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.errors import SpecError, UnknownName, UserError

REAL = "openrouter/vendor/model"


@pytest.mark.parametrize("key", [None, "", "  "])
def test_a_missing_or_blank_key_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OPENROUTER_API_KEY", key)
    with pytest.raises(UserError, match="needs OPENROUTER_API_KEY in the environment") as error:
        check_model(REAL, AttemptSettings())
    assert error.value.hint == "export OPENROUTER_API_KEY=..."
    assert os.environ.get("OPENROUTER_API_KEY") == key


def test_a_model_with_its_key_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    check_model(REAL, AttemptSettings())


def test_an_unknown_provider_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="`nowhere` names no model provider"):
        check_model("nowhere", AttemptSettings())
    assert capsys.readouterr().out == ""


def test_an_unknown_agent_lists_the_nearest() -> None:
    with pytest.raises(UnknownName, match="terminus-2"):
        check_model(REAL, AttemptSettings(agent="terminus2"))


def test_an_unknown_sandbox_or_option_lists_the_nearest() -> None:
    with pytest.raises(UnknownName, match="bubblewrap"):
        check_model(REAL, AttemptSettings(sandbox="bublewrap"))
    with pytest.raises(UnknownName, match="temperature"):
        check_model(REAL, AttemptSettings(model_options={"temprature": 1}))


def test_a_machine_without_a_sandbox_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox_available.cache_clear()
    with pytest.raises(UserError, match="no sandbox can be had: this machine has no bwrap, tmux"):
        check_model(REAL, AttemptSettings())
    sandbox_available.cache_clear()


def test_a_real_model_never_gets_the_sandbox_without_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    with pytest.raises(UserError, match="isolates nothing"):
        check_model(REAL, AttemptSettings(sandbox="host"))


def test_a_key_among_the_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    with pytest.raises(UserError, match="written into every record"):
        check_model(REAL, AttemptSettings(model_options={"llm_kwargs": {"api_key": "secret"}}))
    with pytest.raises(UserError, match="written into every record"):
        check_model(REAL, AttemptSettings(model_options={"api_key": "secret"}))


def test_all_obstacles_are_listed_not_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    found = [error.message for error in obstacles(REAL, AttemptSettings(agent="terminus2", sandbox="hots"))]
    assert [message[:24] for message in found] == [
        "unknown agent `terminus2",
        "unknown sandbox `hots`; ",
        "the model `openrouter/ve",
    ]


def test_a_scripted_model_needs_a_readable_script(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs prepared turns"):
        check_model("scripted/demo", AttemptSettings())
    with pytest.raises(SpecError):
        check_model("scripted/demo", AttemptSettings(script=tmp_path / "absent.toml"))


def test_a_real_model_keeps_its_name_and_options() -> None:
    name, options = agent_options(REAL, AttemptSettings(model_options={"temperature": 0.5}), None)
    assert name == REAL
    assert options["temperature"] == 0.5
    assert "api_base" not in options
