"""That the table in this package's docstring says of every problem whether it is compared."""

import re
from pathlib import Path

from metakernelbench.problems.catalog import problem_ids
from tests.problems import hugging_face


def problems_in(text):
    return set(re.findall(r"\bp[0-7]\d\b", text))


def test_every_problem_is_compared_or_listed_without_counterpart():
    compared, without = hugging_face.__doc__.split("no counterpart")
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    in_tests = set(re.findall(r"\"(p\d\d)\"", tests))
    assert in_tests.isdisjoint(problems_in(without))
    assert in_tests | problems_in(without) == set(problem_ids())
    assert problems_in(compared) | {"p72", "p73"} == in_tests  # written as "p71 to p74"
