"""The `mkb` command itself: what it says where it is misused."""

from __future__ import annotations

import json

import pytest

from metakernelbench.cli.app import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["problems", "show"], "Missing argument"),
        (["problems", "list", "--famly", "moe"], "No such option: --famly"),
        (["rematch", "demo", "--store"], "requires an argument"),
        (["designs", "shwo"], "No such command 'shwo'"),
        (["repot"], "unknown command `repot`; nearest: `report`"),
    ],
)
def test_misuse_is_told_as_text_or_as_one_json_document(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    code, out, err = run(capsys, arguments[0], "--json", *arguments[1:])
    assert (code, err) == (2, "")
    assert json.loads(out)["error"]["kind"] in {"usage", "unknown_name"}


def test_a_command_that_succeeds_leaves_with_zero_in_either_form(capsys):
    assert run(capsys, "designs", "list")[0] == 0
    code, out, _ = run(capsys, "designs", "list", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(out)} > {"cross-dsl", "retry"}
