"""The Dockerfile of a sandbox holds the pinned versions, and a linter finds nothing wrong with it.

No image is built here: that takes a container engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from pydantic import ValidationError

from metakernelbench.attempts.images import Image, dockerfile, requirements
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import task_files


def linted(text: str) -> str:
    """What hadolint says of a Dockerfile; empty where it has nothing to say."""
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not linter.exists() and shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([str(linter), "-"], input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "image", [Image(), Image(base="debian:12", index="https://wheels.example/cu128", torch="torch==2.14.0")]
)
def test_a_linter_finds_nothing_wrong(image: Image) -> None:
    assert linted(dockerfile(image)) == ""
    assert "DL3007" in linted("FROM debian:latest\n"), "the linter works"


@pytest.mark.parametrize(
    ("dsl", "pinned"),
    [
        ("cute", {"nvidia-cutlass-dsl[cu13]==4.7.0", "apache-tvm-ffi==0.1.12"}),
        ("tirx", {"apache-tvm==0.25.0.post1", "apache-tvm-ffi==0.1.12"}),
    ],
)
def test_a_task_brings_the_versions_that_the_benchmark_is_stated_for(dsl: str, pinned: set[str]) -> None:
    files = task_files("p28", dsl, AttemptSettings(), None)
    text = files["environment/Dockerfile"].decode()
    assert "'torch==2.13.0'" in text and "index-url" not in text
    assert pinned <= set(files["environment/requirements.txt"].decode().split("\n"))


def test_another_set_of_versions_can_be_chosen() -> None:
    image = Image(torch="torch==2.14.0", packages={"nvidia-cutlass-dsl": "nvidia-cutlass-dsl[cu13]==4.8.0"})
    files = task_files("p28", "cute", AttemptSettings(image=image), None)
    assert "'torch==2.14.0'" in files["environment/Dockerfile"].decode()
    lines = files["environment/requirements.txt"].decode().split("\n")
    assert "nvidia-cutlass-dsl[cu13]==4.8.0" in lines and "nvidia-cutlass-dsl[cu13]==4.7.0" not in lines
    assert requirements(image, ("apache-tvm==0.25.0.post1",)) == ("apache-tvm==0.25.0.post1",)


@pytest.mark.parametrize("values", [{"base": "a b"}, {"torch": "torch; rm -rf /"}, {"index": "ftp://x"}, {"bse": "x"}])
def test_nonsense_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Image.model_validate(values)
