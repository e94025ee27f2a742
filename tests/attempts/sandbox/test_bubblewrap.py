"""What the agent can and cannot do in the sandbox, by trying."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts.sandbox import channel
from metakernelbench.attempts.sandbox.channel import SandboxLost
from metakernelbench.attempts.sandbox.local import state_base
from metakernelbench.grading import seccomp
from tests.attempts.support import needs_sandbox, run, running, sandbox

pytestmark = needs_sandbox


def inside(folder: Path, *commands: str, memory_mb: int = 1024, timeout_sec: int = 60) -> list[Any]:
    """Run command lines in a fresh sandbox, one after the other."""

    async def work() -> list[Any]:
        async with sandbox("bubblewrap", folder, memory_mb=memory_mb) as environment:
            return [await environment.exec(command, timeout_sec=timeout_sec) for command in commands]

    results: list[Any] = run(work())
    return results


def python(source: str) -> str:
    return f"python3 - <<'EOF'\n{source}\nEOF"


def test_the_agent_is_an_ordinary_user_without_rights(tmp_path: Path) -> None:
    who, caps, nested = inside(
        tmp_path,
        "id -u; id -un; pwd; echo $HOME",
        "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status",
        "unshare --user true",
    )
    assert who.stdout.split() == ["1000", "agent", "/app", "/home/agent"]
    assert set(caps.stdout.split()[1::2]) == {"0000000000000000", "1"}
    assert nested.return_code != 0


def test_no_process_of_the_sandbox_is_the_hosts_root(tmp_path: Path) -> None:
    async def work() -> set[int]:
        async with sandbox("bubblewrap", tmp_path) as environment:
            job = asyncio.create_task(environment.exec("exec sleep 3.1415"))
            await asyncio.sleep(0.3)
            owners = set()
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if b"3.1415" in (process / "cmdline").read_bytes():
                        owners.add(process.stat().st_uid)
            job.cancel()
            return owners

    owners = run(work())
    assert owners
    assert 0 not in owners


def test_there_is_no_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        interfaces, loopback, outside = inside(
            tmp_path,
            "ls /sys/class/net 2>/dev/null || cut -d: -f1 -s /proc/net/dev | tail -n +1",
            python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"),
            python("import socket; socket.create_connection(('192.0.2.1', 80), 2)"),
        )
    assert set(interfaces.stdout.split()) <= {"lo"}
    assert "ConnectionRefusedError" in loopback.stderr
    assert "Network is unreachable" in outside.stderr


def test_nothing_of_the_host_can_be_written_and_its_folders_are_not_there(tmp_path: Path) -> None:
    attempts = [
        f"touch {place}/x" for place in ("/", "/usr", "/usr/bin", "/etc", "/task", "/opt", "/opt/venv", "/proc/sys")
    ]
    attempts += [
        "chmod 777 /task",
        "mount -o remount,rw /usr",
        "umount /task",
        "echo x > /proc/sys/kernel/core_pattern",
    ]
    attempts += [f"ls {Path(__file__).parent}", "cat /etc/shadow", f"ls {state_base()}"]
    results = inside(tmp_path, *attempts)
    assert [command for command, result in zip(attempts, results, strict=True) if result.return_code == 0] == []


def test_the_working_folder_and_the_temporary_ones_can_be_written(tmp_path: Path) -> None:
    places = ["/app", "/home/agent", "/mailbox", "/logs/agent", "/tmp", "/dev/shm"]
    assert {result.return_code for result in inside(tmp_path, *(f"touch {place}/x" for place in places))} == {0}


def test_killing_everything_leaves_the_sandbox_in_working_order(tmp_path: Path) -> None:
    _, after = inside(tmp_path, "kill -9 1; kill -TERM 1; kill -9 -1", "echo alive")
    assert after.stdout == "alive\n"


def test_the_process_that_serves_the_host_cannot_be_traced_or_read(tmp_path: Path) -> None:
    trace, memory, after = inside(
        tmp_path,
        python("import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"),
        "head -c 1 /proc/1/mem; ls /proc/1/fd",
        "cat /proc/self/oom_score_adj",
        timeout_sec=10,
    )
    assert trace.stdout == "-1\n"
    assert memory.stderr.count("Permission denied") == 2
    assert after.stdout == "1000\n"


def test_memory_beyond_the_limit_is_refused_and_the_sandbox_goes_on(tmp_path: Path) -> None:
    greedy = python("x = bytearray(900 * 2**20); print('had it')")
    modest = python("x = bytearray(100 * 2**20); print('had it')")
    too_much, after = inside(tmp_path, greedy, modest, memory_mb=512)
    assert "had it" not in too_much.stdout
    assert too_much.return_code != 0
    assert after.stdout == "had it\n"


def test_more_processes_than_cores_share_the_cores(tmp_path: Path) -> None:
    """Processor time cannot exceed cores times wall clock, however busy the machine is otherwise."""
    spin = python(
        """
