from types import SimpleNamespace
from typing import Any

import pytest

from metakernelbench.attempts.ending import ending_of
from metakernelbench.errors import InfrastructureFault, UserError

DONE: dict[str, Any] = {"steps": [{"source": "agent", "tool_calls": [{"function_name": "mark_task_complete"}]}]}
AT_WORK: dict[str, Any] = {"steps": [{"source": "agent", "tool_calls": [{"function_name": "bash_command"}]}]}


def result(exception: str | None = None, *, started: bool = True) -> Any:
    info = exception and SimpleNamespace(exception_type=exception, exception_message="said so")
    return SimpleNamespace(exception_info=info, agent_execution=SimpleNamespace() if started else None)


@pytest.mark.parametrize(
    ("exception", "trajectory", "ended"),
    [
        (None, DONE, "completed"),
        (None, AT_WORK, "agent_exit"),
        (None, None, "agent_exit"),
        ("AgentTimeoutError", AT_WORK, "budget"),
        ("RuntimeError", AT_WORK, "agent_error"),
        ("ContextLengthExceededError", AT_WORK, "agent_error"),
        ("BadRequestError", AT_WORK, "agent_error"),
    ],
)
def test_an_ending_of_the_agents_or_the_clocks_is_recorded(
    exception: str | None, trajectory: dict[str, Any] | None, ended: str
) -> None:
    assert ending_of(result(exception), trajectory, says_when_done=True) == ended


def test_an_agent_that_never_says_that_it_is_done_completes_by_returning() -> None:
    assert ending_of(result(), None, says_when_done=False) == "completed"


@pytest.mark.parametrize("exception", ["AuthenticationError", "NotFoundError", "BadRequestError"])
def test_a_provider_that_refuses_from_the_start_is_for_the_user_to_put_right(exception: str) -> None:
    with pytest.raises(UserError, match=f"{exception}.*said so"):
        ending_of(result(exception), {"steps": [{"source": "system"}]}, says_when_done=True)


@pytest.mark.parametrize("exception", ["RateLimitError", "InternalServerError", "SandboxLost"])
def test_a_provider_or_sandbox_that_fails_may_be_tried_again(exception: str) -> None:
    with pytest.raises(InfrastructureFault, match=exception):
        ending_of(result(exception), AT_WORK, says_when_done=True)


def test_a_mistake_found_while_the_sandbox_starts_stays_the_users() -> None:
    with pytest.raises(UserError, match="said so"):
        ending_of(result("UserError", started=False), None, says_when_done=True)


def test_whatever_fails_before_the_agent_starts_is_ours() -> None:
    with pytest.raises(InfrastructureFault):
        ending_of(result("ValueError", started=False), None, says_when_done=True)
