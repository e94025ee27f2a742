"""A grading as it travels to another machine and back, for judges that grade elsewhere.

Both ways it is JSON: no end has to unpickle what the other sends. The other end calls `answer`, which starts a verifier
for this one request and ends it, and with it all that the submission started.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from metakernelbench.errors import InfrastructureFault, MkbError, UserError
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.contract import CONTRACT, CONTRACT_VERSION, Contract
from metakernelbench.grading.head_to_head import Entrant, HeadToHead
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest


def one(request: GradingRequest, contract: Contract = CONTRACT) -> str:
    """The text that asks for a verdict."""
    return _asked([request], contract, "verdict")


def several(requests: Sequence[GradingRequest], contract: Contract = CONTRACT) -> str:
    """The text that asks for a head to head. Raises `UserError` for requests that do not belong together."""
    if len({(r.problem, r.workload, r.device, r.final) for r in requests}) > 1:
        raise UserError("a head to head is of one problem, workload and device, all final or none")
    if len(requests) < 2:
        raise UserError(f"a head to head needs at least two implementations, not {len(requests)}")
    return _asked(requests, contract, "head_to_head")


def _asked(requests: Sequence[GradingRequest], contract: Contract, wanted: str) -> str:
    first = requests[0]
    return json.dumps(
        {
            "wanted": wanted,
            "contract_version": CONTRACT_VERSION,
            "contract": dataclasses.asdict(contract),
            "problem": first.problem,
            "workload": first.workload,
            "device": first.device,
            "final": first.final,
            "entrants": [{"dsl": r.dsl, "kernel": base64.b64encode(r.source).decode()} for r in requests],
        }
    )


def verdict_in(text: str) -> Verdict:
    """The verdict of an answer. Raises what the verifier raised there."""
    return Verdict.from_dict(_wanted(text, "verdict"))


def head_to_head_in(text: str) -> HeadToHead:
    """The head to head of an answer. Raises what the verifier raised there."""
    return HeadToHead.from_dict(_wanted(text, "head_to_head"))


def _wanted(text: str, name: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
        if (error := answer.get("error")) is not None:
            kind = InfrastructureFault if error["kind"] == InfrastructureFault.kind else UserError
            raise kind(error["message"], hint=error["hint"])
        found: dict[str, Any] = answer[name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InfrastructureFault(f"the judge's answer cannot be read: {error!r}") from error
    return found


def answer(text: str) -> str:
    """What this machine's verifier says to a request. Runs where the judge grades."""
    request = json.loads(text)
    try:
        return json.dumps({request["wanted"]: dataclasses.asdict(_graded(request))}, allow_nan=False)
    except MkbError as error:
        return json.dumps({"error": {"kind": error.kind, "message": error.message, "hint": error.hint}})


def _graded(request: dict[str, Any]) -> Verdict | HeadToHead:
    if request["contract_version"] != CONTRACT_VERSION:
        raise UserError(
            f"the judge's machine grades under contract {CONTRACT_VERSION}, "
            f"this experiment under contract {request['contract_version']}",
            hint="install the same version of metakernelbench on both",
        )
    entrants = [Entrant(item["dsl"], base64.b64decode(item["kernel"])) for item in request["entrants"]]
    options = {name: request[name] for name in ("workload", "device", "final")}
    options["contract"] = Contract(**request["contract"])
    with VerifierProcess() as verifier:
        if request["wanted"] == "head_to_head":
            return verifier.head_to_head(request["problem"], entrants, **options)
        return verifier.grade(request["problem"], entrants[0].kernel, entrants[0].dsl, **options)
