"""The host: a process that imports torch and the DSL once and forks workers on demand.

    python boot.py <descriptor of its channel> <JSON: what to import>

It runs trusted code only. Where it may (root), it stays outside and forks every worker into the sandbox of its grading;
otherwise it lives in the sandbox itself, serves one grading, and the verifier asks for all workers that must be
untouched before it lets any of them load the submission.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from metakernelbench.grading import entering, seccomp
from metakernelbench.grading.channel import Channel, ChannelClosed

_PR_SET_DUMPABLE = 4


def main(arguments: list[str]) -> None:
    """Serve the channel until it closes."""
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    spec = json.loads(arguments[1])
    _set_dumpable(False)  # a worker of the same user must not write to this process
    channel.send({"op": "ready", "versions": _import_all(spec)})
    while True:
        try:
            message, descriptors = channel.receive_with_descriptors()
        except ChannelClosed:
            return
        if message["op"] == "fork":
            channel.send({"op": "forked", "pid": _fork_worker(message, descriptors, channel)})
        elif message["op"] == "status":
            channel.send({"op": "status", **_how_it_ended(message["pid"])})
        elif message["op"] == "kill":
            with suppress(ProcessLookupError):
                os.kill(message["pid"], signal.SIGKILL)
            channel.send({"op": "status", **_how_it_ended(message["pid"])})


def _import_all(spec: dict[str, Any]) -> dict[str, str]:
    """Import torch and the DSL; the versions of what was imported."""
    import torch

    for name in spec["imports"]:
        importlib.import_module(name)
    plugin = getattr(importlib.import_module(spec["dsl_module"]), spec["dsl_class"])()
    return {"python": platform.python_version(), "torch": torch.__version__, **plugin.versions()}


def _fork_worker(message: dict[str, Any], descriptors: list[int], own: Channel) -> int:
    """A forked worker that serves the first descriptor and prints to the second."""
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    own.close()
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[1], 2)
    os.close(descriptors[1])
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    try:
        _become_worker(message, descriptors[0])
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _become_worker(message: dict[str, Any], descriptor: int) -> None:
    from metakernelbench.grading import worker

    for entrance in message["groups"]:
        Path(entrance).write_text("0")
    if message["holder"] is not None:
        entering.enter(message["holder"])
    _limit(message["limits"])
    if message["filtered"]:
        seccomp.install()
    scratch = Path(message["scratch"])
    os.chdir(scratch)
    _catch_up(message["imports"])
    _set_dumpable(True)
    worker.serve(Channel(socket.socket(fileno=descriptor)), scratch)


def _catch_up(imports: list[str]) -> None:
    """Do what must not be done before a fork on a GPU, while the verifier does its own: import the DSL, begin CUDA."""
    for name in imports:
        with suppress(ImportError):  # a part that is not installed and perhaps not needed
            importlib.import_module(name)
    if imports:
        import torch

        torch.zeros(1, device="cuda")


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lower, lower))


def _how_it_ended(pid: int, patience_s: float = 1.0) -> dict[str, int]:
    """The signal or exit code with which a worker ended, or that this was told before; empty while it runs."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return {"gone": 1}
        if done:
            return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"exit": os.WEXITSTATUS(status)}
        time.sleep(0.01)
    return {}


def _set_dumpable(value: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(value), 0, 0, 0)
