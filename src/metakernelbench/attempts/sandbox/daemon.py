"""Runs commands inside a sandbox for the host, over the socket it was born with. Standard library only, one file.

In a bubblewrap sandbox it is PID 1: nothing inside can kill it, and when it ends, everything inside ends. It trusts the
host and nothing else; the host trusts nothing that comes out of it.

A message is two lengths (JSON part, bytes part), the JSON part and the bytes part. The host asks

    {"id", "argv", "env", "cwd"} + standard input     run a command; answered when it has ended
    {"id", "kill": true}                              kill a running command's process group
    {"id", "quiesce": true}                           kill everything else that runs in the sandbox

and is answered with {"id", "code", "stdout"} + standard output, then standard error, or {"id", "error"}.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

_HEADER = struct.Struct("!II")
_MAX_OUTPUT = 16 * 2**20
_END_ALL_S = 5.0
_GRACE_S = 0.3
"""How long output is awaited after a command has ended: something it left behind may hold the pipe for ever."""


class Job:
    """One running command."""

    def __init__(self, id: int, pid: int, pipes: tuple[int, int]) -> None:
        self.id = id
        self.pid = pid
        self.output = {fd: bytearray() for fd in pipes}
        self.open = set(pipes)
        self.status: int | None = None
        self.ended_at = 0.0


class Daemon:
    """The loop: the host's socket, the commands' pipes, and the deaths of children."""

    def __init__(self, connection: socket.socket, last_command: list[str]) -> None:
        connection.set_inheritable(False)
        if os.getpid() == 1:
            set_dumpable(False)  # or a process inside could trace this one, and stop it
        self.connection = connection
        self.last_command = last_command
        self.received = bytearray()
        self.jobs: dict[int, Job] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(connection, selectors.EVENT_READ, self.hear)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: os.read(wake_read, 4096))

    def run(self) -> NoReturn:
        while True:
            waiting = any(job.status is not None for job in self.jobs.values())
            for key, _ in self.selector.select(0.02 if waiting else None):
                key.data()
            self.reap()
            self.answer_finished()

    def hear(self) -> None:
        data = self.connection.recv(2**20)
        if not data:
            self.leave()
        self.received += data
        while len(self.received) >= _HEADER.size:
            head, body = _HEADER.unpack_from(self.received)
            end = _HEADER.size + head + body
            if len(self.received) < end:
                return
            message = json.loads(self.received[_HEADER.size : _HEADER.size + head])
            stdin = bytes(self.received[_HEADER.size + head : end])
            del self.received[:end]
            self.obey(message, stdin)

    def leave(self) -> NoReturn:
        """The host has gone. As PID 1 this ends the sandbox; elsewhere a last command clears up what can be."""
        self.quiesce()
        if self.last_command:
            os.execvp(self.last_command[0], self.last_command)
        os._exit(0)

    def obey(self, message: dict[str, Any], stdin: bytes) -> None:
        if "kill" in message:
            if job := self.jobs.get(message["id"]):
                kill_group(job.pid)
        elif "quiesce" in message:
            self.quiesce()
            self.say({"id": message["id"], "code": 0, "stdout": 0})
        else:
            try:
                self.start(message, stdin)
            except OSError as error:
                self.say({"id": message["id"], "error": str(error)})

    def quiesce(self) -> None:
        """Only PID 1 may kill "everything": elsewhere that would be everything of the user's."""
        for job in self.jobs.values():
            kill_group(job.pid)
        if os.getpid() == 1:
            self.end_all()

    def end_all(self) -> None:
        """Kill until nothing is left: what has died but was not collected still counts towards the process limit."""
        deadline = time.monotonic() + _END_ALL_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(-1, signal.SIGKILL)
                self.reap()
                time.sleep(0.005)

    def start(self, message: dict[str, Any], stdin: bytes) -> None:
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            out_read, out_write = os.pipe()
            error_read, error_write = os.pipe()
            try:
                pid = os.fork()
                if pid == 0:
                    become(message, given.fileno(), out_write, error_write)
            except OSError:
                os.close(out_read)
                os.close(error_read)
                raise
            finally:
                os.close(out_write)
                os.close(error_write)
        job = Job(message["id"], pid, (out_read, error_read))
        self.jobs[job.id] = job
        for pipe in job.output:
            os.set_blocking(pipe, False)
            self.selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self.read(job, pipe))

    def read(self, job: Job, pipe: int) -> None:
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return
        if data:
            kept = job.output[pipe]
            kept += data[: _MAX_OUTPUT - len(kept)]
        else:
            self.close(job, pipe)

    def close(self, job: Job, pipe: int) -> None:
        self.selector.unregister(pipe)
        os.close(pipe)
        job.open.discard(pipe)

    def reap(self) -> None:
        """Collect every child that has ended: commands, and orphans that the kernel handed to PID 1."""
        by_pid = {job.pid: job for job in self.jobs.values()}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if job := by_pid.get(pid):
                    job.status = status
                    job.ended_at = time.monotonic()

    def answer_finished(self) -> None:
        for job in list(self.jobs.values()):
            if job.status is None or (job.open and time.monotonic() < job.ended_at + _GRACE_S):
                continue
            for pipe in list(job.open):
                self.close(job, pipe)
            del self.jobs[job.id]
            stdout, stderr = job.output.values()
            code = os.waitstatus_to_exitcode(job.status)
            self.say({"id": job.id, "code": code, "stdout": len(stdout)}, bytes(stdout + stderr))

    def say(self, message: dict[str, Any], body: bytes = b"") -> None:
        head = json.dumps(message).encode()
        self.connection.sendall(_HEADER.pack(len(head), len(body)) + head + body)


def become(message: dict[str, Any], stdin: int, stdout: int, stderr: int) -> NoReturn:
    """Turn this forked child into the command. Never returns."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        set_dumpable(True)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(
                "1000"
            )  # memory runs out for the agent's work before it does for PID 1
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.chdir(message["cwd"])
        os.execvpe(message["argv"][0], message["argv"], message["env"])
    except BaseException as error:
        os.write(2, f"{message['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def set_dumpable(value: bool) -> None:
    """Whether others of the same user may trace this process and read its memory (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, int(value), 0, 0, 0)


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    Daemon(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).run()
