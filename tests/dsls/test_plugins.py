"""The facts that each DSL module states are true of the installed packages."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from metakernelbench.dsls.dsl import dsl_names, load
from metakernelbench.errors import UnknownName

OURS = ("cute", "tirx", "triton")


def exists(dotted: str) -> bool:
    """Whether a dotted name leads to something."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_ours_are_registered() -> None:
    assert set(OURS) <= set(dsl_names())


def test_unknown_dsl_lists_the_nearest() -> None:
    with pytest.raises(UnknownName, match="`triton`"):
        load("trtion")


@pytest.mark.parametrize("name", OURS)
class TestPlugin:
    def test_requirements_are_the_installed_versions(self, name: str) -> None:
        dsl = load(name)
        pinned = {r.split("[")[0].split("==")[0]: r.split("==")[1] for r in dsl.requirements}
        assert dsl.versions() == pinned

    def test_allowed_modules_can_be_imported(self, name: str) -> None:
        for module in load(name).imports:
            importlib.import_module(module)

    def test_forbidden_names_lie_inside_allowed_modules(self, name: str) -> None:
        dsl = load(name)
        assert all(any(f.startswith(f"{i}.") for i in dsl.imports) for f in dsl.forbidden)

    def test_plugin_is_loaded_without_importing_the_dsl_or_torch(self, name: str) -> None:
        module = type(load(name)).__module__
        code = f"import sys, {module}; print([m for m in ('torch', 'cutlass', 'tvm', 'triton') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


SPELLED = sorted({(name, dotted) for name in OURS for dotted in load(name).forbidden})
ONLY_IN_SOME_PLACES = ("tvm.tirx", "tvm.tirx.op", "tvm.tirx.script", "tvm.tirx.script.builder")


@pytest.mark.parametrize(("name", "dotted"), SPELLED)
def test_forbidden_name_exists(name: str, dotted: str) -> None:
    """A misspelt name would forbid nothing. One intrinsic is reachable under some of several module names only."""
    if name == "tirx" and dotted.startswith(ONLY_IN_SOME_PLACES) and not exists(dotted):
        tail = dotted.rsplit(".", maxsplit=1)[-1]
        assert any(exists(other) for _, other in SPELLED if other.endswith(tail))
    else:
        assert exists(dotted)
