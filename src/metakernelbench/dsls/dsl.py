"""What a kernel DSL brings: what a submission may import, where it runs, how its launches are observed.

One module a DSL. Ours are registered like anyone's, through the entry-point group `metakernelbench.dsls`. Neither this
module nor the DSL modules import a DSL at import time: the verifier never needs one, only the worker does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from metakernelbench.errors import UnknownName

if TYPE_CHECKING:
    import torch

ENTRY_POINT_GROUP = "metakernelbench.dsls"

type Launch = Callable[[], None]
"""Performs one kernel launch as the submission asked for it."""

type Interceptor = Callable[[str, Sequence[torch.Tensor], Launch], None]
"""Called in place of every launch with the kernel's name, its tensor arguments and the launch itself; it may perform
it, leave it out, or change what the kernel wrote. The name is `file:function` where the file that defines or compiles
the kernel is known, so that a library's kernel can be told from the submission's."""

type Observe = Callable[..., Any]
"""`launches.observed` with its interceptor filled in: what our own DSL modules hand down to their patches."""


class Dsl(ABC):
    """A kernel DSL. Subclasses set the class variables and say how launches are intercepted."""

    name: ClassVar[str]
    """Short name used in commands, paths and records: `cute`."""
    title: ClassVar[str]
    """Name for people and prompts: `CuTe DSL`."""
    requirements: ClassVar[tuple[str, ...]]
    """Pinned packages that a sandbox and a worker need, as pip requirements."""
    imports: ClassVar[frozenset[str]]
    """Dotted module prefixes that a submission may import besides torch and the harmless standard library."""
    forbidden: ClassVar[Mapping[str, str]] = {}
    """Dotted names inside those modules that it may not use (source loaders, raw-code intrinsics) → why."""
    devices: ClassVar[frozenset[str]]
    """Where its kernels run: of `cpu` and `cuda`."""
    kernel_name_patterns: ClassVar[tuple[str, ...]]
    """Regular expressions of the names that a GPU profiler shows for its kernels."""
    documented: ClassVar[tuple[str, ...]] = ()
    """Modules whose offline documentation an agent is given, those to begin with first, with all that lies below them;
    where left out, `imports`. What is `forbidden` gets no page."""
    guide: ClassVar[Path | None] = None
    """A short guide of ours in Markdown, which goes with that documentation."""

    def environment(self, device: str) -> dict[str, str]:
        """Environment variables that a worker on `device` needs before Python starts."""
        return {}

    def compiling_for(self, arch: str) -> dict[str, str] | None:
        """Environment variables with which kernels are compiled for a GPU's architecture (`sm_100a`) on a machine that
        has none; None where that cannot be done."""
        return None

    @abstractmethod
    def intercept(self, interceptor: Interceptor) -> None:
        """Route every later launch of this DSL in this process through `interceptor`. Runs in the worker, before
        kernel.py is imported."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the DSL's packages as installed here; empty where it is not installed."""


@cache
def _entries() -> dict[str, EntryPoint]:
    # Looked up once: it reads the metadata of every installed package.
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


DSL_HINT = "`mkb doctor` shows those that work here; docs/dsl/adding.md says how one is added"
"""What to do about a DSL that nobody knows."""


def dsl_names() -> list[str]:
    """The names of all installed DSL modules."""
    return sorted(_entries())


def load(name: str) -> Dsl:
    """The DSL called `name`. Raises `UnknownName`."""
    if name not in _entries():
        raise UnknownName("DSL", name, dsl_names(), hint=DSL_HINT)
    dsl: Dsl = _entries()[name].load()()
    return dsl
