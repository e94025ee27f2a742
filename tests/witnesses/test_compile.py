"""The GPU witnesses compile for Hopper and Blackwell on a machine without a GPU.

Those on record are not compiled again, but for a few at random: whoever changes a witness, or a version, without
`make compiled` has all that changed compiled here.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from tests.witnesses.compiled import ARCHS, DSLS, compiled, on_record, witnesses

AT_RANDOM = 2

pytestmark = pytest.mark.timeout(1200)  # the first test compiles for all


@cache
def results(dsl: str) -> dict[str, dict[str, Any]]:
    """Problem → its entry of the record, or what compiling its witness gave now."""
    known = on_record(dsl)
    again = random.sample(sorted(known), min(AT_RANDOM, len(known)))
    fresh = compiled(dsl, [*again, *(problem for problem in witnesses(dsl) if problem not in known)])
    return known | fresh


@pytest.mark.parametrize(("dsl", "problem"), [(dsl, problem) for dsl in DSLS for problem in witnesses(dsl)])
def test_witness_compiles(dsl: str, problem: str) -> None:
    result = results(dsl)[problem]
    assert "error" not in result, result["error"]
    assert set(result["bytes"]) == set(ARCHS)
    assert all(size > 1000 for size in result["bytes"].values())


@pytest.mark.parametrize("dsl", DSLS)
def test_the_record_is_of_the_present_witnesses(dsl: str) -> None:
    missing = sorted(set(witnesses(dsl)) - set(on_record(dsl)))
    assert not missing, "compiled, but not on record: run `make compiled`"
