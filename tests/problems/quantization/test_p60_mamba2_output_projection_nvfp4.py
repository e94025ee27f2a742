import torch

from metakernelbench.problems.formats.nvfp4 import E2M1_VALUES
from metakernelbench.problems.quantization import p60_mamba2_output_projection_nvfp4 as p60
from tests.problems.mistakes import accepted, altered
from tests.problems.quantization.nvfp4_changed import one_step_off, ones_for_scales, swapped_nibbles
from tests.problems.support import case


def decoded(codes, scales, number):
    """[rows, columns] in float64, one element at a time."""
    rows = []
    for packed, block_scales in zip(codes[0].view(torch.uint8).tolist(), scales[0].double().tolist(), strict=True):
        elements = [E2M1_VALUES[half] for byte in packed for half in (byte & 15, byte >> 4)]
        rows.append([x * block_scales[i // 16] * float(number) for i, x in enumerate(elements)])
    return torch.tensor(rows, dtype=torch.float64)


def element_by_element(*inputs):
    return (decoded(*inputs[:3]) @ decoded(*inputs[3:]).T).float().unsqueeze(0)


def test_agrees_with_operands_decoded_one_element_at_a_time():
    draw = case("p60")
    assert draw.accepts(element_by_element)
    torch.testing.assert_close(draw.anchor[0].float(), element_by_element(*draw.inputs))


def test_cost_is_that_of_the_sheet():
    cost = p60.cost(p60.FULL)
    assert cost.bytes == 73_835_528
    assert cost.flops == {"nvfp4": 2 * 8192 * 1920 * 1920}


def test_wrong_implementations_are_rejected():
    draw = case("p60")
    wrong = {
        "result rounded to bf16": lambda *x: p60.reference(*x).bfloat16().float(),
        "operands rounded to bf16 after scaling": altered(
            p60.reference, global_decode_scale_input=lambda g: g.bfloat16().float()
        ),
        "elements of a byte swapped": altered(p60.reference, weight=swapped_nibbles),
        "block scales of the activations ignored": altered(p60.reference, hidden_states_scale=ones_for_scales),
        "block scales of the weight ignored": altered(p60.reference, weight_scale=ones_for_scales),
        "block scales of the neighbouring block": altered(
            p60.reference, weight_scale=lambda s: s.view(torch.uint8).roll(1, -1).view(s.dtype)
        ),
        "a global scale left out": altered(p60.reference, global_decode_scale_weight=torch.ones_like),
        "a single code one step off": altered(p60.reference, hidden_states=one_step_off),
    }
    assert accepted(draw, wrong) == []
