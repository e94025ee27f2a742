"""Separates the worker from the verifier, as strongly as this machine allows, and ends all that a submission started.

`bubblewrap` (CPU): own user id, pid, mount, network and IPC namespaces; packages read-only; nothing writable but a
scratch in memory. Ending the sandbox ends every process in it.
`process` (CUDA, or where bubblewrap cannot be used): an own session under a supervisor that ends all its descendants;
an own user id where the verifier is root and that user can read the packages. What is weaker is said in the verdict's
notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metakernelbench.dsls.dsl import Dsl
from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading import folders, groups, launching, processes, runtime
from metakernelbench.grading.channel import Channel, ChannelBroken, ChannelClosed, ChannelTimeout
from metakernelbench.grading.launching import Launch
from metakernelbench.grading.verdict import Isolation

_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 120.0
_HOLD = ("/bin/sh", "-c", "echo held; exec sleep 100000")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What protects the machine from a submission. Generous: an honest submission never meets them."""

    memory_bytes: int = 8 << 30
    """Memory of all processes of a CPU worker together, and of each of them."""
    host_memory_bytes: int = 64 << 30
    """The same for a GPU worker, outside of the GPU."""
    processes: int = 128
    """Processes and threads of a worker; on a machine with many cores 32 for each."""
    file_bytes: int = 1 << 30
    """The largest file, and all files together."""
    output_bytes: int = 64 << 20
    """Everything that is printed."""
    descriptors: int = 1024
    """Files, sockets and the like that one process has open."""

    def as_rlimits(self, device: str) -> dict[str, int]:
        """The limits of each process, by the names of the `resource` module."""
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.file_bytes, "RLIMIT_NOFILE": self.descriptors}
        return limits | ({"RLIMIT_DATA": self.memory_bytes} if device == "cpu" else {})

    @property
    def most_processes(self) -> int:
        """The limit of processes on this machine."""
        return max(self.processes, 32 * processes.cores())

    def memory_on(self, device: str) -> int:
        """The most that a worker's processes may hold together."""
        return self.memory_bytes if device == "cpu" else self.host_memory_bytes


LIMITS = Limits()


def method_for(device: str) -> str:
    """The isolation that a grading on `device` gets on this machine."""
    return "bubblewrap" if device == "cpu" and launching.bubblewrap_problem() is None else "process"


class Host:
    """A started host process. It outlives a grading only where its workers enter sandboxes (`can_be_shared`)."""

    def __init__(self, dsl: Dsl, device: str, *, method: str | None = None, limits: Limits = LIMITS) -> None:
        self.dsl, self.device, self.method = dsl, device, method or method_for(device)
        self.can_be_shared = self.method == "bubblewrap" and os.geteuid() == 0
        self.runtime = runtime.build_runtime(dsl)
        self.versions: dict[str, str] = {}
        self.launch = self._launch(limits)
        self._channel, theirs = Channel.pair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*self.launch.command, str(theirs.fileno()), json.dumps(self._imports())],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=self.launch.environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until torch and the DSL are imported. Raises `InfrastructureFault`: no submission has a part in it."""
        if self.versions:
            return
        try:
            self.versions = self._channel.receive(_START_TIMEOUT_S)["versions"]
        except (ChannelClosed, ChannelBroken, ChannelTimeout) as error:
            raise InfrastructureFault(f"the workers' host did not start ({error}): {self._log_tail()}") from None

    def ask(
        self, message: dict[str, Any], descriptors: tuple[int, ...] = (), patience_s: float = 60.0
    ) -> dict[str, Any]:
        """Its answer to a request. Raises what the channel raises."""
        self._channel.send(message, descriptors)
        return self._channel.receive(patience_s)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and where it is in a sandbox or under a supervisor everything that is there with it."""
        self._channel.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self.method == "bubblewrap":
            self._process.kill()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        for folder in (self.runtime, *self.launch.folders):
            folders.remove(folder)

    def _launch(self, limits: Limits) -> Launch:
        if self.method == "process":
            return launching.supervised(self.dsl, self.device, self.runtime)
        if self.can_be_shared:
            return launching.plain(self.dsl, self.device, self.runtime, launching.SCRATCH)
        return launching.sandboxed(self.dsl, self.device, self.runtime, limits.file_bytes)

    def _imports(self) -> dict[str, Any]:
        return {
            "dsl_module": type(self.dsl).__module__,
            "dsl_class": type(self.dsl).__name__,
            "imports": sorted(self.dsl.imports) if self.device == "cpu" else [],  # a fork must find CUDA untouched
        }

    def _log_tail(self) -> str:
        self._process.poll()
        self._log.seek(0)
        return self._log.read()[-1500:].decode(errors="replace").strip() or f"exit code {self._process.returncode}"


@dataclass
class Worker:
    """The verifier's view of one worker."""

    channel: Channel
    output: processes.Drain
    pid: int
    """Of the host's child that is the worker or waits for it."""