import os, time
for _ in range(3):
    if os.fork() == 0:
        end = time.monotonic() + 2
        while time.monotonic() < end: pass
        os._exit(0)
start = time.monotonic()
for _ in range(3): os.wait()
times = os.times()
print((times.children_user + times.children_system) / (time.monotonic() - start))
"""
    )
    (result,) = inside(tmp_path, spin)
    assert float(result.stdout) < 1.3, "the sandbox of these tests has one core"


@pytest.mark.skipif(seccomp.program() is None, reason="the filter is for x86-64")
def test_calls_that_only_an_attacker_needs_are_refused(tmp_path: Path) -> None:
    asked = python(
        f"""
import ctypes, errno, os
call = ctypes.CDLL(None, use_errno=True).syscall
for name, number in {seccomp.REFUSED!r}.items():
    result = call(number, -1, 0, 0, 0, 0, 0)
    print(name, result, errno.errorcode.get(ctypes.get_errno()))
"""
    )
    (result,) = inside(tmp_path, asked)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [name for name, _, _ in lines] == list(seccomp.REFUSED)
    assert {(outcome, why) for _, outcome, why in lines} == {("-1", "EPERM")}


def test_files_that_fill_the_memory_file_systems_do_not_end_the_sandbox(tmp_path: Path) -> None:
    fill = "head -c 2G /dev/zero > /tmp/x; head -c 2G /dev/zero > /dev/shm/x; du -cm /tmp/x /dev/shm/x | tail -n 1"
    filled, after = inside(tmp_path, fill, "echo alive", memory_mb=512)
    assert 0 < int(filled.stdout.split()[0]) < 256
    assert after.stdout == "alive\n"


def test_a_fork_bomb_ends_with_its_command(tmp_path: Path) -> None:
    async def work() -> str:
        async with sandbox("bubblewrap", tmp_path) as environment:
            bomb = await environment.exec("b() { b | b & b; }; b", timeout_sec=2)
            assert bomb.return_code != 0
            await environment.quiesce()
            done = await environment.exec("echo alive", timeout_sec=10)
            return str(done.stdout)

    assert run(work()) == "alive\n"


def test_a_command_that_does_not_end_is_killed_in_its_time(tmp_path: Path) -> None:
    start = time.monotonic()
    late, after = inside(tmp_path, "sleep 60", "pgrep -c sleep", timeout_sec=1)
    assert time.monotonic() - start < 20
    assert late.return_code == 124
    assert after.stdout.strip() == "0"


def test_a_command_whose_caller_is_cancelled_is_killed(tmp_path: Path) -> None:
    async def work() -> str:
        async with sandbox("bubblewrap", tmp_path) as environment:
            job = asyncio.create_task(environment.exec("sleep 60"))
            await asyncio.sleep(0.3)
            job.cancel()
            await asyncio.sleep(0.3)
            return str((await environment.exec("pgrep -c sleep")).stdout)

    assert run(work()).strip() == "0"


def test_output_left_open_by_a_background_process_does_not_hold_an_answer_up(tmp_path: Path) -> None:
    start = time.monotonic()
    (result,) = inside(tmp_path, "sleep 60 & echo here")
    assert result.stdout == "here\n"
    assert time.monotonic() - start < 20


def test_endless_output_is_cut(tmp_path: Path) -> None:
    (result,) = inside(tmp_path, "head -c 30000000 /dev/zero | tr '\\0' x")
    assert 0 < len(result.stdout) < 20_000_000


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    async def work() -> None:
        async with sandbox("bubblewrap", tmp_path) as environment:
            source = tmp_path / "source"
            (source / "deep").mkdir(parents=True)
            (source / "deep" / "bytes").write_bytes(bytes(range(256)))
            await environment.upload_dir(source, "/app/copy")
            await environment.upload_file(source / "deep" / "bytes", "/app/new/one")
            await environment.download_dir("/app/copy", tmp_path / "back")
            await environment.download_file("/app/new/one", tmp_path / "one")

    run(work())
    assert (tmp_path / "back/deep/bytes").read_bytes() == bytes(range(256)) == (tmp_path / "one").read_bytes()


def test_a_link_leads_to_the_sandboxs_files_never_to_the_hosts(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")

    async def work() -> None:
        async with sandbox("bubblewrap", tmp_path) as environment:
            await environment.exec(f"ln -s {secret} /app/SKILL.md; ln -s /etc/passwd /app/passwd")
            with pytest.raises(FileNotFoundError):
                await environment.download_file("/app/SKILL.md", tmp_path / "skill")
            await environment.download_file("/app/passwd", tmp_path / "passwd")

    run(work())
    assert (tmp_path / "passwd").read_text().startswith("agent:")


def test_only_the_packages_asked_for_are_there(tmp_path: Path) -> None:
    asked, others, own = inside(
        tmp_path,
        "ls /opt/venv/lib/python3*/site-packages | grep -x -e torch -e numpy",
        "ls /opt/venv/lib/python3*/site-packages | grep -x -e harbor -e litellm -e tvm -e pytest",
        "python3 -c 'import metakernelbench'",
    )
    assert asked.stdout.split() == ["numpy", "torch"]
    assert others.stdout == ""
    assert "ModuleNotFoundError" in own.stderr


def test_a_sandbox_that_no_longer_answers_is_a_lost_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_QUIESCE_S", 0.5)

    async def work() -> None:
        async with sandbox("bubblewrap", tmp_path) as environment:
            frozen = [int(pid.name) for pid in Path("/proc").glob("[0-9]*") if _is_daemon(pid, environment)]
            assert frozen
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            with pytest.raises(SandboxLost, match="no longer answers"):
                await environment.quiesce()

    run(work())


def _is_daemon(pid: Path, environment: Any) -> bool:
    """Whether a process is the first one of the sandbox: a child of the one that was started."""
    with contextlib.suppress(OSError):
        return f"PPid:\t{environment._process.pid}\n" in (pid / "status").read_text()
    return False


def test_a_lost_sandbox_is_not_taken_for_a_failed_command(tmp_path: Path) -> None:
    async def work() -> None:
        async with sandbox("bubblewrap", tmp_path) as environment:
            running = asyncio.create_task(environment.exec("sleep 60"))
            await asyncio.sleep(0.3)
            environment._process.kill()
            with pytest.raises(SandboxLost):
                await running
            with pytest.raises(SandboxLost):
                await environment.exec("true")

    run(work())


def test_nothing_is_left_when_a_sandbox_has_been_stopped(tmp_path: Path) -> None:
    async def work() -> tuple[Path, int, tuple[Path, ...]]:
        async with sandbox("bubblewrap", tmp_path) as environment:
            await environment.exec("setsid sleep 61.5 &")
            return environment._state, environment._process.pid, environment.limits.groups

    state, pid, groups = run(work())
    assert not state.exists()
    assert not Path("/proc", str(pid)).exists()
    assert [group for group in groups if group.exists()] == []
    assert not running("61.5")


def test_a_killed_run_takes_its_sandbox_with_it(tmp_path: Path) -> None:
    source = f"""
