"""The catalogue finds problems by their files, and what it says without importing them agrees with the modules."""

import subprocess
import sys

import pytest

from metakernelbench.errors import UnknownName, UserError
from metakernelbench.problems import catalog
from metakernelbench.problems.catalog import family_of, load, problem_ids, slug_of, source_path, subject_of
from metakernelbench.problems.problem import FAMILIES


def test_ids_are_in_order_and_split_by_family():
    ids = problem_ids()
    assert ids == sorted(ids)
    assert "p49" in problem_ids("moe") and "p49" not in problem_ids("attention")
    assert problem_ids("no such family") == []


@pytest.mark.parametrize("id", problem_ids())
def test_what_the_file_says_is_what_the_module_says(id):
    problem = load(id)
    assert (problem.family, problem.slug, problem.path) == (family_of(id), slug_of(id), str(source_path(id)))
    assert problem.subject == subject_of(id)


def test_every_family_is_complete():
    counts = {family: len(problem_ids(family)) for family in FAMILIES}
    assert counts == {
        "attention": 18,
        "kv_cache": 8,
        "mlp_norm": 17,
        "moe": 8,
        "quantization": 10,
        "linear_attention": 13,
    }
    assert problem_ids() == [f"p{number:02}" for number in range(1, 75)]


def test_an_unknown_problem_lists_the_nearest():
    with pytest.raises(UnknownName, match="`p49`") as raised:
        load("p490")
    assert raised.value.hint == "see all of them with `mkb problems list`"


@pytest.mark.parametrize(
    ("source", "message"),
    [("OUTPUTS = ()", "has no SUBJECT"), ("SUBJECT = (", "cannot be read"), ("SUBJECT = name()", "cannot be read")],
)
def test_a_module_without_a_readable_subject_is_named(source, message, tmp_path, monkeypatch):
    path = tmp_path / "p99_broken.py"
    path.write_text(source)
    monkeypatch.setattr(catalog, "_modules", lambda: {"p99": path})
    with pytest.raises(UserError, match=message):
        subject_of("p99")


def test_listing_imports_no_problem_and_no_torch():
    code = (
        "import sys; from metakernelbench.problems.catalog import *\n"
        "assert all(subject_of(id) for id in problem_ids())\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
