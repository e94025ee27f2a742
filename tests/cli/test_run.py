"""`mkb run` and `mkb status` as a user meets them: whole output, exit codes, and one real experiment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts.attempt import fingerprint
from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.experiments.plan import Freshness, plan_of
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.store import Store
from tests.experiments.support import record_of, spec_of
from tests.report.support import chromium, opened

ROOT = Path(__file__).parents[2]
SPEC = """\
name = "small"
design = "cross-dsl"
problems = ["p03", "p28"]
dsls = ["tirx", "triton"]
models = ["scripted/nothing"]
store = "out"

[attempt]
device = "cpu"
workload = "smoke"
sandbox = "host"
script = "turns.toml"
"""
TURNS = '[[attempt]]\nmatch = "*"\nskill = "Nothing was learned."\nending = "exit"\n'
IN_A_SANDBOX = pytest.mark.skipif(sandbox_available() is not None, reason="no bubblewrap")
REHEARSAL = (
    "This is a rehearsal, not a result: the model's turns are prepared. The kernels are graded for real, on a CPU, at "
    "the smoke workload.\n"
)


def mkb(*arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "metakernelbench", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OPENROUTER_API_KEY"}
        | {"COLUMNS": "120", "NO_COLOR": "1"},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SPEC)
    (tmp_path / "turns.toml").write_text(TURNS)
    return tmp_path


def test_a_dry_run_says_what_would_run_and_writes_nothing(folder: Path) -> None:
    done = mkb("run", "small.toml", "--dry-run", cwd=folder)
    assert (done.returncode, done.stderr) == (0, REHEARSAL)
    assert done.stdout == (
        "small: 8 attempts, 4 comparisons (cross-dsl: 2 problems, 2 DSLs, 1 model, 1 replicate)\n"
        "attempts          kept  missing  planned\n"
        "solo                 0        4        4\n"
        "cross-dsl: skill     0        4        4\n"
        "at most still to run: 8 attempts, 5.3 sandbox hours, 88 gradings on a CPU\n"
        "about to pay for model calls: $0.00\n"
        "  scripted/nothing: nothing, its turns are prepared (8 attempts)\n"
    )
    assert not (folder / "out").exists()


def test_a_dry_run_names_a_design_that_compares_nothing(folder: Path) -> None:
    (folder / "small.toml").write_text(SPEC.replace('["tirx", "triton"]', '["tirx"]'))
    done = mkb("run", "small.toml", "--dry-run", cwd=folder)
    assert done.returncode == 0
    assert (
        done.stderr
        == f"{REHEARSAL}cross-dsl: no comparison comes of this; `mkb designs show cross-dsl` says what it needs\n"
    )


def test_an_agent_that_does_not_exist_leaves_no_store_behind(folder: Path) -> None:
    (folder / "small.toml").write_text(SPEC.replace("[attempt]", '[attempt]\nagent = "terminus2"'))
    assert mkb("run", "small.toml", cwd=folder).returncode == 2
    assert not (folder / "out").exists()


def test_a_dry_run_as_json_has_counts_reasons_and_bounds(folder: Path) -> None:
    with Store.open(folder / "out", create=True) as store:
        spec = spec_of(folder)
        planned = plan_of(spec_of(folder, models=("scripted/nothing",))).attempts[0]
        store.save_attempt("small", planned, record_of(planned, spec.attempt, None))
    document = json.loads(mkb("run", "small.toml", "--dry-run", "--json", cwd=folder).stdout)
    assert document["counts"]["solo"] == {"missing": 3, "stale": 1}
    assert document["reasons"] == [
        {"key": planned.key, "state": "stale", "reason": "its task or settings have changed"},
    ]
    assert document["upper_bound"] == {"attempts": 8, "sandbox_hours": pytest.approx(16 / 3), "gradings": 88}
    assert document["obstacles"] == []


def test_a_dry_run_names_what_would_keep_the_run_from_starting(folder: Path) -> None:
    spec = (folder / "small.toml").read_text()
    (folder / "small.toml").write_text(spec.replace("[attempt]", '[attempt]\nagent = "terminus-3"'))
    done = mkb("run", "small.toml", "--dry-run", cwd=folder)
    assert done.returncode == 0
    assert "would not start here: unknown agent `terminus-3`; nearest: `terminus-2`" in done.stderr


def test_a_dry_run_names_all_that_would_keep_the_run_from_starting(folder: Path) -> None:
    spec = SPEC.replace('"out"', '"/proc/x"').replace("[attempt]", 'judge = "modal"\n[attempt]\nagent = "terminus-3"')
    (folder / "small.toml").write_text(spec)
    done = mkb("run", "small.toml", "--dry-run", "--json", cwd=folder)
    assert json.loads(done.stdout)["obstacles"] == [
        "unknown agent `terminus-3`; nearest: `terminus-2`, `terminus-1`, `terminus`",
        "prepared turns speak to terminus-2 only, not to terminus-3",
        "the folder /proc/x cannot be made or written to: No such file or directory",
        "the `modal` judge grades on GPUs",
    ]


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (('"cross-dsl"', '"cross"'), [], ("small.toml, line 2: unknown design `cross`; nearest: `cross-dsl`",)),
        (("[attempt]", "[attempts]"), [], ("unknown key `attempts`", "hint: docs/experiments.md shows every key")),
        pytest.param(
            ('"host"', '"bubblewrap"'),
            ["--model", "vendor"],
            ("names no model provider", "openrouter/vendor/model"),
            marks=IN_A_SANDBOX,
        ),
        pytest.param(
            ('"host"', '"bubblewrap"'),
            ["--model", "openrouter/a/b"],
            ("needs OPENROUTER_API_KEY in the environment",),
            marks=IN_A_SANDBOX,
        ),
        (('script = "turns.toml"', ""), [], ("needs prepared turns",)),
        (('"host"', '"dokcer"'), [], ("unknown sandbox `dokcer`; nearest: `docker`",)),
        (("[attempt]", '[attempt]\nagent = "terminus2"'), [], ("unknown agent `terminus2`; nearest: `terminus-2`",)),
        (("store =", 'judge = "jury"\nstore ='), [], ("line 6: unknown judge `jury`",)),
        (
            ('"cross-dsl"', '["cross-dsl", "chain"]\noptions.chain.round = 3'),
            [],
            ("unknown option `round`; nearest: `rounds`",),
        ),
        (
            ('"cross-dsl"', '"cross-model"'),
            [],
            ("the design `cross-model` needs two models", "hint: list more `models`"),
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2_and_starts_nothing(
    folder: Path, change: tuple[str, str], arguments: list[str], said: tuple[str, ...]
) -> None:
    (folder / "small.toml").write_text(SPEC.replace(*change))
    done = mkb("run", "small.toml", *arguments, cwd=folder)
    assert done.returncode == 2
    said_together = " ".join(done.stderr.split())
    for part in said:
        assert part in said_together
    assert "Traceback" not in done.stderr
    assert not (folder / "out" / "work").exists()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")
def test_ctrl_c_twice_ends_running_attempts_at_once_and_leaves_nothing_behind(folder: Path) -> None:
    """The real command, with real signals, while two agents wait for their budget of ten minutes to end."""
    (folder / "turns.toml").write_text('[[attempt]]\nmatch = "*"\nending = "wait"\n')
    running = subprocess.Popen(
        [sys.executable, "-m", "metakernelbench", "run", "small.toml"], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    until = time.monotonic() + 120
    while len(list(folder.glob("out/work/small/*/trial/agent/trajectory.json"))) < 2:
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    said = ""
    while "Ctrl-C again" not in said:
        said += running.stderr.readline()
    assert "Stopping: 2 running attempts end first, nothing new is started." in said
    assert "To go on later: mkb run small.toml" in said
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    with Store.open(folder / "out") as store:
        assert (store.standings("small"), store.leases.held("small")) == ({}, {})
    mine = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout
    assert mine == ""


def test_status_watches_until_everything_is_finished(folder: Path) -> None:
    spec = spec_of(folder / "out", attempt=spec_of(folder).attempt)
    plan = plan_of(spec)
    with Store.open(folder / "out", create=True) as store:
        store.save_experiment(spec, plan)
        watching = subprocess.Popen(
            [sys.executable, "-m", "metakernelbench", "status", "out", "--watch"],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
        )
        freshness = Freshness(spec.attempt, fingerprint)
        skills: dict[str | None, str | None] = {None: None}
        for attempt in plan.attempts:
            record = record_of(attempt, spec.attempt, None).model_copy(update={"skill": f"What {attempt.key} taught."})
            skills[attempt.key] = digest_of(str(record.skill))
            given = skills[attempt.source]
            store.save_attempt("small", attempt, record, attached=given, task=freshness.task(attempt))
    out, _ = watching.communicate(timeout=120)
    assert watching.returncode == 0
    assert "small (complete)" in out


def test_a_mistake_as_json_is_on_stdout(folder: Path) -> None:
    done = mkb("run", "none.toml", "--json", cwd=folder)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "spec"


def test_status_shows_how_far_every_experiment_of_a_store_has_come(folder: Path) -> None:
    spec = spec_of(folder / "out", attempt=spec_of(folder).attempt)
    plan = plan_of(spec)
    with Store.open(folder / "out", create=True) as store:
        store.save_experiment(spec, plan)
        store.record_fault("small", plan.attempts[1].key, try_number=3, gave_up=True, message="Traceback\nKeyError: 1")
    done = mkb("status", "out", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "small (not complete)",
        "attempts          planned  kept  missing  failed  passed  running",
        "solo                    4     0        3       1       0        0",
        "cross-dsl: skill        4     0        4       0       0        0",
        f"failed: {plan.attempts[1].key}: KeyError: 1",
    ]
    document = json.loads(mkb("status", "out", "--json", cwd=folder).stdout)
    assert document["experiments"][0]["kinds"]["solo"]["states"]["failed"] == 1


def test_a_file_is_told_where_another_of_the_same_name_ran_last(folder: Path) -> None:
    (folder / "one.toml").write_text(SPEC.replace('"p03", ', ""))
    with Store.open(folder / "out", create=True) as store:
        spec = spec_of(folder, problems=("p28",), models=("scripted/nothing",))
        store.save_experiment(spec, plan_of(spec))
    said = "small: the file asks for 8 attempts, the stored plan has 4: mkb run small.toml\n"
    for command in ("status", "tables", "report"):
        assert said in mkb(command, "small.toml", cwd=folder).stderr
        assert "the file asks for" not in mkb(command, "one.toml", cwd=folder).stderr
    assert json.loads(mkb("status", "small.toml", "--json", cwd=folder).stdout)["experiments"][0]["otherwise"]


def test_a_run_says_what_it_takes_out_of_the_stored_plan(folder: Path) -> None:
    (folder / "one.toml").write_text(SPEC.replace('"p03", ', ""))
    with Store.open(folder / "out", create=True) as store:
        spec = spec_of(folder, models=("scripted/nothing",))
        store.save_experiment(spec, plan_of(spec))
    said = "This run's plan of 4 attempts replaces the stored one of 8 under the name `small`: 4 leave status"
    assert said in mkb("run", "one.toml", "--dry-run", cwd=folder).stderr
    assert said in mkb("run", "one.toml", cwd=folder).stderr


def test_status_of_a_store_without_experiments_says_so(tmp_path: Path) -> None:
    Store.open(tmp_path / "out", create=True).close()
    assert mkb("status", "out", cwd=tmp_path).stderr == "no experiment has run in the store out yet\n"


def test_status_of_nothing_says_where_it_looked(folder: Path) -> None:
    done = mkb("status", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no store in runs" in done.stderr


@pytest.mark.sandbox
@pytest.mark.timeout(450)
def test_a_rehearsal_runs_to_its_end_and_a_second_run_does_nothing(tmp_path: Path) -> None:
    """Real agent, sandbox, grading and store, on the demo's own turns for two of its problems."""
    text = (ROOT / "examples" / "demo.toml").read_text()
    text = text.replace('problems = ["p03", "p21", "p28", "p49", "p61", "p72"]', 'problems = ["p03", "p28"]')
    text = text.replace('"../runs/demo"', '"out"').replace('"demo/turns.toml"', f'"{ROOT}/examples/demo/turns.toml"')
    (tmp_path / "demo.toml").write_text(text)
    done = mkb("run", "demo.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo: 8 of 8 attempts are in the store (7 run now, 1 recorded as skipped)" in done.stdout
    with Store.open(tmp_path / "out") as store:
        records = dict(store.attempts("demo"))
    assert_the_story_of_the_demo(records)
    again = mkb("run", "demo.toml", "--json", cwd=tmp_path)
    document = json.loads(again.stdout)
    assert (again.returncode, document["finished"], document["skipped"], document["remaining"]) == (0, [], [], 0)
    assert_the_report_opens(tmp_path)


def assert_the_report_opens(folder: Path) -> None:
    done = mkb("report", "demo.toml", "--out", "report.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    if not Path("/usr/bin/chromium").exists():
        return
    with chromium() as browser, opened(browser, folder / "report.html") as (page, complaints):
        assert "Rehearsal, not a result" in page.inner_text("body")
        assert complaints == []


def assert_the_story_of_the_demo(records: dict[str, Any]) -> None:
    first = records["p28/tirx/scripted/rehearsal/0/solo"]
    assert [submission.verdict.passed for submission in first.submissions] == [False, True]
    assert first.final.passed and "residual" in first.skill
    treatment = records["p28/triton/scripted/rehearsal/0/from-tirx"]
    assert first.skill in treatment.instruction
    slow = records["p28/triton/scripted/rehearsal/0/solo"]
    assert treatment.final.timing.implementation_median_ms < slow.final.timing.implementation_median_ms
    assert records["p03/triton/scripted/rehearsal/0/from-tirx"].ended == "skipped"
