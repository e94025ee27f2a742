import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.quantization import p59_attention_output_projection_nvfp4 as p59
from tests.problems.mistakes import accepted, altered
from tests.problems.quantization.nvfp4_changed import (
    by_blocks_of_32,
    one_step_off,
    ones_for_scales,
    swapped_nibbles,
    through_nvfp4,
    values,
)
from tests.problems.support import Case, case


def in_float64(x, codes, scales, number, quantize=through_nvfp4):
    return (quantize(x) @ values(Nvfp4(codes, scales, number)).T).float()


def global_scales_at_the_end(x, codes, scales, number):
    """What a matrix unit would do: code · block scale is exact in bfloat16, the global scales multiply the sum."""
    tokens = nvfp4.quantize(x)
    a = values(tokens._replace(global_scale=1.0))
    b = values(Nvfp4(codes, scales, 1.0))
    assert torch.equal(a, a.bfloat16().double()) and torch.equal(b, b.bfloat16().double())
    return (a.bfloat16().float() @ b.bfloat16().float().T) * (tokens.global_scale * number)


def one_code_off(x, codes, scales, number):
    tokens = nvfp4.quantize(x)
    tokens = tokens._replace(codes=one_step_off(tokens.codes))
    return nvfp4.matmul(tokens, Nvfp4(codes, scales, number), torch.float32)


def another_order_of_roundings(x):
    """x through a quantiser that divides by the block scale first: G / s instead of 1 / (s · g)."""
    quantized = nvfp4.quantize(x)
    factor = (1 / quantized.global_scale) / quantized.block_scales.float()
    blocks = x.float().reshape(*x.shape[:-1], -1, 16)
    codes = nvfp4.e2m1_codes((blocks * factor.unsqueeze(-1)).clamp(-6, 6))
    return values(quantized._replace(codes=nvfp4.pack(codes.flatten(-2))))


def test_agrees_with_the_product_in_float64():
    draw = case("p59")
    assert draw.accepts(in_float64)
    torch.testing.assert_close(draw.anchor[0].float(), in_float64(*draw.inputs))


def test_exact_operands_with_the_global_scales_at_the_end_pass():
    assert case("p59").accepts(global_scales_at_the_end)


def test_another_order_of_roundings_is_rejected_where_an_element_lies_on_a_tie():
    draw = case("p59")
    x, *weight = draw.inputs
    x[0, :2], x[x.abs() > 5] = torch.tensor([5.0, 0.625], dtype=x.dtype), 5.0
    anchor = draw.problem.reference(x.double(), *weight)
    tied = Case(draw.problem, (x, *weight), draw.problem.reference(x, *weight), (anchor,))
    assert tied.accepts(in_float64)
    assert not tied.accepts(lambda *inputs: in_float64(*inputs, quantize=another_order_of_roundings))


def test_cost_is_that_of_the_sheet():
    cost = p59.cost(p59.FULL)
    assert cost.bytes == 644_022_272
    assert cost.flops == {"nvfp4": 2 * 32768 * 4096 * 2816}


def test_wrong_implementations_are_rejected():
    draw = case("p59")
    wrong = {
        "a single code one step off": one_code_off,
        "blocks of 32": lambda *x: in_float64(*x, quantize=by_blocks_of_32),
        "activations not quantised": lambda *x: in_float64(*x, quantize=torch.Tensor.double),
        "result rounded to bf16": lambda *x: p59.reference(*x).bfloat16().float(),
        "block scales ignored": altered(p59.reference, weight_scale=ones_for_scales),
        "elements of a byte swapped": altered(p59.reference, weight=swapped_nibbles),
        "global scale rounded to bf16": altered(
            p59.reference, weight_global=lambda g: float(torch.tensor(g).bfloat16())
        ),
        "one global scale a row": lambda x, *w: torch.cat([in_float64(row[None], *w) for row in x]),
    }
    assert accepted(draw, wrong) == []
