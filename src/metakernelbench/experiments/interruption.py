"""Ctrl-C: the first stops new work and lets running attempts end, the second leaves at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CLEANING_UP_S = 10
"""How long the second Ctrl-C waits for sandboxes to go. The store needs no waiting for."""
_STATUS = 130


class Interruption:
    """What the user has asked for. `on_request` is told how many times."""

    def __init__(self, on_request: Callable[[int], None] = lambda _: None) -> None:
        self._times = 0
        self._on_request = on_request
        self._happened = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Start nothing more."""
        return self._times > 0

    @property
    def at_once(self) -> bool:
        """End what runs, too."""
        return self._times > 1

    def request(self) -> None:
        """One Ctrl-C."""
        self._times += 1
        self._on_request(self._times)
        self._happened.set()
        self._happened = asyncio.Event()

    def next(self) -> Coroutine[Any, Any, Any]:
        """Waits for the next request after this call."""
        return self._happened.wait()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Make SIGINT and SIGTERM requests while a run lasts. Needs the main thread."""
        loop = asyncio.get_running_loop()

        def signalled() -> None:
            self.request()
            if self._times == 2:
                loop.call_later(_CLEANING_UP_S, os._exit, _STATUS)
            elif self._times > 2:
                os._exit(_STATUS)

        for number in _SIGNALS:
            loop.add_signal_handler(number, signalled)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
