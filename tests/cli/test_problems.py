"""`mkb problems`, as a user runs it."""

from __future__ import annotations

import json

import pytest

from metakernelbench.cli.app import main
from metakernelbench.cli.output import ExitCode
from metakernelbench.problems import measure
from metakernelbench.problems.catalog import problem_ids, source_path
from metakernelbench.problems.table import BEGIN, END


@pytest.fixture
def mkb(capsys):
    """Run `mkb problems ...`; gives exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code: int | str | None = 0
        try:
            main(["problems", *arguments])
        except SystemExit as leaving:
            code = leaving.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return run


def test_list_shows_every_problem_of_a_family(mkb):
    code, out, _ = mkb("list", "--family", "moe")
    assert code == ExitCode.OK
    assert "p49" in out and "group_limited_topk_routing" in out and "p28" not in out


def test_list_as_json_has_one_object_per_problem(mkb):
    _, out, _ = mkb("list", "--json")
    rows = json.loads(out)
    assert [row["id"] for row in rows] == problem_ids()
    assert set(rows[0]) == {"id", "family", "slug", "subject"}


def test_show_says_what_a_problem_is(mkb):
    code, out, _ = mkb("show", "p72")
    assert code == ExitCode.OK
    for part in ("gdn_decode", "Apache-2.0", "Qwen3-Next-80B-A3B", "A_log [4] float32, the same in every draw"):
        assert part in out
    assert "28.1 µs on H200" in out and "67637376 bytes read" in out


def test_show_adds_what_was_measured(mkb, monkeypatch, tmp_path):
    measured = {
        "problem": "p28",
        "workload": "full",
        "device": "NVIDIA H200",
        "torch": "2.13.0",
        "inputs": [["residual", [14509, 4096], "bfloat16"]],
        "reference_ms": 0.4321,
    }
    (tmp_path / "records" / "h200").mkdir(parents=True)
    (tmp_path / "records" / "h200" / "problems.jsonl").write_text(json.dumps(measured) + "\n")
    monkeypatch.setattr("metakernelbench.cli.problems.REPOSITORY", tmp_path)
    _, out, _ = mkb("show", "p28")
    assert "residual [14509, 4096] bfloat16" in out
    assert "0.432 ms on NVIDIA H200, torch 2.13.0" in out


def test_table_brings_the_page_up_to_date(mkb, monkeypatch, tmp_path):
    monkeypatch.setattr("metakernelbench.cli.problems.REPOSITORY", tmp_path)
    code, _, err = mkb("table")
    assert code == ExitCode.USAGE and "run this from a checkout" in err
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "problems.md"
    page.write_text(f"# Problems\n\n{BEGIN}\n\n{END}\n")
    assert mkb("table", "--check")[0] == ExitCode.FAILED
    assert mkb("table")[0] == ExitCode.OK
    assert "p49 `group_limited_topk_routing`" in page.read_text()
    assert mkb("table", "--check")[0] == ExitCode.OK


def test_show_as_json_is_complete(mkb):
    _, out, _ = mkb("show", "p49", "--json")
    shown = json.loads(out)
    assert [tensor["name"] for tensor in shown["smoke_outputs"]] == ["topk_indices", "topk_weights"]
    assert shown["smoke_inputs"][-1] == {"name": "routed_scaling_factor", "shape": [], "dtype": "float", "value": 2.5}
    assert shown["workloads"]["full"] == {"tokens": 16384, "width": 4096, "experts": 256}
    assert shown["cost"]["bytes"] == 137_888_256
    assert shown["bound_us"]["H200"] == pytest.approx(34.74, abs=0.01)
    assert len(shown["provenance"]["inferred"]) == 3


def test_show_source_is_the_file(mkb):
    _, out, _ = mkb("show", "p28", "--source")
    assert out == source_path("p28").read_text()


def test_check_reports_progress_on_stderr_and_its_result_on_stdout(mkb):
    code, out, err = mkb("check", "p28", "p72")
    assert code == ExitCode.OK
    assert "2 of 2 problems passed, 0 failed" in out
    assert "[1/2] p28 passed" in err and "[2/2] p72 passed" in err


def test_check_of_an_unsound_problem_exits_with_1_and_says_why(mkb, monkeypatch):
    monkeypatch.setattr("metakernelbench.problems.check_rules.SMOKE_SECONDS", 0.0)
    code, out, _ = mkb("check", "p28", "--json")
    report = json.loads(out)
    assert code == ExitCode.FAILED and report["passed"] is False
    failed = [c for c in report["problems"][0]["checks"] if not c["passed"]]
    assert [c["name"] for c in failed] == ["smoke time"]
    assert "make SMOKE smaller" in failed[0]["detail"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "p4"), "unknown problem `p4`; nearest:"),
        (("check", "p28", "p999"), "unknown problem `p999`"),
        (("list", "--family", "mo"), "unknown family `mo`; nearest: `moe`"),
        (("measure", "p28", "--device", "tpu"), "unknown device `tpu`"),
        (("new", "moe", "p28", "again"), "`p28` exists"),
    ],
)
def test_a_wrong_name_is_a_usage_error_that_lists_the_nearest(mkb, arguments, message):
    code, out, err = mkb(*arguments)
    assert code == ExitCode.USAGE
    assert message in err.replace("\n", "") and out == ""


def test_an_error_is_json_where_json_was_asked_for(mkb):
    code, out, _ = mkb("show", "p4", "--json")
    assert code == ExitCode.USAGE
    assert json.loads(out)["error"]["kind"] == "unknown_name"


def test_measure_prints_one_line_of_json_per_problem_and_fails_where_one_cannot_run(mkb, monkeypatch):
    def in_this_process(id: str, workload: str, device: str, timeout_s: float) -> measure.Measurement | str:
        return measure.measure(id, workload, device) if id == "p28" and timeout_s else "out of memory"

    monkeypatch.setattr(measure, "measure_in_own_process", in_this_process)
    code, out, err = mkb("measure", "p28", "p72", "--workload", "smoke", "--device", "cpu")
    assert code == ExitCode.FAILED
    assert [json.loads(line)["problem"] for line in out.splitlines()] == ["p28"]
    assert "p72 failed: out of memory" in err
