"""Roofline bounds: the slower of memory and arithmetic, at the peaks of the GPU that torch names."""

import pytest

from metakernelbench.errors import UnknownName
from metakernelbench.problems.problem import DATATYPES, Cost
from metakernelbench.problems.roofline import GPUS, bound_seconds, gpu_named


@pytest.mark.parametrize("device_name", ["NVIDIA H200", "nvidia h200 nvl"])
def test_a_gpu_is_found_by_the_name_that_torch_gives(device_name):
    assert gpu_named(device_name) is GPUS["H200"]


def test_an_unknown_gpu_lists_the_known_ones():
    with pytest.raises(UnknownName, match="`B200`, `H200`"):
        gpu_named("NVIDIA Tesla T4")


def test_every_datatype_of_a_cost_has_a_rate_on_every_gpu():
    for gpu in GPUS.values():
        assert set(gpu.flops_per_s) == set(DATATYPES)


def test_the_bound_is_the_slower_of_bytes_and_flops():
    memory_bound = Cost(bytes_read=4_800_000_000, bytes_written=4_800_000_000, flops={"bf16": 1e9})
    assert bound_seconds(memory_bound, GPUS["H200"]) == pytest.approx(2e-3)
    compute_bound = Cost(bytes_read=1, bytes_written=1, flops={"bf16": 2.25e12, "nvfp4": 9e12})
    assert bound_seconds(compute_bound, GPUS["B200"]) == pytest.approx(2e-3)


def test_float32_matrix_products_take_three_16_bit_passes():
    cost = {name: Cost(bytes_read=1, bytes_written=1, flops={name: 1e12}) for name in ("fp32_matrix", "bf16")}
    for gpu in GPUS.values():
        assert bound_seconds(cost["fp32_matrix"], gpu) == pytest.approx(3 * bound_seconds(cost["bf16"], gpu))


def test_hopper_does_fp4_work_at_its_fp8_rate():
    rates = GPUS["H200"].flops_per_s
    assert rates["nvfp4"] == rates["fp8"] == rates["int8"]
