"""`mkb annotate` as a user meets it: asking, resuming, costs, people, the gold set, and clear words for mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.annotation.gold_set import gold_set
from metakernelbench.annotation.scripted import Reply, read_replies
from metakernelbench.cli.app import main
from metakernelbench.cli.output import ExitCode
from metakernelbench.store.store import Store
from tests.annotation.study import NAME, SOURCES, replies, small_study, write_replies
from tests.annotation.test_run import annotated_study
from tests.annotation.test_spreadsheet import cells_of, filled, write_cells

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = 2 * len(SOURCES) + 12 + 4


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """The same with all questions answered."""
    annotated_study(tmp_path / "store").close()
    write_replies(tmp_path / "replies.toml", replies())
    return tmp_path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a store that holds a finished study, and a file of replies."""
    small_study(tmp_path / "store").close()
    write_replies(tmp_path / "replies.toml", replies())
    return tmp_path


def leave(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def annotate(place: Path, *more: str, replies: str = "replies.toml") -> int:
    models = ["--model", "scripted/judge", "--replies", str(place / replies)]
    return leave(["annotate", NAME, "--store", str(place / "store"), *models, *more])


def shown(place: Path, *more: str) -> int:
    return leave(["annotate", NAME, "--store", str(place / "store"), *more])


def test_it_asks_keeps_and_shows(place: Path, capsys: Any) -> None:
    assert annotate(place) == ExitCode.OK
    captured = capsys.readouterr()
    assert f"{NAME}: {ASKED} questions answered now, 0 before;" in captured.out
    for title in (
        "Form of the skills",
        "harmed against helped",
        "by outcome",
        "Uptake against lift",
        "What went wrong",
    ):
        assert title in captured.out
    assert "skills: 12 questions to ask, 0 answered before" in captured.err
    assert annotate(place, "--json") == ExitCode.OK
    again = json.loads(capsys.readouterr().out)
    assert (again["answered"], again["kept"], again["failed"]) == (0, ASKED, [])
    assert {table["name"] for table in again["tables"]} >= {"category_prevalence", "causes_by_model"}


def test_without_a_model_it_shows_what_is_known(place: Path, capsys: Any) -> None:
    assert shown(place) == ExitCode.OK
    assert "has no annotations yet" in capsys.readouterr().out
    assert shown(place, "--json") == ExitCode.OK
    assert set(json.loads(capsys.readouterr().out)) == {"experiment", "tables"}


def test_a_dry_run_counts_and_asks_nothing(place: Path, capsys: Any) -> None:
    options = ["--dry-run", "--model", "gpt-4o-mini"]  # its price is in LiteLLM's table, and no key is needed
    assert shown(place, *options, "--json") == ExitCode.OK
    skills, attempts = json.loads(capsys.readouterr().out)["stages"]
    assert (skills["stage"], skills["needed"], skills["requests"]) == ("skills", 12, 12)
    assert 0 < skills["usd"] < 1
    assert attempts["requests"] == 0
    assert shown(place, *options) == ExitCode.OK
    text = capsys.readouterr().out
    assert "skills: 12 questions to ask, 0 answered; at most" in text
    assert "24 attempts come on top" in text
    with Store.open(place / "store") as store:
        assert store.annotations.of("skill", [], 1) == {}


def test_questions_without_an_answer_leave_with_three_and_the_command_to_go_on(place: Path, capsys: Any) -> None:
    write_replies(place / "bad.toml", (Reply(question="uptake", contains="p36", raw="no"), *replies()))
    assert annotate(place, replies="bad.toml") == ExitCode.INFRASTRUCTURE
    captured = capsys.readouterr()
    assert "no answer: scripted/judge gave 3 malformed answers" in captured.out
    assert f"to ask these again: mkb annotate {NAME} --store" in captured.out
    assert annotate(place) == ExitCode.OK
    assert "2 questions answered now" in capsys.readouterr().out


def test_a_provider_that_stays_down_leaves_with_three(place: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("metakernelbench.annotation.annotator.Annotator.first_pause_s", 0.01)
    write_replies(place / "down.toml", (Reply(http_error=404),))
    assert annotate(place, "--json", replies="down.toml") == ExitCode.USAGE
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "usage"


def test_out_writes_tables_and_pictures(answered: Path) -> None:
    place = answered
    assert shown(place, "--out", str(place / "out")) == ExitCode.OK
    assert (place / "out/tables/category_prevalence.csv").read_text().startswith("category,harm_n")
    pictures = {path.name for path in (place / "out/pictures").iterdir()}
    assert {"uptake-shares.svg", "cause-shares.png", "category-prevalence.pdf", "uptake-against-lift.html"} <= pictures


def test_a_person_exports_fills_in_and_imports(answered: Path, capsys: Any) -> None:
    place, person = answered, ["--annotator", "ana"]
    assert shown(place, "--export", str(place / "a.xlsx"), *person) == ExitCode.OK
    assert "12 skills and 12 attempts to label" in capsys.readouterr().out
    write_cells(place / "b.xlsx", filled(cells_of(place / "a.xlsx")))
    assert shown(place, "--import", str(place / "b.xlsx"), *person) == ExitCode.OK
    assert "28 texts labelled by ana are in the store" in capsys.readouterr().out
    assert shown(place, "--json") == ExitCode.OK
    assert "agreement" in {table["name"] for table in json.loads(capsys.readouterr().out)["tables"]}


def gold_replies(path: Path) -> Path:
    """The gold labels of skills themselves, one category left out; attempts all `ignored`, causes all the toolchain."""
    skills = [
        Reply(
            question="skill",
            contains=skill.text.strip(),
            labels=tuple(
                {"category": s.category, "quote": s.quote, "supported": s.supported}
                for s in skill.labels.statements
                if s.category != "agenda_handoff"
            ),
        )
        for skill in gold_set().skill
    ]
    categories = sorted({s.category for skill in gold_set().skill for s in skill.labels.statements})
    ignored = tuple({"category": category, "uptake": "ignored"} for category in categories)
    cause = {"step": "toolchain_friction", "evidence": "It ended because"}
    return write_replies(
        path, (*skills, Reply(question="uptake", uptake=ignored), Reply(question="cause", causes=(cause,)))
    )


def test_the_gold_set_measures_a_model(tmp_path: Path, capsys: Any) -> None:
    path = gold_replies(tmp_path / "gold.toml")
    options = ["annotate", "--gold", "--store", str(tmp_path / "store"), "--model", "scripted/judge"]
    assert leave([*options, "--replies", str(path), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["answered"] == len(gold_set().skill) + len(gold_set().attempt) + 13
    rows = {row["label"]: row for row in found["tables"][0]["rows"]}
    assert [rows["Workload fact"][name] for name in ("precision", "recall", "f1", "kappa")] == [1, 1, 1, 1]
    assert [rows["Agenda handoff"][name] for name in ("precision", "recall", "f1", "kappa")] == [None, 0, 0, 0]
    assert (rows["ignored"]["recall"], rows["contradicted"]["recall"]) == (1.0, 0.0)
    assert rows["toolchain friction"]["recall"] == 1.0
    assert leave([*options, "--replies", str(path)]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "Annotators on the gold set" in text
    assert "gold: 0 questions answered now, 83 before" in text


def test_a_dry_run_of_the_gold_set_makes_no_store(tmp_path: Path, capsys: Any) -> None:
    options = ["annotate", "--gold", "--store", str(tmp_path / "store"), "--model", "some/model", "--dry-run"]
    assert leave(options) == ExitCode.OK
    assert "83 questions to ask" in capsys.readouterr().out
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an experiment, or ask for --gold"),
        (["x", "--gold"], "name an experiment, or ask for --gold, and not both"),
        (["--gold"], "--gold measures models, and none is given"),
        (["small", "--dry-run"], "--dry-run says what a model would be asked"),
        (["small"], "so its store is not known"),
        (["small", "--store", "nowhere"], "there is no store in nowhere"),
        (["missing.toml"], "cannot read missing.toml"),
        (["small", "--model", "scripted/a"], "needs prepared replies"),
        (["small", "--model", "scripted/a", "--replies", "none.toml"], "replies in none.toml: No such file"),
        (["small", "--model", "no-such/provider-x"], "names no model provider"),
        (["small", "--model", "openrouter/a/b"], "needs OPENROUTER_API_KEY"),
        (["small", "--model", "a/b", "--model", "a/b"], "`a/b` is named twice"),
        (["small", "--model", "a/b", "--passes", "0"], "--passes is 0"),
        (["small", "--model", "a/b", "--temperature", "9"], "--temperature is 9"),
        (["small", "--export", "a.xlsx"], "a person's labels are kept under a name"),
        (["small", "--export", "a.xlsx", "--import", "b.xlsx", "--annotator", "a"], "are two steps"),
        (["small", "--export", "a.xlsx", "--annotator", "a", "--model", "a/b"], "choose one"),
        (["small", "--export", "a.xlsx", "--annotator", "../a"], "--annotator is `../a`; allowed: up to 100 letters"),
        (["small", "--annotator", "a"], "a model is named with --model"),
        (["--gold", "--model", "a/b", "--import", "b.xlsx"], "the gold set is labelled already"),
    ],
)
def test_a_mistake_is_said_in_a_sentence(
    arguments: list[str], message: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    assert leave(["annotate", *arguments]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_unknown_experiments_are_named_with_the_nearest(place: Path, capsys: Any) -> None:
    assert leave(["annotate", "smal", "--store", str(place / "store")]) == ExitCode.USAGE
    assert "unknown experiment `smal`; nearest: `small`" in capsys.readouterr().err


def test_an_interruption_keeps_what_is_answered_and_says_how_to_go_on(place: Path) -> None:
    command = [sys.executable, "-m", "metakernelbench", "annotate", NAME, "--store", str(place / "store")]
    slow = write_replies(place / "slow.toml", (*replies()[:7], Reply(question="uptake", http_error=503)))
    options = ["--model", "scripted/judge", "--replies", str(slow)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with Store.open(place / "store") as store:
        from metakernelbench.analysis.annotations import subjects_of

        digests = list(subjects_of(store, NAME)[0].skills)
        while len(store.annotations.of("skill", digests, 1)) < 12 and process.poll() is None:
            time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert f"Interrupted; what was answered is kept. To go on: mkb annotate {NAME} --store" in said


def test_the_demos_replies_fit_the_demos_skills() -> None:
    given = read_replies(EXAMPLES / "demo/annotations.toml")
    turns = tomllib.loads((EXAMPLES / "demo/turns.toml").read_text())
    skills = [path.read_text() for path in (EXAMPLES / "demo/skills").glob("*.md")]
    skills += [a["skill"] for a in turns["attempt"] if not a.get("skill", "@").startswith("@") and a["skill"].strip()]
    from metakernelbench.annotation.answers import skill_labels_of

    labelled = 0
    for skill in skills:
        reply = next(reply for reply in given if reply.fits("skill", skill))
        labelled += bool(skill_labels_of(reply.text({}), skill).statements)
    assert labelled == len(list((EXAMPLES / "demo/skills").glob("*.md")))
