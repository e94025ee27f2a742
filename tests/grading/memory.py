"""Counts the memory of tensors: what a piece of code allocates and frees, on any device, so that the CPU can tell what
a GPU would need."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting(TorchDispatchMode):
    """While it is entered, the storages that operations return are counted until they are freed. Temporaries inside
    one operation are not seen."""

    def __init__(self, note: Callable[[int, int], None] = lambda _key, _bytes: None) -> None:
        """`note` is told of every storage when it appears, and with 0 bytes when it is freed."""
        super().__init__()
        self.live = self.most = 0
        self._note, self._next = note, 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known or not storage.nbytes():
            return
        self._next += 1
        key, size, address = self._next, storage.nbytes(), id(storage)

        def freed(_: Any) -> None:
            del self._known[address]
            self.live -= size
            self._note(key, 0)

        self._known[address] = weakref.ref(storage, freed)
        self.live += size
        self.most = max(self.most, self.live)
        self._note(key, size)
