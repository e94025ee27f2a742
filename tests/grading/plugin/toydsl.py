"""A kernel DSL for tests, installed like anyone's: its kernels are Python functions that run at once, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metakernelbench.dsls.dsl import Dsl, Interceptor


class Kernel:
    """A function that counts as a kernel: a call of it is a launch."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *tensors: Any) -> None:
        self.function(*tensors)


def kernel(function: Callable[..., None]) -> Kernel:
    return Kernel(function)


class ToyDsl(Dsl):
    name = "toy"
    title = "Toy"
    requirements = ("toydsl==1.0",)
    imports = frozenset({"toydsl"})
    forbidden = {"toydsl.raw": "raw code is not Toy"}  # noqa: RUF012
    devices = frozenset({"cpu"})
    kernel_name_patterns = (r".*",)

    def intercept(self, interceptor: Interceptor) -> None:
        launch = Kernel.__call__

        def observed(self: Kernel, *tensors: Any) -> None:
            interceptor(self.function.__name__, tensors, lambda: launch(self, *tensors))

        Kernel.__call__ = observed  # type: ignore[method-assign]

    def versions(self) -> dict[str, str]:
        return {"toydsl": "1.0"}
