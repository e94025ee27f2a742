"""`mkb tables`, `mkb figures`, `mkb compare` and `mkb simulate`, as their user runs them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from metakernelbench.analysis.registry import TABLES
from metakernelbench.cli.app import main
from tests.disk import files_of_at_most


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("simulated")
    with pytest.raises(SystemExit) as end:
        main(["simulate", str(folder), "--problems", "7", "--models", "2", "--seed", "3"])
    assert end.value.code == 0
    return str(folder)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_a_simulated_study_counts_as_finished(capsys, store):
    code, out, _ = run(capsys, "status", store, "--json")
    assert code == 0
    assert [one["complete"] for one in json.loads(out)["experiments"]] == [True]


def test_every_table_is_listed_with_what_it_shows(capsys):
    code, out, _ = run(capsys, "tables", "--list", "--json")
    assert code == 0
    assert {row["name"]: row["shows"] for row in json.loads(out)} == {k.name: k.shows for k in TABLES.values()}


def test_the_main_tables_are_printed_and_what_they_cannot_show_beside_them(capsys, store):
    code, out, err = run(capsys, "tables", "simulated", "--store", store)
    assert code == 0
    assert "Attempts alone" in out and "Lift by direction" in out
    assert "There is one attempt per cell" in err and "note" not in out


def test_a_table_as_json_is_unrounded(capsys, store):
    code, out, _ = run(capsys, "tables", "simulated", "solo", "--store", store, "--json")
    document = json.loads(out)
    assert code == 0
    assert [table["name"] for table in document["tables"]] == ["solo"]
    assert document["tables"][0]["rows"][0]["n"] == 14
    assert "one_attempt_per_cell" in document["caveats"]


def test_tables_go_to_files_and_a_parquet_export_gives_the_same_ones(capsys, store, tmp_path):
    folders = [f"--{form}={tmp_path / form}" for form in ("csv", "latex")]
    assert run(capsys, "tables", "simulated", "--store", store, *folders)[0] == 0
    assert run(capsys, "export", "parquet", str(tmp_path / "parquet"), "simulated", "--store", store)[0] == 0
    names = {path.stem for path in (tmp_path / "csv").iterdir()}
    assert names == {path.stem for path in (tmp_path / "latex").iterdir()} <= set(TABLES)
    assert run(capsys, "tables", str(tmp_path / "parquet"), "--csv", str(tmp_path / "again"))[0] == 0
    for path in (tmp_path / "csv").iterdir():
        assert path.read_text() == (tmp_path / "again" / path.name).read_text()
        assert list(csv.reader(path.open()))


def test_rules_and_ratios_can_be_counted_otherwise(capsys, store):
    def lift(*options: str) -> float:
        code, out, _ = run(capsys, "tables", "simulated", "lift_by_direction", "--store", store, "--json", *options)
        assert code == 0
        return json.loads(out)["tables"][0]["rows"][0]["lift"]

    assert lift("--ratios", "medians") == lift()
    assert lift("--forgive", "all") == lift("--forgive", "inline-source")


def test_one_arm_of_one_design_can_be_read_alone(capsys, store):
    both = [
        run(capsys, "tables", "simulated", "lift_by_direction", "--store", store, "--json", *options)[1]
        for options in ([], ["--design", "cross-dsl:skill"])
    ]
    assert json.loads(both[0]) == json.loads(both[1])


def test_pictures_are_written_in_the_formats_asked_for(capsys, store, tmp_path):
    code, out, _ = run(
        capsys, "figures", "simulated", str(tmp_path), "lift", "tiers", "--store", store, "--format", "svg,html"
    )
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"lift.svg", "lift.html", "tiers.svg", "tiers.html"}
    assert str(tmp_path / "lift") in out


def test_two_models_are_compared(capsys, store, tmp_path):
    code, out, _ = run(capsys, "compare", "model-a", "model-b", "--of", "simulated", "--store", store, "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["left"], document["right"], document["paired_by_model"]) == ("model-a", "model-b", False)
    assert [table["name"] for table in document["tables"]] == ["compare_solo", "compare_lift", "compare_variants"]
    assert run(capsys, "compare", "model-a", "model-b", "--of", "simulated", "--store", store)[0] == 0
    assert run(capsys, "compare", "simulated", "simulated", "--store", store, "--csv", str(tmp_path))[0] == 0
    assert len(list(tmp_path.glob("*.csv"))) == 3


GRADINGS = Path(__file__).parents[2] / "records" / "h200" / "repeated.jsonl"


def test_a_file_of_repeated_gradings_says_what_band_it_supports(capsys, store):
    code, out, _ = run(capsys, "tables", "simulated", "noise", "--store", store, "--json", "--gradings", str(GRADINGS))
    rows = {row["source"]: row for row in json.loads(out)["tables"][0]["rows"]}
    assert code == 0
    assert rows["one kernel, in the file of repeated gradings"]["pairs"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tables"], "no experiment was named"),
        (["tables", "nowhere"], "its store is not known"),
        (["tables", "simulated", "solos", "--store", "STORE"], "nearest: `solo`"),
        (["tables", "another", "--store", "STORE"], "unknown experiment `another`"),
        (["tables", "simulated", "--store", "STORE", "--ratios", "both"], "allowed: `measured`, `medians`"),
        (["tables", "simulated", "--store", "STORE", "--forgive", "inline"], "unknown rule `inline`"),
        (["tables", "simulated", "--store", "STORE", "--design", "retry"], "unknown design"),
        (["tables", "simulated", "--store", "STORE", "--design", "cross-dsl:skills"], "nearest: `skill`"),
        (["tables", "simulated", "--store", "STORE", "--gradings", __file__], "line 1, is no verdict"),
        (["tables", "simulated", "--store", "STORE", "--csv", "/proc/no"], "cannot write"),
        (["figures", "simulated", "/proc/no", "lift", "--store", "STORE"], "cannot write"),
        (["figures", "simulated", "x", "lifts", "--store", "STORE"], "unknown picture `lifts`"),
        (["figures", "simulated", "x", "--format", "gif", "--store", "STORE"], "unknown format `gif`"),
        (["compare", "a", "model-b", "--of", "simulated", "--store", "STORE"], "has no model `a`"),
        (["compare", "a", "b", "--of", "simulated", "--other-store", "STORE"], "--of names one"),
        (["simulate", "STORE"], "already has an experiment `simulated`"),
        (["simulate", "STORE", "--name", "a b"], "`a b` is no name of an experiment"),
        (["simulate", ""], "nothing is given at the end of `mkb simulate ''`"),
    ],
)
def test_a_mistake_is_named_in_a_sentence(capsys, store, arguments, message):
    code, out, err = run(capsys, *(store if argument == "STORE" else argument for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")


@pytest.mark.parametrize("options", [["tables", "--csv"], ["figures", "--format=svg"]], ids=lambda o: o[0])
def test_a_file_that_finds_no_room_leaves_the_older_one(capsys, store, tmp_path, options):
    out, export = tmp_path / "out", str(tmp_path / "export")
    assert run(capsys, "export", "parquet", export, "simulated", "--store", store)[0] == 0
    order = [options[0], export, *options[1:], str(out)]
    assert run(capsys, *order)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with files_of_at_most(20):
        code, _, err = run(capsys, *order)
    assert code == 2
    assert f"cannot write {out}/" in " ".join(err.split()) and "File too large" in err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
