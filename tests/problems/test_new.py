"""A new problem: the template fails `check` until it is filled in, and passes afterwards."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from metakernelbench.errors import UnknownName, UserError
from metakernelbench.problems import new
from metakernelbench.problems.check import check
from metakernelbench.problems.problem import Problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("moe", "formats"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    return tmp_path


def _problem(path: Path) -> Problem:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return Problem(
        id="p99",
        slug="row_scale",
        family="moe",
        subject=module.SUBJECT,
        provenance=module.PROVENANCE,
        workloads={"full": module.FULL, "smoke": module.SMOKE},
        outputs=module.OUTPUTS,
        reference=module.reference,
        vectorized=None,
        make_inputs=module.make_inputs,
        cost=module.cost,
        path=str(path),
    )


def test_the_template_passes_once_it_is_filled_in(folder):
    path = new.write_new_problem("moe", "p99", "row_scale", folder)
    assert path == folder / "moe" / "p99_row_scale.py"
    (failure,) = check(_problem(path)).failures
    assert failure.name == "description" and "REPLACE" in failure.detail
    path.write_text(path.read_text().replace("REPLACE", "Scale every row"))
    assert check(_problem(path)).failures == ()


def test_a_file_is_never_replaced(folder):
    new.write_new_problem("moe", "p99", "row_scale", folder).write_text("work of hours")
    with pytest.raises(FileExistsError):
        new.write_new_problem("moe", "p99", "row_scale", folder)


@pytest.mark.parametrize(
    ("family", "id", "slug", "message"),
    [
        ("formats", "p99", "row_scale", "unknown family `formats`; nearest: `moe`"),
        ("moe", "99", "row_scale", "`99` is no problem number"),
        ("moe", "p49", "row_scale", "`p49` exists: .*p49_group_limited_topk_routing.py"),
        ("moe", "p99", "Row-Scale", "`Row-Scale` is no slug"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(folder, family, id, slug, message):
    with pytest.raises(UserError, match=message) as raised:
        new.write_new_problem(family, id, slug, folder)
    assert raised.value.hint or isinstance(raised.value, UnknownName)
    assert not list(folder.glob("*/p*.py"))
    shutil.rmtree(folder)
