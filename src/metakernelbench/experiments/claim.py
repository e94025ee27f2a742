"""One piece of an experiment held by this runner while it is worked at, and given back however that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from metakernelbench.errors import StoreError
from metakernelbench.store.leases import Leases, Owner


@asynccontextmanager
async def claimed(leases: Leases, owner: Owner, experiment: str, key: str) -> AsyncIterator[bool]:
    """Whether it is this runner's for the length of the block; False where another one is at it.

    A thread cannot be cancelled as its task can: a claim or a release under way is waited for, else a lease could be
    taken that nobody gives back, and the next run would have to wait for its end.
    """
    claim = asyncio.create_task(asyncio.to_thread(leases.claim, experiment, key, owner))
    try:
        yield await asyncio.shield(claim)
    finally:
        await _to_its_end(asyncio.create_task(_give_back(claim, leases, owner, experiment, key)))


async def _give_back(claim: asyncio.Task[bool], leases: Leases, owner: Owner, experiment: str, key: str) -> None:
    try:
        if await claim:
            await asyncio.to_thread(leases.release, owner, experiment, key)
    except StoreError:  # it is on its way already, or the work is done and saved, which gave the lease back
        owner.abandon()


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Wait for a task, also where the waiting is cancelled once or more; then the cancellation goes on."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
