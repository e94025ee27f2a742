from __future__ import annotations

import ast

import pytest

from metakernelbench.dsls import dsl
from metakernelbench.grading.names import is_module
from metakernelbench.grading.rules import check

VIOLATIONS = {
    "import os": "forbidden-import",
    "import numpy as np": "forbidden-import",
    "from . import helper": "forbidden-import",
    "from torch.nn.functional import *": "forbidden-import",
    "import metakernelbench.problems": "forbidden-import",
    "import logging\nlogging.os.getcwd()": "forbidden-import",
    "import importlib": "dynamic-import",
    "__import__('os')": "dynamic-import",
    "import triton": "other-compiler",
    "import torch\ntorch.compile(None)": "other-compiler",
    "import torch as t\nf = t.compile\nf(None)": "other-compiler",
    "import torch\na, b = torch, 1\na.jit.script(None)": "other-compiler",
    "import torch\ngetattr(torch, 'com' + 'pile')": "other-compiler",
    "from torch.utils import cpp_extension": "other-compiler",
    "from torch.utils.cpp_extension import load_inline": "other-compiler",
    "def f(x):\n    return x._inductor": "other-compiler",
    "import torch\ntorch.cuda.CUDAGraph()": "cuda-graph",
    "import torch\nwith torch.cuda.graph(None): pass": "cuda-graph",
    "import torch\nc = torch.cuda\nc.make_graphed_callables": "cuda-graph",
    "import torch._vendor.quack": "library-kernel",
    "import torch\ntorch._C._jit_set_profiling_mode(False)": "forbidden-attribute",
    "import torch\ntorch.cuda.cudart()": "forbidden-attribute",
    "import tvm\ntvm.get_global_func('runtime.ModuleLoadFromFile')": "forbidden-attribute",
    "from tvm import topi": "forbidden-attribute",
    "import cuda.bindings.driver as driver\ndriver.cuModuleLoadData": "forbidden-attribute",
    "import torch\ngetattr(torch, input_name)": "dynamic-code",
    "g = getattr\ng(1, 'x')": "dynamic-code",
    "import tvm\n[tvm][0].topi": "dynamic-code",
    "import torch\nput(torch.utils.dlpack)": "dynamic-code",
    "import torch\nd = torch.utils.dlpack\nput(d)": "dynamic-code",
    "from torch.utils import dlpack\ndef f(x=dlpack): pass": "dynamic-code",
    "import torch\ndef f():\n    return torch": "dynamic-code",
    "import torch\nclass A:\n    t = torch": "dynamic-code",
    "import torch\nself.t = torch": "dynamic-code",
    "import math, torch\nx = math or torch": "dynamic-code",
    "class A:\n    import torch": "forbidden-import",
    "import typing\ntyping.operator.attrgetter": "forbidden-attribute",
    "import torch\ntorch.backends.cudnn.torch.x = 1": "forbidden-attribute",
    "import dataclasses\ndataclasses._create_fn": "forbidden-attribute",
    "import torch.storage\ntorch.storage._load_from_bytes(b'')": "forbidden-attribute",
    "import logging\nlogging.currentframe()": "dunder-access",
    "import math\ng = math\ng = f()\ng.gi_frame": "dunder-access",
    "import torch\ndef f():\n    m = torch\n    m.float = 1": "monkeypatch",
    "import torch\ndef f():\n    import tvm as torch\n    return [torch]": "dynamic-code",
    "import torch\n" + "".join(f"x = torch.a{i}\n" for i in range(20)) + "x = torch\nx.compile(None)": "other-compiler",
    "eval('1')": "dynamic-code",
    "exec = exec\nexec('import os')": "dynamic-code",
    "compile('1', 'x', 'eval')": "dynamic-code",
    "(lambda: 0).__globals__": "dunder-access",
    "().__class__.__bases__": "dunder-access",
    "def f(e): return e.tb_frame": "dunder-access",
    "globals()['x'] = 1": "dunder-access",
    "getattr(f, '__code__')": "dunder-access",
    "import torch\nmatch torch:\n    case object(__dict__=d):\n        pass": "dunder-access",
    "import torch\nmatch torch:\n    case object(os=o):\n        pass": "forbidden-import",
    "def f(x):\n    match x:\n        case object(f_globals=g):\n            return g": "dunder-access",
    "__builtins__": "dunder-access",
    "import torch\ntorch.Tensor.to = None": "monkeypatch",
    "import torch\nsetattr(torch, 'add', None)": "monkeypatch",
    "import torch\ndel torch.add": "monkeypatch",
    "import torch\ntorch.library.Library('aten', 'IMPL')": "monkeypatch",
    "class T:\n    def __torch_function__(self): pass": "monkeypatch",
    "open('/proc/self/mem', 'wb')": "file-access",
    "import torch\ntorch.load('x')": "file-access",
    "s = '__global__ void k() {}'": "inline-source",
    "s = 'extern ' + '\"C\" int f();'": "inline-source",
    "s = 'define float @atanf(float %x) { ret float %x }'": "inline-source",
    "s = '.version 8.0\\n.target sm_90'": "inline-source",
    f"s = '{'QUFB' * 1200}'": "inline-source",
}

