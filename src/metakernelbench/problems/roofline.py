"""The roofline bound: the least time a GPU can take for a problem's bytes and FLOPs.

Rates are the vendor's dense peaks, which no kernel reaches. They make problems comparable; they do not grade anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metakernelbench.errors import UnknownName

if TYPE_CHECKING:
    from metakernelbench.problems.problem import Cost


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak rates of one GPU."""

    name: str
    """What torch's device name contains."""
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """By datatype of `Cost.flops`."""
    arch: str
    """What kernels are compiled for."""
    processors: int
    """Streaming multiprocessors."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, as torch tells it."""
        number = int(self.arch.removeprefix("sm_").rstrip("af"))
        return number // 10, number % 10


def _gpu(
    name: str, arch: str, processors: int, *, bytes_per_s: float, fp32: float, bf16: float, fp8: float, nvfp4: float
) -> Gpu:
    """Three 16-bit passes make a matrix product accurate to float32; int8 runs at the FP8 rate."""
    rates = {"fp32": fp32, "fp32_matrix": bf16 / 3, "bf16": bf16, "fp8": fp8, "int8": fp8, "nvfp4": nvfp4}
    return Gpu(name=name, bytes_per_s=bytes_per_s, flops_per_s=rates, arch=arch, processors=processors)


_ALL = (
    _gpu("B200", "sm_100a", 148, bytes_per_s=8.0e12, fp32=75e12, bf16=2.25e15, fp8=4.5e15, nvfp4=9e15),
    # Hopper has no FP4 unit: FP8 is the fastest arithmetic that could stand in for it.
    _gpu("H200", "sm_90a", 132, bytes_per_s=4.8e12, fp32=67e12, bf16=0.989e15, fp8=1.979e15, nvfp4=1.979e15),
)
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _ALL}
"""By name, the GPUs whose bounds we state: the benchmark's own, and the one our records were measured on."""


def gpu_named(device_name: str) -> Gpu:
    """The GPU whose name occurs in `device_name`, as in `torch.cuda.get_device_name()`; case does not matter."""
    for gpu in GPUS.values():
        if gpu.name.lower() in device_name.lower():
            return gpu
    raise UnknownName("GPU", device_name, GPUS, hint="add its peak rates to problems/roofline.py")


def bound_seconds(cost: Cost, gpu: Gpu) -> float:
    """The larger of the time for the bytes and the time for the FLOPs, each at its peak rate."""
    compute = sum(flops / gpu.flops_per_s[datatype] for datatype, flops in cost.flops.items())
    return max(cost.bytes / gpu.bytes_per_s, compute)