class Sandbox:
    """The isolated place of one grading, with the host that forks workers into it."""

    def __init__(self, host: Host, *, limits: Limits = LIMITS) -> None:
        self._host, self._limits = host, limits
        self._launch = host.launch
        self._holder: subprocess.Popen[str] | None = None
        self._holder_pid: int | None = None
        self._workers: list[Worker] = []
        self._closed = False
        host.wait_ready()
        self._group = groups.make(limits.memory_on(host.device), limits.most_processes)
        if host.can_be_shared:
            self._hold()
        elif self._group is not None:
            self._group.take(processes.below([host.pid]))  # nothing of the submission runs yet

    @property
    def isolation(self) -> Isolation:
        """What is in force, and in notes what is weaker."""
        notes = [] if self._group else ["no memory group: memory is limited per process and watched"]
        return Isolation(method=self._host.method, notes=(*self._launch.notes, *notes))

    @property
    def versions(self) -> dict[str, str]:
        return self._host.versions

    def fork(self) -> Worker:
        """A new worker that has imported no submission yet. Raises what the channel raises."""
        channel, theirs = Channel.pair()
        read, write = os.pipe()
        limits = self._limits.as_rlimits(self._host.device)
        if self._launch.own_user:  # the limit counts all processes of a user
            limits["RLIMIT_NPROC"] = self._limits.most_processes
        message = {
            "op": "fork",
            "holder": self._holder_pid,
            "scratch": self._launch.scratch,
            "limits": limits,
            "filtered": self._host.device == "cpu",  # what CUDA's driver calls is not known
            "groups": self._group.entrances if self._group and self._host.can_be_shared else [],
            "imports": sorted(self._host.dsl.imports) if self._host.device == "cuda" else [],
        }
        reply = self._host.ask(message, (theirs.fileno(), write))
        theirs.close()
        os.close(write)
        worker = Worker(channel, processes.Drain(read), int(reply["pid"]))
        self._workers.append(worker)
        return worker

    def process_of(self, worker: Worker) -> int:
        """The process that answers for a worker: the host's child, or the child in the sandbox that it waits for."""
        inside = processes.below([worker.pid]) if self._holder_pid is not None else []
        return inside[1] if len(inside) > 1 else worker.pid

    def end(self, worker: Worker) -> None:
        """End one worker and wait until it is gone, while the others go on. It has a second for it."""
        worker.channel.close()
        self._workers.remove(worker)
        with contextlib.suppress(ChannelClosed, ChannelBroken, ChannelTimeout):
            if self._status(worker):
                return
            if self._holder_pid is None:
                self._host.ask({"op": "kill", "pid": worker.pid}, patience_s=3.0)
                return
            for pid in processes.below([worker.pid])[1:]:  # the host's child only waits for what runs in the sandbox
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._status(worker)

    def _status(self, worker: Worker) -> dict[str, Any]:
        """What the host knows of a worker's end; empty while it runs."""
        reply = self._host.ask({"op": "status", "pid": worker.pid}, patience_s=3.0)
        return {key: value for key, value in reply.items() if key != "op"}

    def how_it_ended(self, worker: Worker) -> str:
        """How a worker ended, in words; empty where even the host cannot say."""
        try:
            return processes.ending(self._status(worker))
        except (ChannelClosed, ChannelBroken, ChannelTimeout):
            return ""

    def ran_out_of_memory(self) -> bool:
        """Whether the machine ended a process of the sandbox because all together held too much."""
        return self._group is not None and self._group.ran_out_of_memory()

    def written(self) -> int:
        """Bytes of the files in a scratch on disk; under bubblewrap its size is limited where it lies."""
        return folders.size_of(Path(self._launch.scratch)) if self._host.method == "process" else 0

    def memory(self) -> int:
        """Bytes that the processes of the sandbox hold."""
        return processes.memory_below(self._roots())

    def seconds_run(self) -> float:
        """Seconds for which the processes of the sandbox have run so far."""
        return processes.seconds_run(self._roots())

    def _roots(self) -> list[int]:
        """Processes that all others of the sandbox descend from."""
        if self._holder_pid is None:
            return [self._host.pid]
        return [*(worker.pid for worker in self._workers), self._holder_pid]

    def close(self) -> None:
        """End everything in the sandbox and remove its files. A shared host stays. Closing twice does no harm."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.channel.close()
        if self._holder is None:
            self._host.close()
        else:
            self._let_go(self._holder)
        if self._group is not None:
            self._group.remove()

    def _let_go(self, holder: subprocess.Popen[str]) -> None:
        """End the first process of the pid namespace: all others end with it, and it is gone only when they are."""
        if self._holder_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._holder_pid, signal.SIGKILL)
        else:
            holder.kill()
        try:
            holder.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise InfrastructureFault(f"the sandbox did not end within {_END_TIMEOUT_S:.0f} s") from None
        assert holder.stdout is not None
        holder.stdout.close()
        for worker in self._workers:  # the host's children end with the last process inside; reap them there
            self.how_it_ended(worker)
        for folder in self._launch.folders:
            folders.remove(folder)

    def _hold(self) -> None:
        """Start the sandbox with nothing in it but a sleeping process, which the workers' namespaces are taken from."""
        host = self._host
        size = self._limits.file_bytes
        self._launch = launching.sandboxed(host.dsl, host.device, host.runtime, size, _HOLD)
        info, info_write = os.pipe()
        command = list(self._launch.command)
        place = command.index("bwrap") + 1
        command[place:place] = ["--as-pid-1", "--info-fd", str(info_write)]
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._launch.environment,
            pass_fds=(info_write,),
            text=True,
        )
        os.close(info_write)
        assert self._holder.stdout is not None
        line = self._holder.stdout.readline()
        with os.fdopen(info) as pipe:
            told = pipe.read()
        if line.strip() != "held":
            raise InfrastructureFault(f"the sandbox did not start: {line.strip()} {told}")
        self._holder_pid = int(json.loads(told)["child-pid"])
