#!/usr/bin/env python3
"""Check kernel.py, send it for grading, and see how much time and how many submissions are left.

    task check     say what can be said of /app/kernel.py here, without a submission; exit status 0 nothing wrong
                   found, 1 something is wrong
    task submit    send a copy of /app/kernel.py, wait for the verdict and print it; exit status 0 passed, 1 graded and
                   not passed, 2 not graded and not counted
    task status    print the time and the submissions that are left; exit status 0

Exit status 2 for anything else. The last line says what to do next.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("MKB_ROOT") or "/")
KERNEL = ROOT / "app" / "kernel.py"
MAILBOX = ROOT / "mailbox"
CHECK = ROOT / "task" / "checks" / "check.py"
PASSED, NOT_PASSED, NOT_GRADED = 0, 1, 2
_LOOK_AGAIN_S = 0.2
_PATIENCE_S = 60
"""How long past the budget an answer is still awaited: the judge closes the mailbox when the budget is used up."""


def main(arguments: list[str]) -> int:
    match arguments:
        case ["check"]:
            return check()
        case ["submit"]:
            return submit()
        case ["status"]:
            return status()
        case _:
            print(__doc__)
            return NOT_GRADED


def check() -> int:
    """`task check`: the report comes from a program of its own, because it needs more than the standard library."""
    code = subprocess.run([sys.executable, str(CHECK)], check=False).returncode
    if code == 0:
        say_next("Nothing wrong was found. `task submit` sends it.")
    elif code == 1:
        say_next("Correct what is marked WRONG, then run `task check` again.")
    else:
        say_next(f"The check itself failed (exit status {code}); that is no fault of kernel.py. `task submit` works.")
    return code


def submit() -> int:
    state = read_state()
    if state is None:
        return say("There is no judge behind this sandbox: nothing can be submitted.")
    if state["closed"]:
        return say("The mailbox is closed: nothing more is graded in this attempt.")
    try:
        source = KERNEL.read_bytes()
    except OSError as error:
        return say(f"{KERNEL} cannot be read ({error.strerror}). Write it, then submit again.")
    id = f"{time.time_ns()}-{secrets.token_hex(4)}"
    request = MAILBOX / "requests" / f"{id}.py"
    request.with_suffix(".part").write_bytes(source)
    request.with_suffix(".part").rename(request)
    print(f"Sent {len(source)} bytes. Waiting for the verdict ...", flush=True)
    answer = wait_for(MAILBOX / "answers" / f"{id}.json", until=state["started"] + state["budget_s"] + _PATIENCE_S)
    if answer is None:
        return say("The mailbox was closed before this submission was answered.")
    print(answer["text"])
    code = int(answer["exit"])
    say_next(after(code))
    return code


def status() -> int:
    state = read_state()
    if state is None:
        say_next("")
    elif not KERNEL.is_file():
        say_next("There is no /app/kernel.py yet: write one that defines `solve`.")
    elif not left_to_submit(state):
        say_next("Put your best version into /app/kernel.py: it is graded when the attempt ends.")
    else:
        say_next("`task check` looks for mistakes here, `task submit` sends /app/kernel.py.")
    return PASSED


def after(code: int) -> str:
    """What to do after a verdict."""
    if code == PASSED:
        return "Keep a copy of this version, and bring SKILL.md up to date."
    if code == NOT_PASSED:
        return "Correct it, `task check` it, submit it again; bring SKILL.md up to date."
    return "Put right what is said above."


def wait_for(path: Path, *, until: float) -> dict[str, str] | None:
    """The answer, as soon as it is there; None where the attempt ends first."""
    while time.time() < until:
        if path.exists():
            answer: dict[str, str] = json.loads(path.read_text())
            return answer
        state = read_state()
        if state is None or state["closed"]:
            return None
        time.sleep(_LOOK_AGAIN_S)
    return None


def read_state() -> dict[str, float] | None:
    """What the judge last wrote: when the clock started, the budget, the submissions used."""
    try:
        state: dict[str, float] = json.loads((MAILBOX / "state.json").read_text())
    except (OSError, ValueError):
        return None
    return state


def left_to_submit(state: dict[str, float]) -> int:
    return int(state["max_submissions"]) - int(state["used"])


def say_next(advice: str) -> None:
    """The line that ends every answer: time and submissions left, and what to do next."""
    state = read_state()
    if state is None:
        print(f"[task] There is no judge behind this sandbox. {advice}".rstrip())
        return
    left = max(0, int(state["started"] + state["budget_s"] - time.time()))
    remaining, most = left_to_submit(state), int(state["max_submissions"])
    if not remaining:
        advice = "Put your best version into /app/kernel.py: it is graded when the attempt ends."
    print(f"[task] {left // 60}:{left % 60:02d} left, {remaining} of {most} submissions left. {advice}")


def say(reason: str) -> int:
    """Explain why nothing was graded."""
    print(reason)
    status()
    return NOT_GRADED


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nStopped waiting. What was submitted is still graded; its verdict will be in /mailbox/answers.")
        sys.exit(NOT_GRADED)
