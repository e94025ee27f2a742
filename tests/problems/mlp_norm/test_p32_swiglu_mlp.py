import torch

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p32_swiglu_mlp as p32
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def mlp(x, stacked, down, activation=lambda gate: gate / (1 + torch.exp(-gate))):
    """In float64, from the formula, on two separate matrices."""
    inner = stacked.shape[0] // 2
    gate, up = x.double() @ stacked[:inner].double().T, x.double() @ stacked[inner:].double().T
    return ((activation(gate) * up) @ down.double().T).to(x.dtype)


def test_agrees_with_the_formula_in_float64():
    draw = case("p32")
    assert draw.accepts(mlp)
    torch.testing.assert_close(draw.anchor[0], mlp(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p32.cost(p32.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (83_886_080, 33_554_432)
    assert cost.flops == {"fp32_matrix": 206_158_430_208}


def test_wrong_implementations_are_rejected():
    draw = case("p32")
    wrong = {
        "gate and up swapped": altered(p32.reference, gate_up_weight=lambda w: torch.cat(w.chunk(2)[::-1])),
        "gate and up interleaved": altered(p32.reference, gate_up_weight=lambda w: torch.cat((w[0::2], w[1::2]))),
        "no activation": lambda *x: mlp(*x, activation=lambda gate: gate),
        "GELU gate": lambda *x: mlp(*x, activation=torch.nn.functional.gelu),
        "operands rounded to bf16": altered(p32.reference, hidden_states=lambda x: x.bfloat16().float()),
        "operands rounded to ten bits, as TF32 does": altered(p32.reference, down_weight=lambda w: w.half().float()),
    }
    assert accepted(draw, wrong) == []
