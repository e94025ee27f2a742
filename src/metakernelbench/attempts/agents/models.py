"""Whether a model can be used at all, said in one sentence before anything starts, and how Harbor is told of it."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from metakernelbench.attempts.agents.script import read_scripts
from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.attempts.sandbox.environments import check_environment
from metakernelbench.attempts.settings import SCRIPTED, AttemptSettings
from metakernelbench.errors import UnknownName, UserError

TERMINUS = "terminus-2"
OWN_SANDBOXES = {
    "bubblewrap": "metakernelbench.attempts.sandbox.bubblewrap:BubblewrapEnvironment",
    "host": "metakernelbench.attempts.sandbox.host:HostEnvironment",
}
"""Our sandboxes, and where Harbor finds them; every other name is one of Harbor's own."""
_TERMINUS_OPTIONS: dict[str, Any] = {"parser_name": "json", "record_terminal_session": False}
"""Its recorder of terminal sessions wants software from the network; the trajectory holds the same."""
_SCRIPTED_MODEL_INFO: dict[str, Any] = {
    "max_input_tokens": 1_000_000,
    "max_output_tokens": 100_000,
    "input_cost_per_token": 0.0,
    "output_cost_per_token": 0.0,
    "litellm_provider": "openai",
    "mode": "chat",
}


@cache
def quiet_libraries() -> None:
    """Keep Harbor and LiteLLM from calling home, from printing, and from sending local calls through a proxy. Must run
    before either is imported."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["HARBOR_TELEMETRY"] = "off"
    os.environ.setdefault("LITELLM_LOG", "CRITICAL")
    logging.getLogger("harbor").addHandler(logging.NullHandler())
    logging.getLogger("harbor").propagate = False
    for name in ("NO_PROXY", "no_proxy"):  # prepared turns are served on the loopback address
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    warnings.filterwarnings("ignore", message=".*using the `ReadOnly` qualifier")


def check_model(model: str, settings: AttemptSettings) -> None:
    """Raise `UserError`, with one clear sentence, where attempts with this model and these settings cannot start."""
    for check in _checks(model, settings):
        check()


def obstacles(model: str, settings: AttemptSettings) -> Iterator[UserError]:
    """Everything that `check_model` may raise."""
    for check in _checks(model, settings):
        try:
            check()
        except UserError as error:
            yield error


def _checks(model: str, settings: AttemptSettings) -> list[Callable[[], None]]:
    common = [partial(check, settings) for check in (_check_no_key, _check_agent, check_sandbox)]
    if model.startswith(SCRIPTED):
        return [*common, partial(_check_script, model, settings)]
    return [*common, partial(_check_isolates, settings), partial(check_provider, model)]


def _check_no_key(settings: AttemptSettings) -> None:
    if "api_key" in str(settings.model_options):
        raise UserError(
            "model_options must not hold an API key: it would be written into every record",
            hint="put it into the environment variable that the provider's documentation names",
        )


def _check_isolates(settings: AttemptSettings) -> None:
    if settings.sandbox == "host":
        raise UserError(
            "the `host` sandbox isolates nothing and is for prepared turns only", hint='use sandbox = "bubblewrap"'
        )


def check_sandbox(settings: AttemptSettings) -> None:
    """Raise `UserError` where the sandbox of these settings is unknown or cannot be had here."""
    quiet_libraries()
    from harbor.models.environment_type import EnvironmentType

    known = [*OWN_SANDBOXES, *(kind.value for kind in EnvironmentType)]
    if settings.sandbox not in known:
        raise UnknownName("sandbox", settings.sandbox, known)
    if settings.sandbox == "bubblewrap" and (why := sandbox_available()):
        raise UserError(f"no sandbox can be had: {why}", hint='prepared turns can also run with sandbox = "host"')
    if settings.sandbox in OWN_SANDBOXES:
        if settings.sandbox_options:
            raise UserError(f"the sandbox `{settings.sandbox}` has no options, so no `{min(settings.sandbox_options)}`")
    else:
        check_environment(settings.sandbox, settings.sandbox_options)


def _check_script(model: str, settings: AttemptSettings) -> None:
    if settings.agent != TERMINUS:
        raise UserError(f"prepared turns speak to {TERMINUS} only, not to {settings.agent}")
    if settings.script is None:
        raise UserError(f"the model `{model}` needs prepared turns", hint="name their file as `script`")
    read_scripts(settings.script)


def _check_agent(settings: AttemptSettings) -> None:
    quiet_libraries()
    from harbor.models.agent.name import AgentName

    if settings.agent not in AgentName.values():
        raise UnknownName("agent", settings.agent, AgentName.values())
    if settings.agent == TERMINUS and settings.model_options:
        from harbor.agents.terminus_2 import Terminus2

        known = inspect.signature(Terminus2.__init__).parameters
        for name in settings.model_options:
            if name not in known:  # Harbor would ignore it without a word
                raise UnknownName("model option", name, known)


def check_provider(model: str) -> None:
    """Raise `UserError` where LiteLLM knows no provider of that name, or the provider's key is missing."""
    quiet_libraries()
    import litellm

    litellm.suppress_debug_info = True  # it prints a list of providers before it raises
    try:
        litellm.get_llm_provider(model)
    except litellm.exceptions.BadRequestError:
        raise UserError(
            f"`{model}` names no model provider that LiteLLM knows",
            hint="write provider/model, such as openrouter/vendor/model",
        ) from None
    with _blank_variables_unset():
        found = litellm.validate_environment(model)
    if not found["keys_in_environment"] and found["missing_keys"]:
        raise UserError(
            f"the model `{model}` needs {' and '.join(found['missing_keys'])} in the environment",
            hint=f"export {found['missing_keys'][0]}=...",
        )


@contextmanager
def _blank_variables_unset() -> Iterator[None]:
    """LiteLLM asks only whether a key's variable exists; `export KEY=` is no key."""
    blank = {name: value for name, value in os.environ.items() if not value.strip()}
    for name in blank:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(blank)


def agent_options(model: str, settings: AttemptSettings, api_base: str | None) -> tuple[str, dict[str, Any]]:
    """The model name and the constructor options that Harbor gives the agent."""
    options = {**(_TERMINUS_OPTIONS if settings.agent == TERMINUS else {}), **settings.model_options}
    if api_base is None:
        return model, options
    # The key is no secret: the stand-in asks for none, but the client insists on sending one.
    scripted = {"api_base": api_base, "model_info": _SCRIPTED_MODEL_INFO, "llm_kwargs": {"api_key": "none"}}
    return f"openai/{model.removeprefix(SCRIPTED)}", {**options, **scripted}
