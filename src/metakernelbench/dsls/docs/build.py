"""Builds the documentation of a DSL, once for each combination of what it is made from, and keeps it in a cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metakernelbench.dsls.docs.entries import Module, from_json
from metakernelbench.dsls.docs.rendering import pages
from metakernelbench.dsls.dsl import Dsl
from metakernelbench.errors import InfrastructureFault, UserError

MOST_BYTES = 20 * 10**6
"""The largest documentation that a sandbox is given."""
_PATIENCE_S = 600
_KEPT_S = 14 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Docs:
    """Documentation that is ready to be shown."""

    folder: Path
    pages: int
    bytes: int
    seconds: float
    """How long making it took; 0 where it was in the cache."""


def fingerprint(dsl: Dsl) -> str:
    """Digest of all that the documentation is made from: the pinned packages, the guide, the rules, the generator. The
    same on every machine, whether the packages are installed there or not."""
    made_from = {
        "name": dsl.name,
        "title": dsl.title,
        "requirements": dsl.requirements,
        "documented": documented(dsl),
        "forbidden": dict(sorted(dsl.forbidden.items())),
        "guide": _guide(dsl),
        "generator": _generator(),
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def documented(dsl: Dsl) -> tuple[str, ...]:
    """The modules whose pages come first and below which all modules get one."""
    return dsl.documented or tuple(sorted(dsl.imports))


def build(dsl: Dsl, *, again: bool = False) -> Docs:
    """The documentation of `dsl`: from the cache, or made now; with `again`, made now in any case.

    Raises `UserError` where the DSL is not installed, `InfrastructureFault` where its packages could not be read.
    """
    folder = _folder(dsl)
    with _alone(folder):
        if again:
            shutil.rmtree(folder, ignore_errors=True)
        start = time.monotonic()
        made = not folder.is_dir()
        if made:
            _make(dsl, folder)
        os.utime(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return Docs(
            folder=folder,
            pages=len(files),
            bytes=sum(path.stat().st_size for path in files),
            seconds=time.monotonic() - start if made else 0.0,
        )


def _make(dsl: Dsl, folder: Path) -> None:
    modules = _inspected(dsl)
    texts = pages(dsl.title, modules, start=documented(dsl), guide=_guide(dsl), forbidden=dsl.forbidden)
    size = sum(len(text.encode()) for text in texts.values())
    if size > MOST_BYTES:
        raise UserError(
            f"the documentation of {dsl.title} would have {size / 1e6:.0f} MB of at most {MOST_BYTES / 1e6:.0f}",
            hint="name fewer modules in `documented`",
        )
    _sweep(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    for name, text in texts.items():
        page = unfinished / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, errors="replace")
    for path in (unfinished, *unfinished.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    unfinished.rename(folder)


def _inspected(dsl: Dsl) -> list[Module]:
    """What a process of its own finds in the packages."""
    if not dsl.versions():
        raise UserError(
            f"{dsl.title} is not installed here, so that its documentation cannot be made",
            hint=f"pip install {' '.join(dsl.requirements)}",
        )
    request = json.dumps({"modules": documented(dsl), "skip": sorted(dsl.forbidden)})
    environment = {**os.environ, **dsl.environment("cpu"), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mkb-docs-") as scratch:
        answer = Path(scratch, "modules.json")
        command = [sys.executable, "-m", "metakernelbench.dsls.docs.inspecting", str(answer)]
        try:
            done = subprocess.run(
                command, input=request, env=environment, cwd=scratch, capture_output=True, text=True,
                timeout=_PATIENCE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InfrastructureFault(f"importing the packages of {dsl.title} took over {_PATIENCE_S} s") from None
        if done.returncode != 0 or not answer.is_file():
            said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise InfrastructureFault(f"the packages of {dsl.title} could not be read: {said[0][:300]}")
        return [from_json(module) for module in json.loads(answer.read_text())]


def _folder(dsl: Dsl) -> Path:
    installed = json.dumps([dsl.versions(), sys.version_info[:2]])
    made_from = hashlib.sha256(f"{fingerprint(dsl)}{installed}".encode()).hexdigest()
    return _cache() / f"{dsl.name}-{made_from[:16]}"


def _cache() -> Path:
    """Where documentation is kept: for root in a place that every user can pass through."""
    usual = "/var/cache" if os.geteuid() == 0 else Path.home() / ".cache"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or usual) / "metakernelbench" / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _sweep(cache_folder: Path) -> None:
    """Remove what nobody has used for a long time, and what a killed build left."""
    for folder in cache_folder.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


def _guide(dsl: Dsl) -> str | None:
    return None if dsl.guide is None or not dsl.guide.is_file() else dsl.guide.read_text()


@cache
def _generator() -> str:
    whole = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two processes that want the same documentation make it once."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
