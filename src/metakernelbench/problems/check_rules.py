"""The checks of `check.py`, one function each: it returns what it found, or raises `Wrong` with what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from metakernelbench.grading.compare import as_tuple, compare_all, reference_numerics
from metakernelbench.problems.check_subject import SEEDS, Subject, Wrong, same
from metakernelbench.problems.nudge import Nudged
from metakernelbench.problems.problem import copies

NUDGES = 3
"""Perturbed runs of each draw."""
SMOKE_SECONDS = 1.0
"""The longest that `reference` may take on the smoke workload."""

_HALF_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


def _runs(subject: Subject) -> str:
    """`reference` accepts what `make_inputs` draws."""
    for inputs in subject.draws:
        for name, value in zip(subject.parameters, inputs, strict=True):
            if isinstance(value, torch.Tensor) and value.device.type != subject.device.type:
                raise Wrong(f"input `{name}` is on {value.device}: make it on the `device` given to `make_inputs`")
            if type(value) not in (torch.Tensor, int, float, bool):
                raise Wrong(f"input `{name}` is a {type(value).__name__}: use a tensor or a Python number")
    return f"{len(subject.parameters)} inputs, {len(subject.expected[0])} outputs"


def _described(subject: Subject) -> str:
    """SUBJECT is one sentence, the provenance is filled in, and every part of a fresh template was replaced."""
    problem = subject.problem
    sentence = problem.subject
    if not sentence.endswith(".") or "\n" in sentence or ". " in sentence or not 20 <= len(sentence) <= 300:
        raise Wrong(f"SUBJECT is {sentence!r}: say in one sentence of 20 to 300 characters what is computed")
    if not problem.provenance.upstream or not problem.provenance.licence:
        raise Wrong("PROVENANCE lacks the upstream or its licence: say where subject and sizes come from")
    left = [line for line in Path(problem.path).read_text(encoding="utf-8").splitlines() if "REPLACE" in line]
    if left:
        raise Wrong(f"{len(left)} lines still say REPLACE, the first is {left[0].strip()!r}: fill them in")
    return sentence


def _outputs(subject: Subject) -> str:
    """OUTPUTS names what `reference` returns, and every draw gives the same dtypes and shapes, since the verifier makes
    room for them once."""
    names, first = subject.problem.outputs, subject.expected[0]
    if len(names) != len(first) or len(set(names)) != len(names):
        raise Wrong(f"`reference` returns {len(first)} outputs and OUTPUTS has {names}: name each once, in order")
    for outputs in subject.expected:
        for name, output, other in zip(names, outputs, first, strict=True):
            if type(output) is not torch.Tensor:
                raise Wrong(f"output `{name}` is a {type(output).__name__}: return a plain torch.Tensor")
            if output.device.type != subject.device.type:
                raise Wrong(f"output `{name}` is on {output.device}: compute it on the device of the inputs")
            if (output.dtype, output.shape) != (other.dtype, other.shape):
                raise Wrong(f"output `{name}` changes its dtype or shape from draw to draw: return the same always")
    return ", ".join(f"{n} {list(o.shape)} {o.dtype}".replace("torch.", "") for n, o in zip(names, first, strict=True))


def _determinism(subject: Subject) -> str:
    """The same seed gives the same inputs, and the same inputs give the same outputs."""
    again = subject.draw(SEEDS[0])
    for name, first, second in zip(subject.parameters, subject.draws[0], again, strict=True):
        if not same(first, second):
            raise Wrong(
                f"input `{name}` differs between two draws of one seed: take all randomness from torch's default "
                "generator of `device`"
            )
    for name, a, b in zip(subject.problem.outputs, subject.expected[0], as_tuple(subject.run(again)), strict=True):
        if not same(a, b):
            raise Wrong(f"output `{name}` differs between two runs on equal inputs: make `reference` deterministic")
    return "same seed, same inputs, same outputs"


def _fresh(subject: Subject) -> str:
    """Every input tensor changes from draw to draw, except those that the module declares in FIXED."""
    declared = set(subject.problem.fixed)
    first, *others = subject.draws
    tensors = {name for _, name in subject.tensors()}
    still = {name for place, name in subject.tensors() if all(same(first[place], other[place]) for other in others)}
    if unknown := declared - tensors:
        raise Wrong(f"FIXED names {sorted(unknown)}, which is no input tensor: remove it")
    if undeclared := sorted(still - declared):
        raise Wrong(
            f"the same in {len(SEEDS)} draws: {', '.join(undeclared)}. Draw it afresh in `make_inputs`, or, where the "
            f"problem means it to be constant, declare it: FIXED = {tuple(undeclared)}"
        )
    if varying := declared - still:
        raise Wrong(f"{sorted(varying)} is declared in FIXED and changes from draw to draw: remove it from FIXED")
    if still == tensors:
        raise Wrong("every input is fixed: draw some afresh, or an implementation can return a stored answer")
    return f"fixed by declaration: {', '.join(sorted(declared))}" if declared else "every input is fresh"


def _anchor(subject: Subject) -> str:
    """The reference runs on promoted inputs, in float64 throughout, and is finite where the reference is."""
    # A problem of integers and FP8 alone has nothing to promote: its reference is its own anchor.
    promoted = any(isinstance(x, torch.Tensor) and x.dtype in _HALF_AND_SINGLE for x in subject.draws[0])
    for outputs, anchor in zip(subject.expected, subject.anchors, strict=True):
        for name, output, exact in zip(subject.problem.outputs, outputs, anchor, strict=True):
            keeps = not promoted or output.dtype not in _HALF_AND_SINGLE or name in subject.problem.cast_outputs
            wanted = output.dtype if keeps else torch.float64
            if exact.shape != output.shape or exact.dtype != wanted:
                raise Wrong(
                    f"output `{name}` of the anchor is {list(exact.shape)} {exact.dtype}, expected "
                    f"{list(output.shape)} {wanted}: compute in `wide(x)`, return in `x.dtype`, name no dtype; where "
                    f"the problem itself casts this output, declare it: CAST_OUTPUTS = ({name!r},)"
                )
            if not exact.dtype.is_floating_point:
                continue
            lost = int((output.double().isfinite() & ~exact.double().isfinite()).sum())
            if lost:
                raise Wrong(f"output `{name}` of the anchor is not finite in {lost} places where the reference is")
    return "float64 and finite where the reference is" if promoted else "no input is promoted"


def _discrete(subject: Subject) -> list[int]:
    """Places of the outputs that must be equal to the last bit."""
    return [i for i, output in enumerate(subject.expected[0]) if not output.dtype.is_floating_point]


def _integers(subject: Subject) -> str:
    """Integer and Boolean outputs are the same in the reference and in the anchor. Bytes are left out: where they hold
    the codes of a quantiser, its float32 steps are part of the problem, and float64 steps may round elsewhere."""
    discrete = [i for i in _discrete(subject) if subject.expected[0][i].dtype != torch.uint8]
    for outputs, anchor in zip(subject.expected, subject.anchors, strict=True):
        for i in discrete:
            if not torch.equal(outputs[i], anchor[i]):
                raise Wrong(
                    f"output `{subject.problem.outputs[i]}` differs between float32 and float64: redraw what lies too "
                    "close to a decision (`problems/formats/stable_rows.py`)"
                )
    return f"{len(discrete)} discrete outputs agree" if discrete else "no discrete output"


def _stable(subject: Subject) -> str:
    """Discrete outputs stay when products and reductions move by one unit in the last place (`nudge.py`)."""
    discrete = _discrete(subject)
    nudged = 0
    for inputs, outputs in zip(subject.draws, subject.expected, strict=True):
        for seed in range(NUDGES if discrete else 0):
            with Nudged(seed, subject.device) as mode:
                moved = as_tuple(subject.run(inputs))
            nudged += mode.nudged
            for i in discrete:
                if not torch.equal(outputs[i], moved[i]):
                    raise Wrong(
                        f"output `{subject.problem.outputs[i]}` changes when the results of products and sums move by "
                        "one unit in the last place: redraw what lies too close to a decision "
                        "(`problems/formats/stable_rows.py`)"
                    )
    return f"unchanged with {nudged} results nudged" if discrete else "no discrete output"


def _nontrivial(subject: Subject) -> str:
    """No output is zero, constant, without a finite value, or the same in every draw."""
    for i, name in enumerate(subject.problem.outputs):
        outputs = [results[i] for results in subject.expected]
        for output in outputs:
            values = output.double()
            finite = values[values.isfinite()]
            if finite.numel() == 0 or not finite.any():
                raise Wrong(f"output `{name}` is zero, or nowhere finite: draw inputs that give other values")
            if values.numel() > 1 and bool((values == values.flatten()[0]).all()):
                raise Wrong(f"output `{name}` has the same value everywhere: draw inputs that tell its elements apart")
        if all(same(outputs[0], other) for other in outputs[1:]):
            raise Wrong(f"output `{name}` is the same in {len(SEEDS)} draws: an implementation can store the answer")
    return "every output varies, within a draw and between draws"


def _uses_inputs(subject: Subject) -> str:
    """Changing any input tensor alone changes an output, or makes the inputs inconsistent, which shows it is read."""
    untested = []
    for place, name in subject.tensors():
        replacements = list(_replacements(subject, place))
        if not replacements:
            untested.append(name)
        elif not any(_matters(subject, place, replacement) for replacement in replacements):
            raise Wrong(
                f"no output changes when `{name}` does: let `reference` use it, remove it, or draw inputs under which "
                "it matters"
            )
    return "every input tensor matters" + (f"; not exercised: {', '.join(untested)}" if untested else "")


def _matters(subject: Subject, place: int, replacement: torch.Tensor) -> bool:
    inputs = list(subject.draws[0])
    inputs[place] = replacement
    try:
        changed = as_tuple(subject.run(tuple(inputs)))
    except (IndexError, RuntimeError, ValueError):
        return True
    return any(not same(a, b) for a, b in zip(subject.expected[0], changed, strict=True))


def _replacements(subject: Subject, place: int) -> Iterator[torch.Tensor]:
    """Other values for one input: those of other draws, and for a float tensor slightly and strongly disturbed copies.
    None for integers that are fixed or change their shape, and on a GPU for all integers, because an index out of
    range there ends the process."""
    value: torch.Tensor = subject.draws[0][place]
    if subject.device.type == "cpu" or value.dtype.is_floating_point:
        for other in subject.draws[1:]:
            if other[place].shape == value.shape and not same(other[place], value):
                yield other[place]
    if value.dtype in _HALF_AND_SINGLE:
        exact = value.double()
        spread = exact.std(correction=0) if exact.numel() > 1 and exact.std() > 0 else exact.abs().max() + 1
        torch.manual_seed(SEEDS[0])
        noise = torch.randn_like(exact)
        for strength in (1, 10):
            yield (exact + strength * spread * noise).to(value.dtype)


@contextmanager
def _hostile_settings() -> Iterator[None]:
    """What a user's process may have set: everything that costs precision switched on."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    precision, tf32, reduced = (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    try:
        torch.set_float32_matmul_precision("medium")
        cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = True, True
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = tf32, reduced
        torch.set_default_dtype(torch.float32)


