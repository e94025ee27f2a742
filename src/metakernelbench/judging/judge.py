"""A judge: the place where a verifier runs. `local.py` is this machine; other judges are other modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from metakernelbench.grading.head_to_head import HeadToHead
from metakernelbench.grading.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class GradingRequest:
    """One implementation to be graded."""

    problem: str
    dsl: str
    source: bytes
    """The bytes of kernel.py as they were when the submission was made."""
    workload: str = "full"
    device: str = "cuda"
    """`cpu` or `cuda`."""
    final: bool = False


class Judge(Protocol):
    """Grades implementations. A judge's own failure is an `InfrastructureFault`, never a verdict."""

    async def verdict(self, request: GradingRequest) -> Verdict:
        """Grade one implementation. Raises `InfrastructureFault`."""
        ...

    async def close(self) -> None:
        """Release what the judge holds; end what it started."""
        ...


class HeadToHeadJudge(Judge, Protocol):
    """A judge that can also time implementations against each other."""

    async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        """Grade these implementations of one problem and time them interleaved; places in the answer are places in
        `requests`, which may differ in DSL and source only. Raises `InfrastructureFault`."""
        ...
