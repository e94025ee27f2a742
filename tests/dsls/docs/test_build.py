"""Documentation is made from installed packages: a toy package in full, the real ones by samples."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from metakernelbench.dsls.docs.build import MOST_BYTES, Docs, build, fingerprint
from metakernelbench.dsls.dsl import Dsl, Interceptor, load
from metakernelbench.errors import InfrastructureFault, UserError

PACKAGE = {
    "toylang/__init__.py": '''
        """A toy language.

        With more to say.
        """
        import functools
        from typing import Any, Union
        from toylang.ops import add, Machine, hidden
        from toylang import _private

        VERSION = (1, 2)
        Shape = Union[int, tuple["toylang.Shape", ...]]
        print("noise at import")

        class Registry:
            """Attributes under one name."""
            def __init__(self):
                self.fast = functools.partial(add, 1)
            def lookup(self, name: str) -> "Any":
                """Find one."""

        registry = Registry()
        broken = property(lambda self: 1 / 0)

        def __getattr__(name):
            raise RuntimeError(name)
        ''',
    "toylang/ops.py": '''
        """Operations. Second sentence."""
        import functools
        def add(x: "int", y: int = object()) -> int:
            """Add two numbers. It is exact.

            # Not a heading of the page
            """
        twice = functools.partial(add, y=2)
        def hidden():
            """Must not be used."""
        class Machine:
            """A machine."""
            def run(self, *, times: int = 1):
                """Run it ```so```."""
            @property
            def speed(self):
                """How fast."""
        ''',
    "toylang/_private.py": "def secret(): ...",
    "toylang/needs_a_gpu.py": '''
        """Only with a GPU."""
        raise SystemExit("no GPU")
        def launch(grid, *, stream=None) -> None:
            """Launch it."""
        ''',
    "toylang/raw.py": "def assembly(): ...",
}


class ToyLang(Dsl):
    name = "toylang"
    title = "Toy Language"
    requirements = ("toylang==1",)
    imports = frozenset({"toylang"})
    forbidden: ClassVar[Mapping[str, str]] = {
        "toylang.raw": "it is raw",
        "toylang.hidden": "no",
        "toylang.ops.hidden": "no",
    }
    devices = frozenset({"cpu"})
    kernel_name_patterns = ()
    guide: ClassVar[Path | None] = None
    installed: ClassVar[dict[str, str]] = {"toylang": "1"}

    def intercept(self, interceptor: Interceptor) -> None: ...

    def versions(self) -> dict[str, str]:
        return self.installed


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyLang:
    for name, text in PACKAGE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ToyLang()


def page(docs: Docs, name: str) -> str:
    return (docs.folder / name).read_text()


class TestAToyPackage:
    def test_every_public_module_has_a_page_and_stands_in_the_index(self, toy: ToyLang) -> None:
        docs = build(toy)
        pages = {str(path.relative_to(docs.folder)) for path in docs.folder.rglob("*.md")}
        modules = {"modules/toylang.md", "modules/toylang.ops.md", "modules/toylang.needs_a_gpu.md"}
        assert pages == {"index.md", "not-allowed.md", *modules}
        index = page(docs, "index.md")
        assert "- [toylang.ops](modules/toylang.ops.md) (3 names): Operations." in index  # `hidden` is left out
        assert index.index("Start here") < index.index("toylang.md") < index.index("All modules")

    def test_a_definition_shows_its_signature_and_docstring(self, toy: ToyLang) -> None:
        text = page(build(toy), "modules/toylang.ops.md")
        assert "## add\n\n```python\nadd(x: 'int', y: int = <object object>) -> int\n```" in text
        assert "It is exact." in text
        assert "## twice\n\n```python\ntwice(x: 'int', *, y: int = 2) -> int\n```" in text
        assert "### Machine.run\n\n```python\nMachine.run(self, *, times: int = 1)\n```" in text
        assert "````text\nRun it ```so```.\n````" in text
        assert "### Machine.speed" in text

    def test_what_another_module_defines_is_one_line_with_a_link(self, toy: ToyLang) -> None:
        text = page(build(toy), "modules/toylang.md")
        assert "- `Machine()`: A machine. ([toylang.ops](toylang.ops.md))" in text
        assert "## Machine" not in text

    def test_an_object_with_methods_is_described_by_them(self, toy: ToyLang) -> None:
        text = page(build(toy), "modules/toylang.md")
        assert "### registry.lookup\n\n```python\nregistry.lookup(name: str) -> 'Any'\n```" in text
        assert "### registry.fast" in text
        assert "`VERSION = (1, 2)`" in text
        assert "`Shape = Union[int, tuple['Shape', ...]]`" in text
        assert "`Any" not in text, "what comes from elsewhere is not listed"

    def test_a_module_that_cannot_be_imported_is_read_from_its_source(self, toy: ToyLang) -> None:
        text = page(build(toy), "modules/toylang.needs_a_gpu.md")
        assert "cannot be imported here (SystemExit: no GPU)" in text
        assert "launch(grid, *, stream=None) -> None" in text

    def test_what_is_not_allowed_has_no_page_but_a_reason(self, toy: ToyLang) -> None:
        docs = build(toy)
        assert "`toylang.raw`: it is raw" in page(docs, "not-allowed.md")
        everything = "".join(path.read_text() for path in (docs.folder / "modules").iterdir())
        for absent in ("assembly", "Must not be used", "secret"):
            assert absent not in everything

    def test_it_is_made_once_and_again_the_same(self, toy: ToyLang) -> None:
        first = build(toy)
        texts = {path: path.read_text() for path in first.folder.rglob("*.md")}
        assert first.seconds > 0
        assert build(toy).seconds == 0
        second = build(toy, again=True)
        assert (second.seconds > 0, second.folder) == (True, first.folder)
        assert {path: path.read_text() for path in second.folder.rglob("*.md")} == texts

    def test_anyone_may_read_it(self, toy: ToyLang) -> None:
        docs = build(toy)
        assert docs.folder.stat().st_mode & 0o777 == 0o755
        assert (docs.folder / "index.md").stat().st_mode & 0o777 == 0o644

    def test_another_version_or_guide_is_another_documentation(self, toy: ToyLang, tmp_path: Path) -> None:
        docs, print_ = build(toy), fingerprint(toy)
        toy.installed = {"toylang": "2"}  # type: ignore[misc]
        assert build(toy).folder != docs.folder
        assert fingerprint(toy) == print_, "what a machine has installed does not make records stale"
        guide = tmp_path / "guide.md"
        guide.write_text("# How\n")
        toy.guide = guide  # type: ignore[misc]
        assert fingerprint(toy) != print_
        assert page(build(toy), "guide.md") == "# How\n"

    def test_what_is_not_installed_is_the_users_to_install(self, toy: ToyLang) -> None:
        toy.installed = {}  # type: ignore[misc]
        with pytest.raises(UserError, match="not installed") as raised:
            build(toy)
        assert raised.value.hint == "pip install toylang==1"

    def test_packages_that_end_the_process_are_our_fault(self, toy: ToyLang, tmp_path: Path) -> None:
        (tmp_path / "site/toylang/leaves.py").write_text("import os, sys\nsys.stderr.write('gone')\nos._exit(7)\n")
        with pytest.raises(InfrastructureFault, match="gone"):
            build(toy)

    def test_builds_that_nobody_used_for_long_are_removed(self, toy: ToyLang) -> None:
        import os

        old = build(toy).folder
        os.utime(old, (time.time() - 10**7,) * 2)
        toy.installed = {"toylang": "3"}  # type: ignore[misc]
        build(toy)
        assert not old.exists()


LOOKED_UP = {
    "cute": ("cutlass.cute", ("autovec_copy", "## compile", "make_layout")),
    "tirx": (
        "tvm.script.tirx",
        ("match_buffer", "`alloc_shared(", "### cuda.warp_sum", "### ptx.tcgen05.alloc", "`float8_e4m3fn`"),
    ),
    "triton": ("triton.language", ("`dot(input, other", "cdiv(x, div)")),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_ours_hold_what_an_agent_looks_up(name: str) -> None:
    dsl = load(name)
    docs = build(dsl)
    module, needed = LOOKED_UP[name]
    text = page(docs, f"modules/{module}.md")
    assert [word for word in needed if word not in text] == []
    assert docs.bytes < MOST_BYTES
    assert (docs.folder / "guide.md").is_file() == (dsl.guide is not None)
    assert "/home/" not in page(docs, "index.md")
