"""Block-scaled FP8 against its definition: a plain Python quantiser, vectors worked out by hand, and E4M3's table."""

import numpy as np
import pytest
import torch

from metakernelbench.problems.formats import block_scaled_fp8 as fp8
from tests.problems.formats import e4m3_by_hand


def quantize_by_hand(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """One number at a time, each step a single float32 operation: codes and scales."""
    values, f = matrix.float().numpy(), np.float32
    rows, columns = values.shape[0] // block[0], values.shape[1] // block[1]
    codes, scales = np.zeros(values.shape, dtype=np.uint8), np.zeros((rows, columns), dtype=f)
    for i in range(rows):
        for j in range(columns):
            places = [(i * block[0] + r, j * block[1] + c) for r in range(block[0]) for c in range(block[1])]
            scale = max(max(abs(values[place]) for place in places) / f(448), f(1e-12))
            scales[i, j] = scale
            for place in places:
                codes[place] = e4m3_by_hand.nearest_code(float(np.clip(values[place] / scale, f(-448), f(448))))
    return codes, scales


@pytest.mark.parametrize("block", [(1, 128), (4, 8)])
def test_the_quantiser_agrees_with_plain_python_number_by_number(block):
    torch.manual_seed(0)
    matrix = torch.randn(8, 256 if block[0] == 1 else 16, dtype=torch.bfloat16)[: 2 if block[0] == 1 else 8]
    codes, scales = fp8.quantize(matrix, block)
    hand_codes, hand_scales = quantize_by_hand(matrix, block)
    assert codes.view(torch.uint8).tolist() == hand_codes.tolist()
    assert scales.tolist() == hand_scales.tolist()


def test_a_row_worked_out_by_hand():
    row = torch.zeros(1, 128)
    row[0, :8] = torch.tensor([3, -3, 1, 0.1, -0.01, 0.001, 0.0001, 2.9])
    codes, scales = fp8.quantize(row, fp8.ACTIVATION_BLOCK)
    assert scales.view(torch.int32).item() == 0x3BDB6DB7
    assert bytes(codes.view(torch.uint8)[0].tolist()) == bytes.fromhex("7e fe 71 57 bc 22 08 7e") + bytes(120)
    decoded = fp8.dequantize(fp8.BlockScaledFp8(codes, scales), torch.float32)[0, :4]
    torch.testing.assert_close(decoded, torch.tensor([3, -3, 0.9642857, 0.10044643]), rtol=1e-7, atol=0)


def test_a_block_of_zeros_keeps_the_smallest_scale_and_decodes_to_zero():
    quantized = fp8.quantize(torch.zeros(1, 128), fp8.ACTIVATION_BLOCK)
    assert quantized.scales.item() == np.float32(1e-12)
    assert torch.equal(fp8.dequantize(quantized, torch.float32), torch.zeros(1, 128))


def test_every_code_that_is_a_number_survives_decoding_and_quantising():
    values = torch.tensor([float(v) for v in e4m3_by_hand.VALUES] + [0.0])  # 127 codes of no sign, and one to fill up
    codes, scales = fp8.quantize(values.reshape(1, 128), fp8.ACTIVATION_BLOCK)
    assert scales.item() == 1.0
    assert codes.view(torch.uint8)[0].tolist() == [*range(127), 0]


def test_a_square_block_gives_a_weight_and_its_transpose_the_same_codes():
    torch.manual_seed(0)
    weight = torch.randn(256, 384)
    straight, turned = (fp8.quantize(w, fp8.WEIGHT_BLOCK) for w in (weight, weight.T))
    assert torch.equal(straight.codes.view(torch.uint8), turned.codes.view(torch.uint8).T)
    assert torch.equal(straight.scales, turned.scales.T)


def test_codes_do_not_depend_on_the_dtype_that_carries_the_same_numbers():
    torch.manual_seed(0)
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    narrow, promoted = (fp8.quantize(x.to(dtype), fp8.ACTIVATION_BLOCK) for dtype in (torch.bfloat16, torch.float64))
    assert torch.equal(narrow.codes.view(torch.uint8), promoted.codes.view(torch.uint8))
    assert torch.equal(narrow.scales, promoted.scales) and promoted.scales.dtype == torch.float32


def test_matmul_is_the_sum_over_blocks_of_exact_products_times_both_scales():
    torch.manual_seed(0)
    a = fp8.quantize(torch.randn(3, 256), fp8.ACTIVATION_BLOCK)
    b = fp8.quantize(torch.randn(128, 256), fp8.WEIGHT_BLOCK)
    expected = torch.zeros(3, 128, dtype=torch.float64)
    for k in range(2):
        part = slice(128 * k, 128 * k + 128)
        product = a.codes[:, part].double() @ b.codes[:, part].double().T
        expected += product * a.scales[:, k, None].double() * b.scales[0, k].double()
    torch.testing.assert_close(fp8.matmul(a, b, torch.float64), expected)


def test_a_random_weight_has_gains_that_differ_from_block_to_block_only():
    torch.manual_seed(0)
    weight = fp8.random_weight(256, 256, torch.float32, torch.device("cpu")) * 16
    deviations = weight.reshape(2, 128, 2, 128).std(dim=(1, 3)).flatten()
    assert (deviations > 0.45).all() and (deviations < 2.1).all() and deviations.std() > 0.1
