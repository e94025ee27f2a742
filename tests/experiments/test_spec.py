"""An experiment file is resolved completely; a mistake in it is named with its key, its line and what is allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metakernelbench.errors import MkbError, SpecError, UnknownName
from metakernelbench.experiments.loading import prepared
from metakernelbench.experiments.plan import plan_of
from metakernelbench.experiments.spec import ExperimentSpec, load_spec
from metakernelbench.experiments.toml_lines import line_of
from metakernelbench.problems.catalog import problem_ids

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = """\
name = "first"
design = "cross-dsl"
problems = ["p28", "kv_cache"]
dsls = ["tirx", "triton"]
models = ["vendor/model"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "e.toml"
    path.write_text(text)
    return path


def message_of(folder: Path, text: str) -> str:
    path = written(folder, text)
    with pytest.raises(MkbError) as caught:
        load_spec(path)
    return caught.value.message.replace(str(path), "e.toml")


def test_a_file_is_resolved_to_the_benchmarks_values(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path, GOOD))
    assert spec.problems == ("p28", *problem_ids("kv_cache"))
    assert (spec.replicates, spec.judge, spec.indifference_band) == (1, "local", 0.05)
    assert (spec.attempt.agent, spec.attempt.budget_s, spec.attempt.max_submissions) == ("terminus-2", 2400, 10)
    assert spec.store == str(tmp_path / "runs/first")


def test_all_means_the_whole_catalogue_and_nothing_is_planned_twice(tmp_path: Path) -> None:
    assert load_spec(written(tmp_path, GOOD.replace('["p28", "kv_cache"]', '"all"'))).problems == tuple(problem_ids())
    overlapping = f'"{problem_ids("kv_cache")[0]}"'
    assert load_spec(written(tmp_path, GOOD.replace('"p28"', overlapping))).problems == tuple(problem_ids("kv_cache"))


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = GOOD + 'store = "../out"\n[attempt]\nscript = "turns.toml"\n'
    spec = load_spec(written(tmp_path, text))
    assert spec.store == str(tmp_path.parent / "out")
    assert spec.attempt.script == tmp_path / "turns.toml"


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path, GOOD), store="elsewhere", model="vendor/other")
    assert (spec.store, spec.models) == ("elsewhere", ("vendor/other",))


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    text = GOOD + 'store = "~/out"\nartifacts = "~/large"\n[attempt]\nscript = "~/turns.toml"\n'
    spec = load_spec(written(tmp_path, text))
    assert (spec.store, spec.artifacts) == ("/home/somebody/out", "/home/somebody/large")
    assert spec.attempt.script == Path("/home/somebody/turns.toml")
    assert load_spec(written(tmp_path, GOOD + 'store = "~nobody-here/x"\n')).store == str(tmp_path / "~nobody-here/x")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert load_spec(written(tmp_path, f"\ufeff{GOOD}")).name == "first"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("name = first\n", "strings need quotes; see examples/demo.toml"),
        ('name = "a"\nname = "b"\n', "a key or a table stands there for the second time: keep one"),
        ("[attempt]\n[attempt]\n", "a key or a table stands there for the second time: keep one"),
        ("name\n", "see examples/demo.toml"),
    ],
)
def test_the_hint_is_of_the_mistake_in_the_toml(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(written(tmp_path, text))
    assert caught.value.hint == hint


def test_a_database_url_is_left_alone(tmp_path: Path) -> None:
    text = GOOD + 'store = "postgresql+psycopg://host/name"\nartifacts = "shared"\n'
    spec = load_spec(written(tmp_path, text))
    assert spec.store == "postgresql+psycopg://host/name"
    assert spec.artifacts == str(tmp_path / "shared")


def test_a_stored_specification_is_read_back_equal(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path, GOOD + '[attempt]\nscript = "x.toml"\nmodel_options = {temperature = 0.5}\n'))
    assert ExperimentSpec.model_validate_json(spec.model_dump_json()) == spec


