from pathlib import Path

import pytest

from metakernelbench.attempts.agents.script import load_script, read_scripts
from metakernelbench.errors import SpecError

KEY = "p28/tirx/scripted/demo/0/solo"


def write(folder: Path, text: str) -> Path:
    path = folder / "turns.toml"
    path.write_text(text)
    return path


def test_the_first_table_whose_pattern_fits_the_key_is_taken(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [[attempt]]
        match = "p28/*/from-*"
        skill = "wrong arm"
        [[attempt]]
        match = "p28/tirx/*/solo"
        skill = "right"
        [[attempt]]
        match = "*"
        skill = "too late"
        """,
    )
    assert load_script(path, KEY).skill == "right"


def test_the_short_form_stands_for_write_submit_and_wait_then_the_skill(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("one\n")
    path = write(tmp_path, '[[attempt]]\nmatch = "*"\nsubmissions = ["@first.py", "two"]\nskill = "learned"\n')
    turns = load_script(path, KEY).all_turns()
    assert [(turn.write, turn.run) for turn in turns] == [
        ({"kernel.py": "one\n"}, None),
        ({}, "task submit"),
        ({"kernel.py": "two"}, None),
        ({}, "task submit"),
        ({"SKILL.md": "learned"}, None),
    ]
    assert all(turn.until for turn in turns if turn.run)


def test_a_script_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_scripts(tmp_path / "absent.toml")
    assert caught.value.message == f"cannot read the turns in {tmp_path}/absent.toml: No such file or directory"


def test_listed_turns_come_before_the_short_form(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[[attempt]]\nmatch = "*"\nskill = "s"\n[[attempt.turns]]\nrun = "ls"\n',
    )
    assert [turn.run for turn in load_script(path, KEY).all_turns()] == ["ls", None]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('[[attempt]]\nmatch = "p01/*"\n', KEY),
        ('[[attempt]]\nmatch = "*"\nsubmission = ["x"]\n', "attempt.0.submission"),
        ('[[attempt]]\nmatch = "*"\nending = "never"\n', "attempt.0.ending"),
        ('[[attempt]]\nmatch = "*"\nskill = "@no_such_file.md"\n', "no_such_file.md"),
        ('[[attempt]]\nmatch = "*"\nskill = "@/dev/zero"\n', "no regular file"),
        ("[[attempt]\n", "turns.toml"),
        ("a = " + "[" * 5000 + "]" * 5000, "recursion"),
    ],
    ids=["nothing fits", "unknown key", "unknown ending", "missing file", "endless file", "not TOML", "too deep"],
)
def test_an_unusable_script_is_refused_with_the_place_named(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(SpecError, match=names.replace(".", r"\.")):
        load_script(write(tmp_path, text), KEY)
