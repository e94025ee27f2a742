"""NVFP4 against its definition: exhaustive rounding, a plain Python quantiser, and vectors worked out by hand."""

from fractions import Fraction

import numpy as np
import torch

from metakernelbench.problems.formats import nvfp4
from tests.problems.formats import e4m3_by_hand

FLOAT32_MAX = np.finfo(np.float32).max
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def nearest_e2m1(y: float) -> int:
    exact = [Fraction(m) for m in MAGNITUDES]
    code = min(range(8), key=lambda code: (abs(exact[code] - abs(Fraction(y))), code & 1))
    return code + (8 if y < 0 else 0)


def quantize_by_hand(rows: torch.Tensor) -> tuple[list[list[int]], list[list[int]], np.float32]:
    """One number at a time, each step a single float32 operation."""
    f = np.float32
    values = rows.float().numpy()
    with np.errstate(divide="ignore", over="ignore"):
        encode = min(f(2688) / max(abs(x) for x in values.flatten()), FLOAT32_MAX)
        decode = f(1) / encode
        codes, scales = [], []
        for row in values:
            codes.append([])
            scales.append([])
            for start in range(0, len(row), 16):
                block = row[start : start + 16]
                per_element = max(abs(x) for x in block) / f(6)
                scale_code = e4m3_by_hand.nearest_code(float(min(per_element * encode, f(448))))
                scale = f(e4m3_by_hand.value(scale_code))
                factor = min(f(1) / (scale * decode), FLOAT32_MAX)
                codes[-1] += [nearest_e2m1(float(np.clip(x * factor, f(-6), f(6)))) for x in block]
                scales[-1].append(scale_code)
    return codes, scales, decode


def test_every_bfloat16_number_within_range_rounds_to_the_nearest_code_with_ties_to_even() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    numbers = every[every.abs() <= 6]
    # bfloat16 numbers include every midpoint between two codes; the float32 neighbours of each number follow too.
    for y in (numbers, numbers.nextafter(torch.tensor(6.0)), numbers.nextafter(torch.tensor(-6.0))):
        magnitude = y.abs().double()
        distance = (torch.tensor(MAGNITUDES, dtype=torch.float64) - magnitude.unsqueeze(-1)).abs()
        odd = torch.tensor([0, 1] * 4)
        best = distance.min(dim=-1, keepdim=True).values
        nearest = torch.where(distance == best, odd, 2).argmin(dim=-1)
        assert torch.equal(nvfp4.e2m1_codes(y).long(), nearest + 8 * (y < 0))


def test_nan_rounds_to_code_zero() -> None:
    assert nvfp4.e2m1_codes(torch.tensor([float("nan")])).tolist() == [0]


def test_codes_survive_packing_and_the_first_of_a_pair_is_in_the_low_half() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64) % 16
    packed = nvfp4.pack(codes)
    assert packed.shape == (4, 32) and packed.dtype == torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8)[0, :2].tolist() == [0x10, 0x32]
    assert torch.equal(nvfp4.unpack(packed), codes)


def test_the_quantiser_agrees_with_plain_python_number_by_number() -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 48, dtype=torch.bfloat16) * torch.tensor([[1.0], [0.01]], dtype=torch.bfloat16)
    for largest in (4.5, 5.0, 5.78125):
        x[0, 0] = largest
        codes, scales, global_scale = nvfp4.quantize(x)
        hand_codes, hand_scales, hand_global = quantize_by_hand(x)
        assert nvfp4.unpack(codes).tolist() == hand_codes
        assert scales.view(torch.uint8).tolist() == hand_scales
        assert float(global_scale) == hand_global