HONEST = {
    "the version of torch": "import torch\nNEW = torch.__version__ > '2.9'\ntorch._check(NEW)",
    "names of a module": "__all__ = ['solve']\nclass A:\n    __slots__ = ('_C',)\n    def f(self): return self._C",
    "a built-in's name in a pattern": "def f(x):\n    match x:\n        case (input, *rest): return input",
    "a module asked for": (
        "try:\n    import tvm\nexcept ImportError:\n    tvm = None\n"
        "import torch\nKNOWN = tvm is not None, [n for n in ('float8_e4m3fn', 'float4') if hasattr(torch, n)]"
    ),
    "a function called as its file is": "import tvm\nDEVICE = tvm.runtime.device('cpu', 0)",
    "a module's name for a buffer": (
        "import torch.nn.functional as F\nfrom torch import float32\ndef f(x):\n    F = x.buffer\n    F[0] = 1\n"
        "    return copy(F, float32)"
    ),
    "words of another language": "raise ValueError('unlike a __global__ function this takes rows')",
    "caches and decorators": """
import functools, math
import torch
@functools.lru_cache(maxsize=None)
def compiled(shape, dtype): return math.prod(shape)
cache = {}
def solve(x):
    key = (x.shape, x.dtype)
    if key not in cache: cache[key] = compiled(*key)
    return x
""",
    "names of built-ins for one's own functions": """
def compile(shape): return shape
def solve(x):
    open = compile(x.shape)
    for input in open: pass
    return x
""",
    "streams": """
import torch
import cuda.bindings.driver as cuda
from cuda.bindings.driver import CUstream
def solve(x):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    torch.cuda.current_stream().wait_stream(side)
    return x
""",
    "the forbidden merely mentioned": '''
"""Never calls torch.compile, exec() or load_inline; no __global__ void kernel here."""
import torch  # torch.jit, ctypes, os.system
def solve(x):
    """`torch.cuda.CUDAGraph` would be nice."""
    if x.dim() > 9: raise ValueError("exec and eval and torch.compile are not needed")
    return x
''',
    "classes, dataclasses, try and pass": """
from __future__ import annotations
from dataclasses import dataclass
import torch
@dataclass(frozen=True)
class Plan:
    rows: int
    def __post_init__(self): object.__setattr__(self, 'rows', int(self.rows))
    def __call__(self, x): return x
def solve(x):
    try:
        return Plan(3)(x)
    except RuntimeError:
        pass
    return x
""",
    "eager parts, low-precision products and settings": """
import torch
import torch.nn.functional as F
torch.backends.cuda.matmul.allow_tf32 = True
def solve(x, w):
    y = torch._scaled_mm(x, w) + F.silu(x) + torch.ops.aten.add(x, x)
    torch._foreach_add_([y], 1)
    return getattr(y, 'T').contiguous(), y.data_ptr()
""",
    "logging": """
import logging, time, warnings
log = logging.getLogger(__name__)
def solve(x):
    start = time.perf_counter()
    log.info('took %s', time.perf_counter() - start)
    return x
if __name__ == "__main__":
    print(solve(1))
""",
    "TIRx": """
import tvm
from tvm.script import tirx as T
@T.prim_func
def f(a: T.handle):
    n = T.int32()
    A = T.match_buffer(a, (n,), "float32")
    for i in T.serial(n):
        A[i] = A[i] + T.float32(1)
exe = tvm.compile(tvm.IRModule({"main": f}), target="llvm")
def solve(x):
    exe(x)
    return x
""",
}