def _settings() -> tuple[object, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def _tf32(subject: Subject) -> str:
    """TF32 and precision settings of the process around change nothing, and neither function touches them."""
    with _hostile_settings(), reference_numerics():
        before = _settings()
        inputs = subject.draw(SEEDS[0])
        outputs = as_tuple(subject.run(inputs))
        after = _settings()
    if before != after:
        raise Wrong(f"precision settings change from {before} to {after}: leave torch's global settings alone")
    for name, a, b in zip(subject.problem.outputs, subject.expected[0], outputs, strict=True):
        if not same(a, b):
            raise Wrong(f"output `{name}` depends on the precision settings around: read none of them")
    return "the settings around change nothing"


def _inputs_unmodified(subject: Subject) -> str:
    """Inputs stay as they were, except a tensor that is itself returned as an output (an in-place update)."""
    aliases: set[str] = set()
    for label, function in (("reference", subject.problem.reference), ("vectorized", subject.problem.vectorized)):
        if function is None:
            continue
        inputs = copies(subject.draws[0])
        returned = {output.untyped_storage().data_ptr() for output in as_tuple(function(*inputs))}
        for place, name in subject.tensors():
            if same(inputs[place], subject.draws[0][place]):
                continue
            if inputs[place].untyped_storage().data_ptr() not in returned:
                raise Wrong(
                    f"`{label}` changes input `{name}` and does not return it: work on a copy, or return the tensor "
                    "itself where the problem is an in-place update"
                )
            aliases.add(name)
    return f"updated in place and returned: {', '.join(sorted(aliases))}" if aliases else "inputs are left alone"


def _vectorized(subject: Subject) -> str:
    """`vectorized`, where there is one, passes the contract."""
    vectorized = subject.problem.vectorized
    if vectorized is None:
        return "none"
    for inputs, result, anchor in zip(subject.draws, subject.results, subject.anchors, strict=True):
        actual = vectorized(*copies(inputs))
        if isinstance(actual, torch.Tensor) != isinstance(result, torch.Tensor):
            raise Wrong("`vectorized` returns another container than `reference`: return the same")
        for name, a, e in zip(subject.problem.outputs, as_tuple(actual), as_tuple(result), strict=True):
            if (a.shape, a.dtype) != (e.shape, e.dtype):
                raise Wrong(
                    f"`vectorized` returns `{name}` as {list(a.shape)} {a.dtype}, not {list(e.shape)} {e.dtype}"
                )
        for comparison in compare_all(subject.problem.outputs, actual, result, anchor):
            if not comparison.passed:
                raise Wrong(
                    f"`vectorized` is wrong in `{comparison.output}`: {comparison.mismatches} of {comparison.elements} "
                    f"elements, error {comparison.error}, allowance {comparison.allowance}"
                )
    return "passes the contract"


def _smoke_time(subject: Subject) -> str:
    """The reference is quick on the smoke workload, in processor seconds, as the machine may be busy."""
    if subject.workload != "smoke":
        return "checked on the smoke workload only"
    times = []
    for _ in range(2):
        start = time.process_time()
        subject.run(subject.draws[0])
        times.append(time.process_time() - start)
    if min(times) > SMOKE_SECONDS:
        raise Wrong(f"`reference` takes {min(times):.2f} s on SMOKE, more than {SMOKE_SECONDS} s: make SMOKE smaller")
    return f"{1e3 * min(times):.1f} ms"


def _cost(subject: Subject) -> str:
    """The cost is positive for both workloads, and no larger than reading all inputs and writing all outputs."""
    for workload in subject.problem.workloads.values():
        cost = subject.problem.cost(workload)
        if min(cost.bytes_read, cost.bytes_written) <= 0 or any(flops <= 0 for flops in cost.flops.values()):
            raise Wrong(f"{cost} is not positive: count the bytes that must move and the FLOPs that must be done")
    cost = subject.problem.cost(subject.problem.workloads[subject.workload])
    size_in = max(sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor)) for inputs in subject.draws)
    size_out = max(sum(x.nbytes for x in outputs) for outputs in subject.expected)
    for verb, counted, size in (("read", cost.bytes_read, size_in), ("written", cost.bytes_written, size_out)):
        if counted > size:
            raise Wrong(
                f"`cost` has {counted} bytes {verb}, more than the {size} there are: count each byte once, and only "
                "those that must move"
            )
    return f"{cost.bytes_read} bytes read, {cost.bytes_written} written"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "runs": _runs,
    "description": _described,
    "outputs": _outputs,
    "determinism": _determinism,
    "fresh inputs": _fresh,
    "anchor": _anchor,
    "integer outputs": _integers,
    "discrete stability": _stable,
    "nontrivial outputs": _nontrivial,
    "uses every input": _uses_inputs,
    "precision settings": _tf32,
    "inputs unmodified": _inputs_unmodified,
    "vectorized": _vectorized,
    "smoke time": _smoke_time,
    "cost": _cost,
}
"""Name → check, in the order of the report. A check returns what it found, or raises `Wrong`."""
