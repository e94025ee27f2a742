"""Moves the results of products, reductions and transcendental functions by one unit in the last place.

Two correct implementations differ in the order in which they add, and in the last bit of an exponential. `Nudged`
stands for all of them: within it, every float32 or float64 result of a matrix product, a convolution, a floating
reduction or a transcendental function (and of the operations that contain one, such as softmax) is replaced by one of
its two neighbours, at random. Sums, products, quotients and roots of two numbers are left alone: IEEE defines them to
the last bit. A discrete output that changes under it hangs on rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "convolution"}
_PRODUCTS |= {"_grouped_mm"}
_REDUCTIONS = {"sum", "nansum", "mean", "prod", "cumsum", "cumprod", "scatter_add", "index_add", "logsumexp", "norm"}
_REDUCTIONS |= {"linalg_vector_norm", "logcumsumexp", "var", "std", "var_mean", "std_mean"}
_COMPOSED = {"_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm"}
_COMPOSED |= {"linalg_solve_triangular", "triangular_solve", "_fft_r2c", "_fft_c2r", "_fft_c2c"}
_COMPOSED |= {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")}
_COMPOSED |= {"_scaled_dot_product_flash_attention_for_cpu"}
_TRANSCENDENTAL = {"exp", "exp2", "expm1", "log", "log2", "log1p", "rsqrt", "sin", "cos", "tan", "tanh", "erf"}
_TRANSCENDENTAL |= {"sigmoid", "log_sigmoid_forward", "silu", "softplus", "gelu"}
_NUDGED = _PRODUCTS | _REDUCTIONS | _COMPOSED | _TRANSCENDENTAL
"""Operators by the name under which PyTorch dispatches them; an in-place form has an underscore at the end."""


class Nudged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which inexact operations give one of the neighbours of their result."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the default would import torch's compiler, which takes seconds."""
        return False

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self.nudged = 0
        """Results moved so far."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if name in _NUDGED:
            return tree_map(self._nudge, result)
        if name.removesuffix("_") in _NUDGED:
            result.copy_(self._nudge(result))
        return result

    def _nudge(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_complex():
            return torch.view_as_complex(self._nudge(torch.view_as_real(value).contiguous()))
        if value.dtype not in (torch.float32, torch.float64):
            return value
        self.nudged += 1
        up = torch.rand(value.shape, generator=self._generator, device=value.device) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(value.dtype)
        return torch.where(value.isfinite(), torch.nextafter(value, towards), value)
