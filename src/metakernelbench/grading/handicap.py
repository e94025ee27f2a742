"""How much more than the control one worker needs for carrying, measured while it does the control's work.

Processes differ: in where their memory lies, in what they share with the verifier they were forked from. That is not
the submission's fault, so it is measured on this very worker, before it imports anything.
"""

from __future__ import annotations

from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.buffers import Form
from metakernelbench.grading.calls import Link, SubmissionFault, echo
from metakernelbench.grading.control import Control
from metakernelbench.grading.cores import SETTLED_FOR, CalmCores
from metakernelbench.grading.timing import low
from metakernelbench.grading.transport import Transport
from metakernelbench.problems.problem import Inputs

_CALLS = {"cpu": 24, "cuda": 48}


def handicap_ms(
    link: Link, control: Control, cores: CalmCores, transport: Transport, inputs: Inputs, form: Form
) -> float:
    """Milliseconds a call, at least 0. Worker and control go first in turn. Raises `InfrastructureFault`."""
    device, calls = transport.device, _CALLS[transport.device]
    own_ms, control_ms = list[float](), list[float]()
    steps: list[tuple[Link | Control, list[float]]] = [(link, own_ms), (control, control_ms)]
    try:
        link.request(echo(form, device))
        for number in range(calls):
            if device != "cpu" and number % SETTLED_FOR == 0:
                cores.settle([0, *(called.pid for called, _ in steps if called.pid is not None)])
            steps.reverse()
            for called, seen_ms in steps:
                cores.look_after(called.pid)
                seen_ms.append(called.call(transport, inputs, form).carrying_ms)
    except SubmissionFault as fault:
        raise InfrastructureFault(f"a worker does not work: {fault.finding.message}") from None
    finally:
        cores.release()
    warm = slice(calls // 4, None)
    return max(0.0, low(own_ms[warm], device) - low(control_ms[warm], device))