READ_OTHERWISE = {
    "getattr(*(x, 'sys'))": "dynamic-code",
    "def f(x): return x.sys": "forbidden-import",
    "def f(x): return x._os": "forbidden-import",
    "class A:\n    def f(self): return self.sys\nA.f(x)": "forbidden-import",
    "class A:\n    def f(self): return self.gi_frame\nA.f(x)": "dunder-access",
    "def f(x): return getattr(x, 'ctypes')": "forbidden-import",
    "import torch\nfor torch.Tensor.float in []: pass": "monkeypatch",
    "import torch\nwith f() as torch.Tensor.float: pass": "monkeypatch",
    "import torch\n[0 for torch.Tensor.float in []]": "monkeypatch",
    "import torch\ntype.__setattr__(torch.Tensor, 'float', f)": "monkeypatch",
    "class A:\n    __match_args__ = ('__globals__',)": "dunder-access",
    "class A:\n    __match_args__ = made()": "dunder-access",
    "import typing\ntyping.get_type_hints(f)": "dynamic-code",
    "from functools import singledispatch": "dynamic-code",
    "from string import Formatter": "forbidden-attribute",
    "def unused(vars): pass\nvars(1)": "dunder-access",
    "class A:\n    def eval(self): pass\neval('1')": "dynamic-code",
    "from tvm.script import from_source": "forbidden-attribute",
}
"""What was once read otherwise by the rules than by Python."""


@pytest.mark.parametrize("source", READ_OTHERWISE)
def test_rules_read_what_python_reads(source: str) -> None:
    found = check(ast.parse(source), dsl.load("tirx"))
    assert READ_OTHERWISE[source] in [item.code for item in found]


@pytest.mark.parametrize("source", VIOLATIONS)
def test_violation_has_its_code_and_line(source: str) -> None:
    found = check(ast.parse(source), dsl.load("tirx"))
    assert VIOLATIONS[source] in [item.code for item in found]
    assert all(item.line is not None and 1 <= item.line <= source.count("\n") + 1 for item in found)


@pytest.mark.parametrize("name", HONEST)
def test_honest_patterns_are_no_violation(name: str) -> None:
    assert check(ast.parse(HONEST[name]), dsl.load("tirx")) == []


@pytest.mark.parametrize(
    "name", ["torch", "torch.nn.functional", "torch.utils.dlpack", "tvm.tirx", "cuda.bindings.driver"]
)
def test_modules_are_known_by_their_files(name: str) -> None:
    assert is_module(name)


@pytest.mark.parametrize(
    "name", ["nowhere", "torch.relu", "torch.Tensor.float", "tvm.compile", "math.pi.x", "torch." + "x" * 300]
)
def test_what_is_no_module_is_not_taken_for_one(name: str) -> None:
    assert not is_module(name)


def test_each_violation_is_told_once_in_the_order_of_the_lines() -> None:
    found = check(ast.parse("import os\nimport ctypes\nimport os\neval('1')\neval('2')"), dsl.load("tirx"))
    assert [(item.code, item.line) for item in found] == [
        ("forbidden-import", 1),
        ("forbidden-import", 2),
        ("dynamic-code", 4),
    ]


def test_deep_trees_are_no_trouble() -> None:
    source = "import torch\nx = " + "torch" + ".a" * 900 + "\ny = " + " + ".join(["'a'"] * 900)
    assert check(ast.parse(source), dsl.load("tirx")) == []
