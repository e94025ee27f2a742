"""What a report says, and what it never contains."""

from __future__ import annotations

import re

import pytest

from metakernelbench.analysis.simulate import World, family_of, simulate
from metakernelbench.attempts.settings import SCRIPTED
from metakernelbench.experiments.designs import Plan, cross_dsl
from metakernelbench.experiments.planned import merged
from metakernelbench.report import names, packing, page, texts
from metakernelbench.report.packing import DETAILS
from metakernelbench.report.page import Report
from metakernelbench.report.study import Running, Study
from metakernelbench.report.tables import as_json
from tests.report.support import HOSTILE, HOSTILE_NAME, everything, study, trajectory


def test_a_study_on_a_gpu_with_a_model_is_no_rehearsal():
    assert study().rehearsal() == []
    assert "Rehearsal, not a result" not in Report(study()).overview()


def test_prepared_turns_make_it_a_rehearsal():
    html = Report(study(model=f"{SCRIPTED}demo")).overview()
    assert "Rehearsal, not a result" in html
    assert "A script of prepared turns stood in for the model" in html


def test_the_overview_says_what_came_out_in_plain_words_and_what_it_cannot_show():
    html = Report(study()).overview()
    assert "<h1>No clear effect overall</h1>" in html
    assert "Over 12 comparisons, the paired lift ΔGM is +19.9" in html
    assert "Of 12 comparisons, 4 got faster with the skill, 3 slower" in html
    assert "There is one attempt per cell" in html


def unfinished(**changes) -> Study:
    whole = study()
    gone = ("p03/cute/m/0/solo", "p28/cute/m/0/from-tirx")
    records = {key: made for key, made in whole.records.items() if key not in gone}
    return Study(name="trial", plan=whole.plan, records=records, **changes)


def test_unfinished_comparisons_are_named_and_left_out():
    html = everything(unfinished())
    assert "2 of 12 comparisons are not finished" in html
    assert "22 of 24 attempts are finished." in html
    assert "not finished</span>" in html


def test_a_running_attempt_says_how_far_it_is():
    html = everything(unfinished(running={"p03/cute/m/0/solo": Running(trajectory=trajectory("x"))}))
    assert "22 of 24 attempts are finished, 1 running." in html
    assert "running, 4 turns so far" in html


@pytest.mark.parametrize("plan", [Plan(attempts=(), comparisons=()), cross_dsl(["p03"], ["cute", "tirx"], ["m"], 1)])
def test_a_study_without_records_has_a_report(plan):
    html = page.render(Study(name="empty", plan=plan, records={}))
    assert "Nothing has been judged yet" in html or "Nothing to read yet" in html


def test_nothing_is_loaded_from_anywhere():
    html = page.Report(study()).shell("", parts=page.Markup("{}")) + everything(study())
    assert re.findall(r'(?:src|href)="(?!#|data:,)[^"]*"', html) == []
    assert "default-src 'none'" in html and "connect-src" not in html


def test_every_link_leads_to_a_page():
    html = everything(study())
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    linked = {target.split("?")[0] for target in re.findall(r'(?:href="#|data-of=")([^"]+)"', html)}
    assert linked <= set(ids)


def test_every_page_is_in_the_part_that_its_address_names():
    report = Report(study())
    for part in [*report.shared, *report.cells]:
        pages = re.findall(r'<article class="page[^"]*" id="([^"]+)"', report.part(part))
        assert all(names.part_of(anchor) == part for anchor in pages)
        assert pages or part == "search"


def test_an_unknown_part_is_no_part():
    with pytest.raises(KeyError):
        Report(study()).part("nothing")


def test_hostile_text_makes_no_element():
    html = everything(study(text=HOSTILE, model=HOSTILE_NAME))
    assert "<script" not in html
    assert "<img" not in html
    assert "<svg onload" not in html
    assert "\x1b" not in html and "\u202e" not in html
    html.encode("utf-8")


def test_a_skill_keeps_its_structure_and_loses_links_images_and_raw_html():
    html = texts.markdown("# One\n\n- **two** <b>three</b>\n\n[four](http://a) ![five](http://b)\n\n<div>\n\n`six`\n")
    assert "<h4>One</h4>" in html
    assert "<strong>two</strong> &lt;b&gt;three&lt;/b&gt;" in html
    assert "[four](http://a)" in html
    assert "<code>six</code>" in html
    assert "<a" not in html and "<img" not in html and "<div>\n" not in html


def test_an_instruction_shows_the_common_part_once_and_the_attached_skill_as_a_link():
    made = study()
    told = made.records["p03/tirx/m/0/solo"].instruction
    treatment = made.records["p03/tirx/m/0/from-cute"]
    skill = made.records["p03/cute/m/0/solo"].skill
    changed = treatment.model_copy(update={"instruction": f"{told}\n## Notes\n\n{skill}\nThe end."})
    html = everything(Study(name="trial", plan=made.plan, records={**made.records, "p03/tirx/m/0/from-cute": changed}))
    assert html.count("What only this attempt was told, after that") == 1
    assert "word for word" in html and "The end." in html


def test_a_broken_rule_is_told_with_the_ratio_that_it_decides():
    made = study()
    broken = made.records["p03/tirx/m/0/from-cute"]
    verdict = broken.final
    assert verdict is not None
    finding = page_finding("forbidden-import")
    changed = broken.model_copy(
        update={"final": replace_verdict(verdict, passed=False, ended_at="rules", findings=(finding,), final=True)}
    )
    html = everything(Study(name="trial", plan=made.plan, records={**made.records, "p03/tirx/m/0/from-cute": changed}))
    assert "The treatment&#39;s kernel was right and took 4 ms, but broke a rule (forbidden-import)" in html
    assert "With such violations counted as passes ρ would be 1.5" in html


