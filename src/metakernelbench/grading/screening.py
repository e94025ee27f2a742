"""What can be said of a kernel.py before anything is started: its source, and the static rules.

Imports no torch, starts no worker and waits for no device, so a typing mistake is answered in a fraction of a second
however busy the machine is. What has to be run, and a request that makes no sense, is left to the verifier.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from metakernelbench.dsls import dsl as dsls
from metakernelbench.grading import rules, source
from metakernelbench.grading.contract import CONTRACT_VERSION, Contract
from metakernelbench.grading.verdict import Finding, Isolation, Stage, Verdict
from metakernelbench.problems import catalog

_WORKLOADS = ("full", "smoke")
_GPUS = Path("/proc/driver/nvidia/gpus")


def screen(
    problem_id: str, kernel: bytes | None, dsl: str, *, workload: str, device: str, final: bool, contract: Contract
) -> Verdict | None:
    """The verdict that source or rules already settle, else None. A final grading measures on after a broken rule.
    Raises `UnknownName` for a problem or DSL that does not exist."""
    plugin, name = dsls.load(dsl), _device_name(device)
    catalog.source_path(problem_id)
    if name is None or workload not in _WORKLOADS or device not in plugin.devices or not plugin.versions():
        return None
    start = time.monotonic()
    tree = source.read(kernel, contract)
    seconds = {Stage.SOURCE.value: time.monotonic() - start}
    stage, findings = Stage.SOURCE, [tree] if isinstance(tree, Finding) else []
    if not isinstance(tree, Finding):
        if final:
            return None
        start = time.monotonic()
        stage, findings = Stage.RULES, rules.check(tree, plugin)
        seconds[Stage.RULES.value] = time.monotonic() - start
    return _refusal(problem_id, kernel, dsl, workload, name, final, stage, findings, seconds) if findings else None


def _refusal(
    problem_id: str,
    kernel: bytes | None,
    dsl: str,
    workload: str,
    device_name: str,
    final: bool,
    stage: Stage,
    findings: Sequence[Finding],
    seconds: dict[str, float],
) -> Verdict:
    return Verdict(
        problem=problem_id,
        dsl=dsl,
        workload=workload,
        device=device_name,
        passed=False,
        ended_at=stage,
        findings=tuple(findings),
        final=final,
        isolation=Isolation(method="none"),
        source_sha256=hashlib.sha256(kernel).hexdigest() if kernel is not None else None,
        contract_version=CONTRACT_VERSION,
        seconds={name: round(spent, 3) for name, spent in seconds.items()},
    )


def _device_name(device: str) -> str | None:
    """`cpu`, or the model of this machine's GPUs as the driver calls it; None where that needs CUDA to tell."""
    if device == "cpu":
        return "cpu"
    models = {
        line.split(":", 1)[1].strip()
        for told in _GPUS.glob("*/information")
        for line in told.read_text().splitlines()
        if line.startswith("Model:")
    }
    return models.pop() if len(models) == 1 else None
