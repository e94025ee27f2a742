"""What one runner is at, another one does not begin; and whatever ends it, it is free again at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metakernelbench.errors import StoreError
from metakernelbench.experiments.claim import claimed
from metakernelbench.store.leases import Leases, Owner
from metakernelbench.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", create=True) as store:
        yield store


class Slow(Leases):
    """Leases whose claims or releases wait in their threads, as a busy disk makes them."""

    def __init__(self, leases: Leases, slow: str) -> None:
        self.__dict__.update(leases.__dict__)
        self.slow, self.begun, self.go_on = slow, threading.Event(), threading.Event()

    def claim(self, experiment: str, key: str, owner: Owner) -> bool:
        self._wait("claim")
        return super().claim(experiment, key, owner)

    def release(self, owner: Owner, experiment: str | None = None, key: str | None = None) -> None:
        self._wait("release")
        super().release(owner, experiment, key)

    def _wait(self, what: str) -> None:
        if what == self.slow:
            self.begun.set()
            assert self.go_on.wait(30)


async def at_work(leases: Leases, owner: Owner, seen: list[bool], forever: bool = False) -> None:
    async with claimed(leases, owner, "e", "k") as ours:
        seen.append(ours)
        if forever:
            await asyncio.Event().wait()


def test_a_claim_is_held_for_the_length_of_the_block_and_no_longer(store: Store) -> None:
    async def run() -> None:
        with store.leases.owner() as owner, store.leases.owner() as other:
            async with claimed(store.leases, owner, "e", "k") as ours:
                assert ours and store.leases.held("e") == {"k": owner.name}
                seen: list[bool] = []
                await at_work(store.leases, other, seen)
                assert seen == [False] and store.leases.held("e") == {"k": owner.name}
            assert store.leases.held("e") == {}

    asyncio.run(run())


@pytest.mark.parametrize("slow", ["claim", "release"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_cancellation_meets_a_claim_or_a_release_under_way_and_leaves_nothing_held(
    store: Store, slow: str, times: int
) -> None:
    leases = Slow(store.leases, slow)
    seen: list[bool] = []

    async def run() -> None:
        with store.leases.owner() as owner:
            task = asyncio.create_task(at_work(leases, owner, seen))
            await asyncio.to_thread(leases.begun.wait, 30)
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            leases.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert store.leases.held("e") == {}

    asyncio.run(run())
    assert seen == ([] if slow == "claim" else [True])


def test_a_cancelled_block_gives_its_lease_back(store: Store) -> None:
    seen: list[bool] = []

    async def run() -> None:
        with store.leases.owner() as owner:
            task = asyncio.create_task(at_work(store.leases, owner, seen, forever=True))
            while not seen:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert store.leases.held("e") == {}

    asyncio.run(run())


def test_a_lease_that_cannot_be_given_back_is_known_to_be_a_gone_runners(store: Store) -> None:
    class Broken(Slow):
        def release(self, owner: Owner, experiment: str | None = None, key: str | None = None) -> None:
            raise StoreError("the disk is full")

    seen: list[bool] = []

    async def run() -> None:
        with store.leases.owner() as owner:
            await at_work(Broken(store.leases, ""), owner, seen)
            assert store.leases.held("e") == {"k": owner.name}

    asyncio.run(run())
    assert seen == [True] and store.leases.held("e") == {}
