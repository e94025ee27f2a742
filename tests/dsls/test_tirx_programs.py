"""What TIRx's plugin lets a submission compile, tried in a process of its own, which the plugin changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tvm")

PROGRAMS = """
import json
from metakernelbench.dsls.dsl import load
load("tirx").intercept(lambda *_: None)
import tvm
from tvm.script import tirx as T

@T.prim_func
def plain(a: T.handle):
    A = T.match_buffer(a, (4,), "float32")
    for i in T.serial(4):
        A[i] = T.exp(A[i]) + T.call_llvm_intrin("float32", "llvm.fabs", A[i])

@T.prim_func
def foreign(a: T.handle):
    A = T.match_buffer(a, (4,), "int32")
    A[0] = T.call_extern("int32", "getpid")

@T.prim_func
def packed(a: T.handle):
    A = T.match_buffer(a, (4,), "int32")
    T.evaluate(T.tvm_call_packed("some.function", A[0]))

@T.prim_func
def bringing_source(a: T.handle):
    A = T.match_buffer(a, (4,), "int32")
    with T.attr(A.data, "pragma_import_llvm", "define i32 @f() { ret i32 1 }"):
        A[0] = 1

@tvm.transform.module_pass(opt_level=0)
def own_pass(module, _):
    return module

def told(compile_):
    try:
        compile_()
    except ValueError as error:
        return str(error)
    return "compiled"

def module(f):
    return tvm.IRModule({"main": f})

def with_own_lower_pass():
    with tvm.transform.PassContext(config={"tirx.add_lower_pass": []}):
        tvm.compile(module(plain), target="llvm")

print(json.dumps({
    "plain": told(lambda: tvm.compile(module(plain), target="llvm")),
    "plain, by name": told(lambda: tvm.compile(mod=module(plain), target="llvm", tir_pipeline="default")),
    "extern": told(lambda: tvm.compile(module(foreign), target="llvm")),
    "extern, by name": told(lambda: tvm.compile(target="llvm", mod=module(foreign))),
    "extern, a function": told(lambda: tvm.compile(foreign, target="llvm")),
    "packed": told(lambda: tvm.compile(module(packed), target="llvm")),
    "source": told(lambda: tvm.compile(module(bringing_source), target="llvm")),
    "pipeline": told(lambda: tvm.compile(module(plain), target="llvm", tir_pipeline=own_pass)),
    "lower pass": told(with_own_lower_pass),
}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    script: Path = tmp_path_factory.mktemp("programs") / "programs.py"
    script.write_text(PROGRAMS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["plain", "plain, by name"])
def test_a_program_of_tirx_is_compiled(told: dict[str, str], name: str) -> None:
    assert told[name] == "compiled"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("extern", "`tirx.call_extern` in a kernel"),
        ("extern, by name", "`tirx.call_extern` in a kernel"),
        ("extern, a function", "`tirx.call_extern` in a kernel"),
        ("packed", "`tirx.tvm_call_packed` in a kernel"),
        ("source", "`pragma_import_llvm` in a kernel"),
        ("pipeline", "a pass or pipeline that is an object"),
        ("lower pass", "`tirx.add_lower_pass`"),
    ],
)
def test_what_is_not_tirx_is_refused(told: dict[str, str], name: str, what: str) -> None:
    assert what in told[name]
