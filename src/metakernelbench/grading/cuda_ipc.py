"""Raw CUDA allocations that another process can map: one handle covers exactly one block, never torch's pools.

Buffers of torch's caching allocator share their allocation with other data, and their handles cannot be opened by
another user id; a block from `cudaMalloc` of its own can. Both sides use this module.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

_LAZY_PEER_ACCESS = 1
_SHARED_BYTES = 2 << 20
"""What a handle shares: the driver puts smaller allocations together into one such page, others' data included."""


class CudaError(Exception):
    """A CUDA runtime call failed."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class _Block:
    """Shows a raw pointer to torch through the array interface."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch itself loaded."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libcudart" in path:
            return ctypes.CDLL(path)
    raise CudaError("torch has loaded no libcudart")


def _check(code: int, call: str) -> None:
    if code != 0:
        text = _runtime().cudaGetErrorString
        text.restype = ctypes.c_char_p
        raise CudaError(f"{call}: {text(code).decode()}")


def allocate(size: int) -> tuple[int, torch.Tensor]:
    """A block of `size` bytes in pages of its own: its address, and its bytes as a tensor. Free it with `free`."""
    pointer, whole_pages = ctypes.c_void_p(), -(-size // _SHARED_BYTES) * _SHARED_BYTES
    _check(_runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(whole_pages)), "cudaMalloc")
    assert pointer.value is not None
    return pointer.value, as_tensor(pointer.value, size)


def as_tensor(pointer: int, size: int) -> torch.Tensor:
    return torch.as_tensor(_Block(pointer, size), device="cuda")


def free(pointer: int) -> None:
    """Release a block. Whoever mapped it should have ended before."""
    _check(_runtime().cudaFree(ctypes.c_void_p(pointer)), "cudaFree")


def unmap(block: torch.Tensor) -> None:
    """Give up a block that another process exported; its memory is freed only when nobody maps it any more."""
    _check(_runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(block.data_ptr())), "cudaIpcCloseMemHandle")


def export(pointer: int) -> str:
    """The handle under which another process of this machine can map the block."""
    handle = _Handle()
    _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(pointer)), "cudaIpcGetMemHandle")
    return ctypes.string_at(ctypes.byref(handle), 64).hex()


def map_exported(handle: str, size: int) -> torch.Tensor:
    """The bytes of a block that another process exported."""
    raw = _Handle()
    ctypes.memmove(ctypes.byref(raw), bytes.fromhex(handle), 64)
    pointer = ctypes.c_void_p()
    open_handle = _runtime().cudaIpcOpenMemHandle
    open_handle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    _check(open_handle(ctypes.byref(pointer), raw, _LAZY_PEER_ACCESS), "cudaIpcOpenMemHandle")
    assert pointer.value is not None
    return as_tensor(pointer.value, size)
