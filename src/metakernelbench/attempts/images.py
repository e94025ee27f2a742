"""The image of a sandbox, for those of Harbor's environment types that build one (docker, modal, daytona, ...).

It holds what our own sandboxes show of this machine: an interpreter, PyTorch, the packages of one DSL, a compiler, a
terminal, the task and its documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_SYSTEM = ("gcc", "libc6-dev", "procps", "tmux")
_DOCKERFILE = """\
FROM {base}
# hadolint ignore=DL3008
RUN apt-get update \\
 && apt-get install -y --no-install-recommends {system} \\
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/task/bin:/opt/venv/bin:$PATH PYTHONPATH=/task LANG=C.UTF-8
RUN python3 -m pip install --no-cache-dir{index} {torch} {numpy}
COPY requirements.txt /opt/requirements.txt
RUN python3 -m pip install --no-cache-dir -r /opt/requirements.txt
COPY task /task
COPY docs /docs
RUN mkdir -p /app /mailbox && echo '. /task/profile.sh' > /etc/profile.d/task.sh
WORKDIR /app
"""


class Image(BaseModel):
    """What an image is built from. The defaults are the versions that the benchmark is stated for; those of a DSL's
    packages come from its module, unless `packages` says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str = Field(default="python:3.12-slim", pattern=r"^\S+$")
    """Image to start from: Debian or a relative of it, with Python as `python3`."""
    system: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")], ...] = Field(default=(), strict=False)
    """Debian packages that it gets besides a compiler and a terminal."""
    torch: str = Field(default="torch==2.13.0", pattern=r"^torch\b[^\s;|&]*$")
    """Requirement of PyTorch."""
    index: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """A further package index, for a PyTorch that is built for another CUDA than the usual one (13.0)."""
    numpy: str = Field(default="numpy==2.5.5", pattern=r"^numpy\b[^\s;|&]*$")
    """Requirement of NumPy."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Name of a package → the requirement that takes the place of the DSL's own, such as
    `nvidia-cutlass-dsl = "nvidia-cutlass-dsl[cu13]==4.8.0"`."""


def dockerfile(image: Image) -> str:
    """The text of a Dockerfile, in whose folder are requirements.txt, task and docs."""
    index = "" if image.index is None else f" --extra-index-url {image.index}"
    return _DOCKERFILE.format(
        base=image.base,
        system=" ".join(sorted({*_SYSTEM, *image.system})),
        index=index,
        torch=_quoted(image.torch),
        numpy=_quoted(image.numpy),
    )


def _quoted(requirement: str) -> str:
    return f"'{requirement}'"


def requirements(image: Image, own: Iterable[str]) -> tuple[str, ...]:
    """The DSL's requirements with those replaced that the image names."""
    return tuple(image.packages.get(_name(requirement), requirement) for requirement in own)


def _name(requirement: str) -> str:
    """`nvidia-cutlass-dsl` of `nvidia-cutlass-dsl[cu13]==4.7.0`."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]
