"""The devices that commands can be asked to grade on."""

from __future__ import annotations

from metakernelbench.errors import UnknownName


def check_device(device: str) -> None:
    """Raises `UnknownName`."""
    if device not in ("cpu", "cuda"):
        raise UnknownName("device", device, ("cpu", "cuda"), hint="`cuda` is this machine's GPU, `cpu` its processor")