KEYS = (
    "`name`, `design`, `options`, `problems`, `dsls`, `models`, `replicates`, `attempt`, `judge`, "
    "`judge_options`, `concurrency`, `usage`, `store`, `artifacts`, `indifference_band`"
)
NAME_IS = "up to 100 letters, digits, `.`, `_` and `-`, the first a letter or a digit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + 'replicates = "two"\n', 'e.toml, line 6: `replicates` is "two"; allowed: a valid integer'),
        (GOOD + "replicates = 0\n", "e.toml, line 6: `replicates` is 0; allowed: greater than or equal to 1"),
        (
            GOOD + "replicates = 1000000000\n",
            "e.toml, line 6: `replicates` is 1000000000; allowed: less than or equal to 1000",
        ),
        (
            GOOD + "[concurrency]\nsandboxes = 1000000000\n",
            "e.toml, line 7: `concurrency.sandboxes` is 1000000000; allowed: less than or equal to 10000",
        ),
        (
            GOOD + "[attempt]\nbudget_s = inf\n",
            "e.toml, line 7: `attempt.budget_s` is inf; allowed: a finite number",
        ),
        (GOOD + "indifference_band = inf\n", "e.toml, line 6: `indifference_band` is inf; allowed: a finite number"),
        (GOOD + 'store = ""\n', 'e.toml, line 6: `store` is ""; allowed: a folder, or the URL of a database'),
        (
            GOOD + "replicate = 2\n",
            f"e.toml, line 6: unknown key `replicate`; nearest: `replicates`, `attempt`, `problems`; allowed: {KEYS}",
        ),
        (GOOD.replace("dsls", "# dsls"), "e.toml: `dsls` is missing; it is a list of DSL names"),
        (
            GOOD.replace('["vendor/model"]', '"vendor/model"'),
            'e.toml, line 5: `models` is "vendor/model"; '
            'allowed: a list of model names such as "openrouter/vendor/model"',
        ),
        (
            GOOD.replace('["vendor/model"]', "[3]"),
            "e.toml, line 5: `models` holds 3, which is not a name in quotes; "
            'allowed: a list of model names such as "openrouter/vendor/model"',
        ),
        (
            GOOD.replace('"first"', '"first one"'),
            f'e.toml, line 1: `name` is "first one"; allowed: {NAME_IS}',
        ),
        (GOOD.replace('"first"', '".first"'), f'e.toml, line 1: `name` is ".first"; allowed: {NAME_IS}'),
        (GOOD.replace("first", 101 * "f"), f'e.toml, line 1: `name` is "{56 * "f"}...; allowed: {NAME_IS}'),
        (
            GOOD.replace('"triton"', '"tirx"'),
            'e.toml, line 4: `dsls` is ["tirx", "tirx"]; allowed: each named once; `tirx` is named twice',
        ),
        (GOOD + "judge = 3\n", "e.toml, line 6: `judge` is 3; allowed: the name of a judge"),
        (GOOD + "attempt = 3\n", "e.toml, line 6: `attempt` is 3; allowed: a table, [attempt]"),
        (
            GOOD + '[attempt]\ncpus = 2\nworkload = "tiny"\n[concurrency]\njudges = 0\n',
            "e.toml, line 8: `attempt.workload` is \"tiny\"; allowed: 'full' or 'smoke'\n"
            "e.toml, line 10: `concurrency.judges` is 0; allowed: greater than or equal to 1",
        ),
        (
            GOOD + "concurrency = { sandbox = 1 }\n",
            "e.toml, line 6: unknown key `sandbox`; nearest: `sandboxes`; "
            "allowed of [concurrency]: `sandboxes`, `models`, `judges`",
        ),
        (
            GOOD.replace('"kv_cache"', '"p28"'),
            'e.toml, line 3: `problems` is ["p28", "p28"]; allowed: each named once; `p28` is named twice',
        ),
        (
            GOOD.replace('["p28", "kv_cache"]', "[28]"),
            "e.toml, line 3: `problems` holds 28, which is not a name in quotes; "
            'allowed: a list of ids such as "p28" and families such as "moe", or "all"',
        ),
        (
            GOOD + '[attempt.image]\nfoo = "x"\n',
            "e.toml, line 7: unknown key `foo`; nearest: `base`, `index`, `numpy`, `packages`, `system`, `torch`; "
            "allowed of [attempt.image]: `base`, `system`, `torch`, `index`, `numpy`, `packages`",
        ),
        (GOOD + "store = runs\n", "e.toml is not TOML: Invalid value (at line 6, column 9)"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    assert message_of(tmp_path, text) == message


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (GOOD.replace('"cross-dsl"', '"cross"'), "e.toml, line 2: unknown design `cross`; nearest: `cross-dsl`"),
        (GOOD.replace('"p28"', '\n  "p28",\n  "p82"'), "e.toml, line 5: unknown problem `p82`; nearest: `p"),
        (GOOD.replace('"kv_cache"', '"kvcache"'), "e.toml, line 3: unknown problem `kvcache`; nearest: `kv_cache`"),
        (GOOD.replace('"triton"', '"tritn"'), "e.toml, line 4: unknown DSL `tritn`; nearest: `triton`"),
        (GOOD + 'judge = "locl"\n', "e.toml, line 6: unknown judge `locl`; nearest: `local`"),
        (
            GOOD + 'judge = "ray"\n[judge_options]\nadress = "auto"\n',
            "e.toml, line 8: unknown option of the judge `ray` `adress`; nearest: `address`",
        ),
    ],
)
def test_an_unknown_name_lists_the_nearest(tmp_path: Path, text: str, start: str) -> None:
    assert message_of(tmp_path, text).startswith(start)
    with pytest.raises(UnknownName):
        load_spec(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read .*: No such file"):
        load_spec(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(SpecError, match="is not UTF-8"):
        load_spec(tmp_path / "latin.toml")


def test_what_is_no_file_of_a_sensible_size_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text("#" * 2_000_000)
    for path, said in (("pipe", "no regular file"), ("/dev/zero", "no regular file"), ("long", "more than 1,000,000")):
        with pytest.raises(SpecError, match=f"cannot read .*: it .*{said}"):
            load_spec(tmp_path / path)


def test_a_file_that_nests_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    lists, keys = "a = " + "[" * 5000 + "]" * 5000, "a" + ".a" * 5000 + " = 1"
    assert "too deeply" in message_of(tmp_path, f"{lists}\n{GOOD}")
    assert "unknown key `a`" in message_of(tmp_path, f"{keys}\n{GOOD}")
    assert "too deeply" in message_of(tmp_path, f"{GOOD}[options.cross-dsl]\n{keys}\n")


def test_a_dsl_that_does_not_run_on_the_device_is_refused(tmp_path: Path) -> None:
    text = GOOD.replace('"triton"', '"cute"') + '[attempt]\ndevice = "cpu"\n'
    with pytest.raises(SpecError, match="`cute` does not run on the device `cpu`"):
        prepared(written(tmp_path, text))


def test_lines_are_found_in_tables_and_inline_tables() -> None:
    text = 'a = 1\n[b]\nc = 2\n"d" = {e = 3}\n[f.g] # note\nh = 4\n'
    assert [line_of(text, keys) for keys in (["a"], ["b", "c"], ["b", "d", "e"], ["f", "g", "h"], ["x"])] == [
        1,
        3,
        4,
        6,
        None,
    ]


def test_the_file_in_the_documentation_is_valid_and_has_the_values_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    shown = load_spec(written(tmp_path, page.partition("```toml\n")[2].partition("```")[0]))
    defaults = load_spec(written(tmp_path, GOOD))
    assert (shown.replicates, shown.indifference_band, shown.concurrency, shown.judge) == (
        defaults.replicates,
        defaults.indifference_band,
        defaults.concurrency,
        defaults.judge,
    )
    assert shown.attempt == defaults.attempt.model_copy(update={"model_options": shown.attempt.model_options})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    spec = load_spec(path)
    assert spec.name == path.stem
    assert plan_of(spec).comparisons
