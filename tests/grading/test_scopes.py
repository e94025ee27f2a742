"""Who a name belongs to, kernel.py or Python."""

from __future__ import annotations

import ast

import pytest

from metakernelbench.grading.scopes import local_names, own_names

OWN = {
    "a parameter": "def f(vars): return vars(1)",
    "a keyword parameter": "def f(*, vars): return vars(1)",
    "assigned in the function": "def f(x):\n    vars = x\n    return vars(1)",
    "unpacked in the function": "def f(x):\n    *vars, y = x\n    return vars(1)",
    "matched in the function": "def f(x):\n    match x:\n        case (vars, *_): return vars(1)",
    "bound by with": "def f(x):\n    with x as vars: return vars(1)",
    "bound by except": "def f(x):\n    try: x()\n    except ValueError as vars: return vars(1)",
    "of the function around it": "def f(vars):\n    return lambda: vars(1)",
    "a comprehension's": "[vars(1) for vars in ()]",
    "assigned in a comprehension": "def f(x):\n    [vars := y for y in x]\n    return vars(1)",
    "defined above": "def vars(x): return x\nvars(1)",
    "defined above, used in a function": "def vars(x): return x\ndef f(): return vars(1)",
    "of the function around a class": "def f(vars):\n    class A:\n        x = vars(1)",
    "of the function around a method": "def f(vars):\n  class A:\n    vars = 1\n    def g(self): return vars(1)",
    "in a comprehension's condition": "[1 for vars in () if vars(1)]",
    "imported above": "from math import sqrt as vars\nvars(1)",
}
PYTHONS = {
    "never bound": "vars(1)",
    "a parameter of another function": "def unused(vars): pass\nvars(1)",
    "a method's name": "class A:\n    def vars(self): pass\nvars(1)",
    "a name in a class body": "class A:\n    vars = 1\n    def f(self): return vars(1)",
    "defined below": "vars(1)\ndef vars(x): return x",
    "defined on a condition": "if False:\n    def vars(x): return x\nvars(1)",
    "assigned by the module": "for vars in []: pass\nvars(1)",
    "deleted again": "def vars(x): return x\ndel vars\nvars(1)",
    "declared global": "def f():\n    global vars\n    vars = 1\ndef g():\n    return vars(1)",
    "the global in a function": "def f(x):\n    global vars\n    return vars(1)",
    "of a comprehension before": "[1 for vars in ()]\nvars(1)",
    "hidden by the class": "def f(vars):\n    class A:\n        x = vars(1)\n        vars = 1",
    "declared global by the class": "def f(vars):\n    class A:\n        global vars\n        x = vars(1)",
    "what a comprehension runs over": "[1 for vars in vars(1)]",
    "deleted at the end of an except clause": (
        "import math as vars\ntry: 1 / 0\nexcept ZeroDivisionError as vars: pass\nvars(1)"
    ),
    "deleted by a function": (
        "import math as vars\ndef f():\n    global vars\n    try: 1 / 0\n    except ZeroDivisionError as vars: pass\n"
        "f()\nvars(1)"
    ),
    "a default, which is evaluated outside": "def f(vars=vars(1)): pass",
}


def is_own(source: str) -> bool:
    tree = ast.parse(source)
    (called,) = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "vars"]
    return id(called) in own_names(tree, local_names(tree))


@pytest.mark.parametrize("source", OWN.values(), ids=OWN)
def test_a_name_that_the_file_binds_is_its_own(source: str) -> None:
    assert is_own(source)


@pytest.mark.parametrize("source", PYTHONS.values(), ids=PYTHONS)
def test_a_name_that_may_be_a_built_in_is_not(source: str) -> None:
    assert not is_own(source)


def test_trees_may_be_deep() -> None:
    deep = "def f(x): return " + "[" * 150 + "x" + "]" * 150
    assert local_names(ast.parse(deep))
