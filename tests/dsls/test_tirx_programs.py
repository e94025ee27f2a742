"""What TIRx's plugin lets a submission compile, tried in a process of its own, which the plugin changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tvm")

PROGRAMS = """
import enum, json
from metakernelbench.dsls.dsl import load
load("tirx").intercept(lambda _kernel, _tensors, launch: launch())
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
def in_a_shape(a: T.handle):
    A = T.match_buffer(a, (T.call_extern("int32", "getpid"),), "int32")
    A[0] = 1

@T.prim_func
def calling_an_address(a: T.handle):
    A = T.match_buffer(a, (4,), "int64")
    T.evaluate(T.call_llvm_intrin("void", "llvm.coro.resume", A.data))

@T.prim_func
def in_parallel(a: T.handle):
    A = T.match_buffer(a, (4096,), "float32")
    for i in T.parallel(4096):
        A[i] = T.atan(A[i])

@T.prim_func
def reading_an_address(a: T.int64, o: T.handle):
    O = T.match_buffer(o, (1,), "int64")
    p: T.let[T.handle("int64")] = T.reinterpret("handle", a)
    slots = T.decl_buffer((64,), "int64", data=p)
    O[0] = slots[3]

def on_a_gpu(call):
    @T.prim_func
    def kernel(a: T.handle):
        A = T.match_buffer(a, (4,), "int32")
        T.device_entry()
        T.cta_id([1])
        lane = T.thread_id([4])
        A[lane] = call(lane)

    return kernel

FOR_A_GPU = {
    "on a GPU": on_a_gpu(lambda i: i + 1),
    "source on a GPU": on_a_gpu(
        lambda i: T.cuda.func_call("f", i, source_code="__device__ int f(int i) { return i; }", return_type="int32")
    ),
    "extern on a GPU": on_a_gpu(lambda i: T.call_extern("int32", "clock")),
    "pure extern on a GPU": on_a_gpu(lambda i: T.call_pure_extern("int32", "clock")),
}

class Hiding(tvm.IRModule):
    functions = property(lambda self: {})

class Number:
    def __tvm_ffi_int__(self):
        print("code of its own runs")
        return 1

@T.prim_func
def with_a_number(n: T.int64, a: T.handle):
    A = T.match_buffer(a, (4,), "int64")
    A[0] = n

def told(compile_):
    try:
        compile_()
    except (TypeError, ValueError) as error:
        return str(error)
    return "compiled"

def module(f):
    return tvm.IRModule({"main": f})

GPU = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
launched = tvm.compile(module(with_a_number), target="llvm")["main"]

def launch(argument):
    import torch
    found = torch.zeros(4, dtype=torch.int64)
    launched(argument, found)
    return int(found[0])

class Two(enum.IntEnum):
    TWO = 2

print(json.dumps({
    "plain": told(lambda: tvm.compile(module(plain), target="llvm")),
    "plain, by name": told(lambda: tvm.compile(mod=module(plain), target="llvm", tir_pipeline="default")),
    "in parallel": told(lambda: tvm.compile(module(in_parallel), target="llvm")),
    "extern": told(lambda: tvm.compile(module(foreign), target="llvm")),
    "extern, by name": told(lambda: tvm.compile(target="llvm", mod=module(foreign))),
    "extern, a function": told(lambda: tvm.compile(foreign, target="llvm")),
    "packed": told(lambda: tvm.compile(module(packed), target="llvm")),
    "shape": told(lambda: tvm.compile(module(in_a_shape), target="llvm")),
    "call of an address": told(lambda: tvm.compile(module(calling_an_address), target="llvm")),
    "read of an address": told(lambda: tvm.compile(module(reading_an_address), target="llvm")),
    "hidden": told(lambda: tvm.compile(Hiding({"main": foreign}), target="llvm")),
    **{name: told(lambda: tvm.compile(module(f), target=GPU, tir_pipeline="tirx")) for name, f in FOR_A_GPU.items()},
    "hidden on a GPU": told(
        lambda: tvm.compile(Hiding({"main": FOR_A_GPU["source on a GPU"]}), target=GPU, tir_pipeline="tirx")
    ),
    "C": told(lambda: tvm.compile(module(with_a_number), target="c")),
    "an enumeration's number": str(launch(Two.TWO)),
    "an argument with code": told(lambda: launch(Number())),
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


@pytest.mark.parametrize("name", ["plain", "plain, by name", "in parallel", "on a GPU"])
def test_a_program_of_tirx_is_compiled(told: dict[str, str], name: str) -> None:
    assert told[name] == "compiled"


def test_a_number_of_an_enumeration_is_a_number(told: dict[str, str]) -> None:
    assert told["an enumeration's number"] == "2"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("extern", "`getpid` in a kernel"),
        ("extern, by name", "`getpid` in a kernel"),
        ("extern, a function", "`getpid` in a kernel"),
        ("packed", "`some.function` in a kernel"),
        ("shape", "`getpid` in a kernel"),
        ("call of an address", "a call of an address"),
        ("read of an address", "an address made of an integer"),
        ("hidden", "`getpid` in a kernel"),
        ("source on a GPU", "source text of another language"),
        ("extern on a GPU", "`call_extern` in a kernel"),
        ("pure extern on a GPU", "`call_pure_extern` in a kernel"),
        ("hidden on a GPU", "source text of another language"),
        ("C", "a target other than llvm and cuda"),
        ("an argument with code", "launched with tensors and numbers, not with Number"),
    ],
)
def test_what_is_not_tirx_is_refused(told: dict[str, str], name: str, what: str) -> None:
    assert what in told[name]