# Each listed number is followed by its negative. The first block tells the order of roundings: 0.625 · G/s would round
# up to code 2, and the prescribed order gives 0.74999996, hence code 1.
WORKED_OUT = (
    ((5, 2.5, 1.25, 0.625, 0.3125, 0.1, 0, 3.75), 0x7E, "f7 d5 b3 91 91 80 00 e6"),
    ((0,) * 8, 0x00, "00 00 00 00 00 00 00 00"),
    ((1e-6, 0, 0, 0, 0, 0, 0, 0), 0x00, "f7 00 00 00 00 00 00 00"),
    ((1, 0.75, 0.5, 0.4375, 0.25, 0.125, 0.0625, 0.03125), 0x6B, "f7 e6 d5 d5 b3 a2 91 80"),
)


def test_a_row_worked_out_by_hand() -> None:
    row = torch.tensor([x * sign for numbers, _, _ in WORKED_OUT for x in numbers for sign in (1, -1)])
    codes, scales, global_scale = nvfp4.quantize(row)
    assert global_scale.view(torch.int32).item() == 0x3AF3CF3E
    assert scales.view(torch.uint8).tolist() == [scale for _, scale, _ in WORKED_OUT]
    assert bytes(codes.view(torch.uint8).tolist()) == bytes.fromhex("".join(packed for _, _, packed in WORKED_OUT))


def test_a_nearly_zero_block_decodes_to_zero() -> None:
    row = torch.zeros(32)
    row[0], row[16] = 5.0, 1e-6
    assert nvfp4.dequantize(nvfp4.quantize(row), torch.float32)[16:].tolist() == [0.0] * 16


def test_a_tensor_of_zeros_stays_finite() -> None:
    quantized = nvfp4.quantize(torch.zeros(2, 32))
    assert quantized.codes.view(torch.uint8).count_nonzero() == 0
    assert 0 < float(quantized.global_scale) < 3e-39
    assert torch.equal(nvfp4.dequantize(quantized, torch.float32), torch.zeros(2, 32))


def test_an_infinite_maximum_gives_an_encode_scale_of_one() -> None:
    row = torch.zeros(16)
    row[0] = float("inf")
    assert float(nvfp4.quantize(row).global_scale) == 1.0


def test_codes_do_not_depend_on_the_dtype_that_carries_the_same_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    narrow, promoted = nvfp4.quantize(x), nvfp4.quantize(x.double())
    for a, b in zip(narrow[:2], promoted[:2], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert narrow.global_scale.dtype == promoted.global_scale.dtype == torch.float32


def test_values_are_reproduced_within_half_a_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    restored = nvfp4.dequantize(nvfp4.quantize(x), torch.float64)
    block_largest = x.unflatten(-1, (-1, 16)).abs().amax(dim=-1, keepdim=True)
    # The widest step, 4 to 6, is a third of the block's largest element; the block scale itself is off by up to 1/16.
    assert ((x - restored).unflatten(-1, (-1, 16)).abs() <= block_largest * (1 / 6 + 1 / 16)).all()


def test_a_global_scale_may_be_a_tensor_or_its_number() -> None:
    quantized = nvfp4.quantize(torch.randn(2, 32))
    number = quantized._replace(global_scale=float(quantized.global_scale))
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(nvfp4.dequantize(quantized, dtype), nvfp4.dequantize(number, dtype))


def test_matmul_contracts_the_last_dimensions() -> None:
    a, b = nvfp4.quantize(torch.randn(3, 5, 32)), nvfp4.quantize(torch.randn(3, 7, 32))
    product = nvfp4.matmul(a, b, torch.float64)
    left, right = nvfp4.dequantize(a, torch.float64), nvfp4.dequantize(b, torch.float64)
    torch.testing.assert_close(product, (left.unsqueeze(-2) * right.unsqueeze(-3)).sum(dim=-1))


def test_a_random_weight_has_the_deviation_asked_for():
    codes, scales, number = nvfp4.random_weight(32, 64, 0.5, torch.device("cpu"))
    assert codes.shape == (1, 32, 32) and scales.shape == (1, 32, 4) and isinstance(number, float)
    assert 0.45 < nvfp4.dequantize(nvfp4.Nvfp4(codes, scales, number), torch.float32).std() < 0.55