import asyncio
from pathlib import Path
from tests.attempts.support import sandbox

async def work():
    async with sandbox("bubblewrap", Path({str(tmp_path)!r})) as environment:
        print("begun", flush=True)
        await environment.exec("exec sleep 64.25")

asyncio.run(work())
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.kill()
    for _ in range(50):
        if not running("64.25"):
            return
        time.sleep(0.1)
    raise AssertionError("the sandbox is still there")


def test_what_a_killed_run_has_left_is_swept_away(tmp_path: Path) -> None:
    left = state_base() / "mkb-4194305-left"  # beyond the largest process id of Linux
    left.mkdir()
    inside(tmp_path, "true")
    assert not left.exists()


def test_sandboxes_side_by_side_are_strangers(tmp_path: Path) -> None:
    async def work() -> tuple[str, str]:
        async with (
            sandbox("bubblewrap", tmp_path / "a", slot=1) as one,
            sandbox("bubblewrap", tmp_path / "b", slot=2) as two,
        ):
            await one.exec("sleep 60 & echo mine > /app/kernel.py")
            seen = await two.exec("pgrep -c sleep; ls /app")
            owners = one._state.joinpath("app").stat().st_uid, two._state.joinpath("app").stat().st_uid
            return str(seen.stdout), "different" if owners[0] != owners[1] or os.geteuid() != 0 else "same"

    seen, owners = run(work())
    assert seen == "0\n"
    assert owners == "different"
