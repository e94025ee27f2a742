import torch

from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.quantization import p55_multimodal_embedding_projection_nvfp4 as p55
from tests.problems.mistakes import accepted, altered
from tests.problems.quantization.nvfp4_changed import (
    of_the_row_above,
    ones_for_scales,
    swapped_nibbles,
    through_nvfp4,
    values,
)
from tests.problems.support import case


def position_by_position(
    ids, table, features, codes, scales, number, bias, mask, quantize=through_nvfp4, reverse=False
):
    """In float64 without roundings to bf16, one position at a time."""
    weight = values(Nvfp4(codes, scales, number))[0]
    projected = quantize(features) @ weight.T + bias.double()
    result = torch.empty(*ids.shape, table.shape[1], dtype=torch.float64)
    for b in range(ids.shape[0]):
        rows = projected[b].flip(0) if reverse else projected[b]
        used = 0
        for t in range(ids.shape[1]):
            if mask[b, t] and used < len(rows):
                result[b, t], used = rows[used], used + 1
            else:
                result[b, t] = table[ids[b, t]]
    return result.to(table.dtype)


def uneven(inputs):
    """Fewer True positions than vision tokens in the first sequence, more in the second."""
    *others, mask = inputs
    mask = mask.clone()
    mask[0, mask[0].nonzero().flatten()[-5:]] = False
    mask[1] = True
    return *others, mask


def test_agrees_with_positions_done_one_at_a_time():
    draw = case("p55")
    assert draw.accepts(position_by_position)
    promoted = (x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x for x in draw.inputs)
    torch.testing.assert_close(draw.anchor[0], position_by_position(*promoted))


def test_the_first_rows_and_positions_count_where_their_numbers_differ():
    inputs = uneven(case("p55").inputs)
    expected = position_by_position(*inputs).float()
    for implementation in (p55.reference, p55.vectorized):
        torch.testing.assert_close(implementation(*inputs).float(), expected, atol=0.05, rtol=0)


def test_text_rows_are_copies_of_the_table():
    draw = case("p55")
    ids, table, mask = draw.inputs[0], draw.inputs[1], draw.inputs[7]
    assert torch.equal(draw.expected[~mask], table[ids[~mask]])


def test_vectorized_computes_the_same():
    draw = case("p55")
    assert torch.equal(p55.vectorized(*draw.inputs), draw.expected)


def test_cost_is_that_of_the_sheet():
    cost = p55.cost(p55.FULL)
    without_rows = 262_144 + 32_768 + 88_080_384 + 14_680_064 + 1_835_008 + 16_384 + 536_870_912
    assert abs((cost.bytes - without_rows) / 16384 - 19160) < 10
    assert cost.flops == {"nvfp4": 2 * 12288 * 3584 * 8192}


def test_wrong_implementations_are_rejected():
    draw = case("p55")
    wrong = {
        "features not quantised": lambda *x: position_by_position(*x, quantize=torch.Tensor.double),
        "features in reverse order": lambda *x: position_by_position(*x, reverse=True),
        "no bias": altered(p55.reference, vision_proj_bias=torch.zeros_like),
        "mask off by one": altered(p55.reference, vision_token_mask=lambda m: m.roll(1, 1)),
        "ids off by one": altered(p55.reference, input_ids=lambda i: (i + 1) % 97),
        "text only": altered(p55.reference, vision_token_mask=torch.zeros_like),
        "block scales ignored": altered(p55.reference, vision_proj_scale=ones_for_scales),
        "block scales of the row above": altered(p55.reference, vision_proj_scale=of_the_row_above),
        "elements of a byte swapped": altered(p55.reference, vision_proj_weight=swapped_nibbles),
        "features of another sequence": altered(p55.reference, vision_features=lambda f: f.flip(0)),
    }
    assert accepted(draw, wrong) == []
