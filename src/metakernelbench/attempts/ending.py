"""How an attempt ended, from what Harbor reports: the agent's doing, the clock's, the provider's or ours."""

from __future__ import annotations

from typing import Any

from metakernelbench.attempts.record import Ending
from metakernelbench.errors import InfrastructureFault, RateLimited, UserError

_FATAL = frozenset({"AuthenticationError", "PermissionDeniedError", "NotFoundError", "BudgetExceededError"})
"""The provider refuses, and will refuse again."""
_FATAL_AT_ONCE = frozenset({"BadRequestError", "UnsupportedParamsError", "UnprocessableEntityError"})
"""The same where not a single turn went well; later on it is this one conversation that the provider refuses."""
_TRANSIENT = frozenset({
    "InternalServerError", "ServiceUnavailableError", "BadGatewayError", "APIConnectionError",
    "APIError", "Timeout", "APITimeoutError", "InfrastructureFault", "SandboxLost", "EnvironmentStartTimeoutError",
    "AgentSetupTimeoutError", "JSONDecodeError", "OSError", "ConnectionError",
})  # fmt: skip
"""The provider or the sandbox failed, and may not fail again."""


def ending_of(result: Any, trajectory: dict[str, Any] | None, *, says_when_done: bool) -> Ending:
    """The ending that a record states. Raises `UserError` for a provider that refuses, `InfrastructureFault` for what
    failed on the provider's side or ours."""
    exception = result.exception_info
    if exception is None:
        return "agent_exit" if says_when_done and not _said_done(trajectory) else "completed"
    kind, message = exception.exception_type, exception.exception_message.strip()[:500]
    if kind == "AgentTimeoutError":
        return "budget"
    if kind == UserError.__name__:
        raise UserError(message)
    if kind in _FATAL or (kind in _FATAL_AT_ONCE and not _turns(trajectory)):
        raise UserError(f"the model provider refuses ({kind}): {message}", hint="check the model's name and its key")
    if kind == "RateLimitError":
        raise RateLimited(f"{kind}: {message}")
    if kind in _TRANSIENT or result.agent_execution is None:
        raise InfrastructureFault(f"{kind}: {message}")
    return "agent_error"


def _said_done(trajectory: dict[str, Any] | None) -> bool:
    """Whether the agent confirmed, in its last step, that it was done."""
    turns = _turns(trajectory)
    calls = (turns[-1].get("tool_calls") or []) if turns else []
    return any(call.get("function_name") == "mark_task_complete" for call in calls)


def _turns(trajectory: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [step for step in (trajectory or {}).get("steps", []) if step.get("source") == "agent"]
