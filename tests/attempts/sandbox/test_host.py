"""The environment without walls keeps the interface and its own files, and leaves the user's processes alone."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.attempts.support import run, running, sandbox

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")


def test_commands_run_in_the_working_folder_and_know_where_the_sandbox_is(tmp_path: Path) -> None:
    async def work() -> list[str]:
        async with sandbox("host", tmp_path) as environment:
            done = await environment.exec('pwd; echo "$MKB_ROOT/app"; cat /logs/agent/x 2>&1; ls -d /logs/agent')
            return str(done.stdout).splitlines()

    working, expected, missing, logs = run(work())
    assert working == expected
    assert "/logs/agent/x: No such file" in missing
    assert logs == expected.removesuffix("app") + "logs/agent"


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)))

    async def work() -> None:
        async with sandbox("host", tmp_path) as environment:
            await environment.upload_file(tmp_path / "file", "/app/file")
            await environment.download_file("/app/file", tmp_path / "back")

    run(work())
    assert (tmp_path / "back").read_bytes() == bytes(range(256))


def test_a_killed_run_leaves_no_terminal_behind(tmp_path: Path) -> None:
    source = f"""
import asyncio
from pathlib import Path
from tests.attempts.support import sandbox

async def work():
    async with sandbox("host", Path({str(tmp_path)!r})) as environment:
        await environment.exec("tmux new-session -d -s work 'exec sleep 63.125'")
        print("begun", flush=True)
        await asyncio.sleep(60)

asyncio.run(work())
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.kill()
    for _ in range(50):
        if not running("63.125"):
            return
        time.sleep(0.1)
    raise AssertionError("the terminal is still there")


def test_ending_what_runs_in_it_ends_nothing_else(tmp_path: Path) -> None:
    async def work() -> str:
        async with sandbox("host", tmp_path) as environment:
            await environment.exec("tmux new-session -d -s work 'sleep 60'")
            await environment.quiesce()
            return str((await environment.exec("tmux has-session -t work || echo gone")).stdout)

    assert run(work()) == "gone\n"
    assert Path("/proc", str(os.getppid())).exists()