def page_finding(code):
    from metakernelbench.grading.verdict import Finding

    return Finding(code=code, message="It imports what it must not.")


def replace_verdict(verdict, **changes):
    from dataclasses import replace

    return replace(verdict, **changes)


def test_a_head_to_head_ratio_stands_beside_the_two_medians():
    from metakernelbench.store.artifacts import digest_of
    from metakernelbench.store.rematches import Rematch

    made = study()
    keys = ("p03/tirx/m/0/solo", "p03/tirx/m/0/from-cute")
    digests = [digest_of(made.records[key].kernel or "") for key in keys]
    rematch = Rematch(
        baseline=keys[0], treatment=keys[1], ratio=1.2, low=1.1, high=1.3, baseline_sha256=digests[0],
        treatment_sha256=digests[1], workload="full", device="x", judge="local", contract_version=1,
        measured_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    html = everything(study(rematches=(rematch,)))
    assert "ρ is from timing both kernels in one session (95 % interval 1.1 to 1.3)" in html
    assert "the medians of their two gradings give 1.5" in html


def test_annotations_stand_in_their_comparison_as_text():
    from metakernelbench.annotation.consensus import Consensus
    from metakernelbench.annotation.labels import (
        CategoryUptake,
        CauseLabel,
        Handed,
        SkillLabels,
        Statement,
        UptakeLabels,
    )
    from metakernelbench.annotation.results import Results
    from metakernelbench.annotation.rubric import rubric, taxonomy
    from metakernelbench.annotation.subjects import Subjects

    made = study()
    key = "p21/tirx/m/0/from-cute"
    subjects = Subjects(plan=made.plan, records=made.records, harmed=[key], max_submissions=10)
    category = rubric().category[0]
    statement = Statement(category=category.id, quote=f"Rows are short. {HOSTILE}", start=0, end=5, supported=False)
    results = Results(
        subjects=subjects,
        skills={
            subjects.skill_of["p21/cute/m/0/solo"]: Consensus(labels=SkillLabels(statements=(statement,)), votes=1)
        },
        uptakes={
            key: Consensus(
                labels=UptakeLabels(
                    uptake=(CategoryUptake(category=category.id, uptake=taxonomy().uptake_ids[0], evidence="it did"),),
                    propagated=(Handed(source="Warps stall.", own="Warps always stall."),),
                ),
                votes=1,
            )
        },
        causes={
            key: Consensus(
                labels=CauseLabel(
                    cause=taxonomy().cause_ids[0], step=taxonomy().steps[0], decided_by="records", evidence="a rule"
                ),
                votes=0,
            )
        },
        answers=(),
    )
    html = everything(study(annotations=results))
    assert html.count("What annotators saw") == 12  # the simulated skills are all the same text
    assert category.title in html and "Rows are short. &lt;script&gt;" in html and "(no evidence stated)" in html
    assert f"<b>{taxonomy().uptake[0].title}</b>: <q>it did</q>" in html
    assert "<q>Warps stall.</q> came back as <q>Warps always stall.</q>" in html
    assert f"<b>Why it harmed:</b> {taxonomy().cause[0].title}" in html


def test_designs_other_than_the_benchmarks_have_pages_too():
    from metakernelbench.experiments.designs import related, retry

    problems, dsls = ["p03", "p04", "p28"], ["cute", "tirx"]
    plan = merged([cross_dsl(problems, dsls, ["m"], 1), retry(problems, dsls, ["m"], 1),
                   related(problems[:2], dsls, ["m"], 1)])  # fmt: skip
    simulated = {}
    made = study()
    for attempt in plan.attempts:
        simulated[attempt.key] = made.records["p03/tirx/m/0/solo"].model_copy(
            update={"problem": attempt.problem, "dsl": attempt.dsl, "source": attempt.source}
        )
    html = everything(Study(name="several", plan=plan, records=simulated))
    assert html.count("retry: again <small>n = 6</small>") == 1
    assert "with the skill of p04 from tirx" in html or "with the skill of p03 from tirx" in html
    assert "at first and 6 ms the second time" in html


def test_json_has_the_tables_and_the_keys_of_every_comparison():
    found = as_json(study())
    assert [table["name"] for table in found["tables"]][:2] == ["solo", "lift_by_direction"]
    [whole, *_] = found["tables"][1]["rows"]
    assert whole["n"] == 12
    keys = {attempt["key"] for attempt in found["attempts"]}
    assert all({row["source"], row["baseline"], row["treatment"]} <= keys for row in found["comparisons"])
    assert {row["outcome"] for row in found["comparisons"]} == {"help", "neutral", "harm"}


@pytest.fixture(scope="module")
def large() -> Study:
    plan, records = simulate(World(problems=2, models=1, texts=True), 1)
    return Study(name="large", plan=plan, records=records, family_of=family_of)


def test_a_report_shows_as_much_as_fits(large):
    report = Report(large)
    sizes = {detail: sum(len(packing.packed(report.cell(cell, detail))) for cell in report.cells) for detail in DETAILS}
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    for detail, size in sizes.items():
        chosen, parts = packing.richest(report.cells, report.cell, size)
        assert chosen == detail
        assert sum(map(len, parts.values())) == size
    assert packing.richest(report.cells, report.cell, 1)[0] == DETAILS[-1]


def test_a_report_says_what_it_has_no_room_for(monkeypatch):
    monkeypatch.setattr(page, "SIZE_LIMIT", 1)
    assert "no trajectory and no submitted kernel is in it" in page.render(study())


def test_what_is_packed_means_nothing_in_html_and_json(large):
    packed = packing.packed(Report(large).part("comparisons"))
    assert not set(packed) & set('"\\<')
