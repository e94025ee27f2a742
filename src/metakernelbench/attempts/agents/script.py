"""Prepared turns: what a scripted model says, read from one TOML (or JSON) file for a whole experiment.

The file holds one `[[attempt]]` table for each attempt or group of attempts. An attempt gets the first table whose
`match` fits its key (`problem/dsl/model/replicate/arm`; `*` stands for anything, slashes included):

    [[attempt]]
    match = "p28/tirx/*/solo"
    submissions = ["@kernels/first_try.py", "@../witnesses/tirx/p28.py"]
    skill = "@skills/p28_tirx.md"

That short form is all that most attempts need. It plays, in this order: `turns` (below; none here), for every entry of
`submissions` a turn that writes kernel.py and one that runs `task submit` and waits for the answer, then a turn that
writes `skill` to SKILL.md where it is given, then the `ending`:

    ending = "complete"   the default: the model says that it is done
    ending = "wait"       it idles until the budget is used up
    ending = "exit"       it leaves the terminal without saying that it is done

For anything else a table lists its own `[[attempt.turns]]`. A turn is one reply of the model; all keys are optional:

    [[attempt.turns]]
    say = "The reference is bandwidth bound."            # the model's remark, kept in the trajectory
    write = { "kernel.py" = "@kernels/first_try.py" }    # files to write, before `run`
    run = "task submit"                                  # a command line to type and enter
    until = '^\\[task\\] '                                 # look at the screen until this regular expression matches
    within = 300                                         # ... but no longer than so many seconds
    wait = 0.3                                           # seconds the agent watches after typing
    think = 0                                            # seconds the model takes to answer

or, to misbehave, `raw` (a reply sent as it is), or `http_error` (a status code sent instead of a reply) with `times`
(how often, default 1).

Paths in `write` are relative to the agent's working folder. A text that begins with `@` is read from that file,
relative to the folder of the script.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metakernelbench.errors import SpecError
from metakernelbench.files import read_text, why_unread

_HINT = "examples/demo/turns.toml shows how they are written"
ANSWERED = r"^\[task\] "
"""Matches the line that ends every answer of the `task` tool."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Turn(_Part):
    """One reply of a scripted model."""

    say: str = ""
    write: dict[str, str] = Field(default_factory=dict)
    run: str | None = None
    until: str | None = None
    within: float = 300.0
    wait: float = Field(default=0.3, ge=0, le=60)
    think: float = Field(default=0.0, ge=0)
    raw: str | None = None
    http_error: int | None = Field(default=None, ge=400, le=599)
    times: int = Field(default=1, ge=1)


class Script(_Part):
    """What a scripted model does in the attempts whose key `match` fits."""

    match: str
    turns: tuple[Turn, ...] = ()
    submissions: tuple[str, ...] = ()
    skill: str | None = None
    ending: Literal["complete", "wait", "exit"] = "complete"

    def all_turns(self) -> tuple[Turn, ...]:
        """The turns as listed, then those that `submissions` and `skill` stand for."""
        return (*self.turns, *submission_turns(self.submissions), *skill_turns(self.skill))


class _ScriptFile(_Part):
    attempt: tuple[Script, ...] = ()


def submission_turns(sources: tuple[str, ...]) -> Iterator[Turn]:
    """For each source: write it to kernel.py, submit it and wait for the answer."""
    for number, source in enumerate(sources, start=1):
        yield Turn(say=f"Write version {number} of kernel.py.", write={"kernel.py": source})
        yield Turn(say="Submit it and read the verdict.", run="task submit", until=ANSWERED)


def skill_turns(skill: str | None) -> Iterator[Turn]:
    """Write the skill, where there is one to write."""
    if skill is not None:
        yield Turn(say="Write down what was learned.", write={"SKILL.md": skill})


def load_script(path: Path, key: str) -> Script:
    """The script for the attempt called `key`, with all its `@` files read. Raises `SpecError`."""
    for script in read_scripts(path):
        if fnmatchcase(key, script.match):
            return script
    raise SpecError(f"{path} has no [[attempt]] whose `match` fits `{key}`", hint="add one, or end with match = '*'")


def read_scripts(path: Path) -> tuple[Script, ...]:
    """All scripts of a file, with all their `@` files read. Raises `SpecError`."""
    try:
        text = read_text(path)
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        scripts = _ScriptFile.model_validate(data).attempt
        return tuple(_with_files_read(script, path.parent) for script in scripts)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{path}: {where}: {first['msg']}", hint=_HINT) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"cannot read the turns in {path}: {why_unread(error, path)}", hint=_HINT) from error


def _with_files_read(script: Script, folder: Path) -> Script:
    turns = tuple(
        turn.model_copy(update={"write": {name: _text(value, folder) for name, value in turn.write.items()}})
        for turn in script.turns
    )
    submissions = tuple(_text(value, folder) for value in script.submissions)
    skill = None if script.skill is None else _text(script.skill, folder)
    return script.model_copy(update={"turns": turns, "submissions": submissions, "skill": skill})


def _text(value: str, folder: Path) -> str:
    return read_text(folder / value[1:]) if value.startswith("@") else value
