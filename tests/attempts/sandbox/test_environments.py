"""Harbor's environment types by name: what is missing for one is said before anything starts."""

from __future__ import annotations

import pytest

from metakernelbench.attempts.agents.models import check_sandbox
from metakernelbench.attempts.sandbox.environments import check_environment
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.errors import UnknownName, UserError


def test_an_option_that_the_type_has_not_lists_the_nearest() -> None:
    check_environment("ec2", {"instance_type": "c7i.large"})
    with pytest.raises(UnknownName, match="unknown option of the sandbox `ec2` `instance_typ`; nearest: `instance_typ"):
        check_environment("ec2", {"instance_typ": "c7i.large"})


def test_a_key_that_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(UserError, match="the sandbox `e2b` cannot be used here: E2B requires") as caught:
        check_sandbox(AttemptSettings(sandbox="e2b"))
    assert "\n" not in caught.value.message and caught.value.hint


def test_a_package_that_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "blaxel", None)
    with pytest.raises(UserError, match="the sandbox `blaxel` cannot be used here") as caught:
        check_environment("blaxel", {})
    assert "harbor[blaxel]" in (caught.value.hint or "")


def test_our_own_sandboxes_have_no_options() -> None:
    with pytest.raises(UserError, match="the sandbox `host` has no options, so no `keep`"):
        check_sandbox(AttemptSettings(sandbox="host", sandbox_options={"keep": True}))


def test_an_unknown_sandbox_lists_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown sandbox `dockr`; nearest: `docker`"):
        check_sandbox(AttemptSettings(sandbox="dockr"))
