"""The Python that a sandbox sees: this interpreter, and of its packages only those that the variant needs.

Inside, the packages stand in a virtual environment of their own under /opt/venv, so that two sandboxes of a problem
differ in the DSL's packages and in nothing else, and so that nothing of this program is there. The interpreter keeps
its own path: its libraries are found by it.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from metakernelbench.errors import UserError

VENV = PurePosixPath("/opt/venv")
SITE = VENV / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
BASE_REQUIREMENTS = ("torch", "numpy")
"""What every sandbox has, whatever the DSL."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What has to be bound into a sandbox, read-only."""

    prefix: Path
    """The interpreter's installation, outside and inside."""
    site: Path
    """The folder that holds all installed packages."""
    entries: tuple[str, ...]
    """Names in `site` that the sandbox sees."""

    @property
    def is_system(self) -> bool:
        """Whether the interpreter comes with /usr, which is bound anyway."""
        return self.prefix in (Path("/usr"), Path("/usr/local"))

    @property
    def interpreter(self) -> Path:
        """The interpreter itself, without the packages."""
        return self.prefix / f"bin/python{sys.version_info.major}.{sys.version_info.minor}"

    def venv_config(self) -> str:
        """The text of pyvenv.cfg inside."""
        return f"home = {self.interpreter.parent}\ninclude-system-site-packages = false\n"


@cache
def runtime_for(requirements: tuple[str, ...]) -> Runtime:
    """This interpreter with the packages that `requirements` ask for, theirs included. `UserError` if one is absent."""
    site = Path(sysconfig.get_path("purelib")).resolve()
    entries = {entry for dist in _closure(requirements) for entry in _entries(dist)}
    present = tuple(sorted(entry for entry in entries if (site / entry).exists()))
    return Runtime(prefix=Path(sys.base_prefix).resolve(), site=site, entries=present)


def _closure(requirements: Iterable[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(text) for text in requirements]
    required = {canonicalize_name(requirement.name) for requirement in todo}
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            dist = found.setdefault(name, distribution(name))
        except PackageNotFoundError:
            if name in required:
                raise UserError(
                    f"the sandbox needs the package `{requirement}`, which is not installed here",
                    hint=f"install it into this environment: pip install '{requirement}'",
                ) from None
            continue
        for text in dist.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                todo.append(needed)
    return list(found.values())


def _entries(dist: Distribution) -> set[str]:
    """The names in site-packages that a distribution's files stand under."""
    names = {file.parts[0] for file in dist.files or ()}
    return {name for name in names if name not in ("..", "__pycache__", "bin") and not name.startswith("/")}
