"""Every reason for which a verdict can fail: its stable code and the sentence that says what to change.

Docs and reports render from `CODES`; `finding` is the only way in which the verifier makes a finding.
"""

from __future__ import annotations

from metakernelbench.grading.verdict import Finding
from metakernelbench.text import harmless

SOURCE_CODES = {
    "missing": "There is no kernel.py; write one that defines `solve`.",
    "empty": "kernel.py is empty; it must define `solve`.",
    "too-large": "kernel.py is larger than the contract allows; generate tables at run time instead of pasting them.",
    "not-utf8": "kernel.py is not UTF-8 text; save it as UTF-8.",
    "syntax-error": "kernel.py does not parse as Python; correct the line.",
    "no-solve": "kernel.py defines no function `solve` at its top level; define `solve(*inputs)`.",
}

RULE_CODES = {
    "forbidden-import": "Import only torch, the DSL and the harmless part of the standard library.",
    "forbidden-attribute": "This name leads round the DSL or into the grader; write the work in the DSL instead.",
    "dynamic-import": "Import modules with plain `import` statements.",
    "dynamic-code": "Write the code out; nothing may be assembled and executed at run time.",
    "inline-source": "Write the kernel in the DSL; source of another language in a string is not allowed.",
    "dunder-access": "Use ordinary names; interpreter internals are not part of a kernel.",
    "monkeypatch": "Leave modules that are not yours as they are; keep state in names of your own.",
    "cuda-graph": "Launch the kernels on every call; capturing and replaying a CUDA graph is not allowed.",
    "other-compiler": "Write the kernels in the DSL of the task; other compilers are not allowed.",
    "file-access": "A kernel needs no files; keep state in memory.",
    "library-kernel": "Write the kernel yourself; kernels from a library do not count.",
    "forbidden-action": "While it ran, kernel.py did what a kernel has no need of; remove it.",
}

RUN_CODES = {
    "import-error": "kernel.py raised while it was imported; make `python -c 'import kernel'` work.",
    "runtime-error": "`solve` raised; correct it for inputs of the problem's shapes and dtypes.",
    "wrong-structure": "Return what the reference returns: container, number, shape, dtype and device of the tensors.",
    "lazy-output": "Return plain dense tensors: no subclass, no wrapper, no lazy or self-overlapping view.",
    "wrong-output": "The outputs differ from the reference by more than the allowance.",
    "time-limit": "The submission used up the time that import and calls share; compile less or loop less.",
    "memory-limit": "The submission used more memory than a worker has.",
    "file-limit": "The submission wrote more to files than a worker may; keep data in memory.",
    "output-flood": "The submission printed more than a worker may; remove the printing.",
    "worker-died": "The process that ran kernel.py ended; look for a crash, an exit or a kill in kernel.py.",
    "broken-channel": "The process that ran kernel.py gave an answer that is none; leave the runtime alone.",
    "late-write": "The output changed after the call was over; all work must be finished when `solve` returns.",
    "background-work": "Something kept running between calls; do all work between call and return.",
    "clock-disagreement": "The reported time does not fit the verifier's clock; do all work between call and return.",
}

DEPENDENCE_CODES = {
    "no-launch": "A call launched no kernel of the DSL; every call must launch one.",
    "not-dependent": "The outputs are right without the DSL's kernels; compute them with these kernels.",
    "laundering": "The outputs were finished before the DSL's kernels copied them; compute them in these kernels.",
}

CODES: dict[str, str] = {**SOURCE_CODES, **RULE_CODES, **RUN_CODES, **DEPENDENCE_CODES}
"""Code → what it means and what to change."""


def finding(code: str, detail: str = "", line: int | None = None) -> Finding:
    """A finding: what was seen (`detail`), then what to change."""
    advice = CODES[code]
    seen = harmless(detail).rstrip(".")
    return Finding(code=code, message=f"{seen}. {advice}" if seen else advice, line=line)
