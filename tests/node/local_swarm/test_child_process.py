"""A child ends when asked, when killed, and when its parent dies; nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.local_swarm.child_process import MAX_STDERR_LINES, ChildProcess, SpawnedProcess
from swarm.vocabulary.errors import ResourceExhausted

SPAWNS_A_GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('grandchild', flush=True); time.sleep(600)"])
print(child.pid, flush=True)
{then}
"""


def python(code: str) -> ChildProcess:
    return ChildProcess(SpawnedProcess([sys.executable, "-c", code], os.environ))


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie (this machine's init may be slow to reap)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    while runs(pid):
        await asyncio.sleep(0.01)


async def test_it_stops_when_asked_and_its_output_is_read() -> None:
    child = python("import sys; print('hello', flush=True); sys.stdin.read(); print('bye'); sys.exit(3)")
    lines: list[bytes] = []

    def on_line(line: bytes) -> None:
        lines.append(line)
        child.ask_to_stop()

    end = await child.follow(on_line)
    assert lines == [b"hello", b"bye"]
    assert end.exit_code == 3
    child.signal_group(signal.SIGKILL)  # too late, and harmless


async def test_a_signal_is_counted_as_a_shell_does() -> None:
    child = python("import time; print('up', flush=True); time.sleep(600)")
    end = await child.follow(lambda line: child.signal_group(signal.SIGKILL))
    assert end.exit_code == 128 + signal.SIGKILL


async def test_a_stopped_child_can_be_killed() -> None:
    child = python("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    following = asyncio.create_task(child.follow(lambda line: None))
    child.ask_to_stop()
    await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert not following.done()
    child.signal_group(signal.SIGKILL)
    assert (await following).exit_code == 137


async def test_stderr_is_kept_bounded() -> None:
    end = await python("import sys; [print(n, 'x' * 5000, file=sys.stderr) for n in range(500)]; 1/0").follow(print)
    assert end.exit_code == 1
    assert len(end.stderr) == MAX_STDERR_LINES
    assert end.stderr[-1].startswith("ZeroDivisionError")
    assert max(map(len, end.stderr)) <= 1000


async def test_an_endless_line_is_dropped_and_the_next_one_read() -> None:
    lines: list[bytes] = []
    await python("print('x' * 1_000_000); print('after')").follow(lines.append)
    assert lines[-1] == b"after"
    assert max(map(len, lines)) <= 128 * 1024


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(0)"])
async def test_what_a_child_has_started_ends_with_it(then: str) -> None:
    child = python(SPAWNS_A_GRANDCHILD.format(then=then))
    lines: list[bytes] = []

    def on_line(line: bytes) -> None:
        lines.append(line)
        if len(lines) == 2 and "sleep" in then:
            os.kill(child.pid, signal.SIGKILL)  # the child alone, not its group

    await child.follow(on_line)
    await gone(next(int(line) for line in lines if line.isdigit()))


async def test_cancelling_kills_it() -> None:
    child = python(SPAWNS_A_GRANDCHILD.format(then="time.sleep(600)"))
    started = asyncio.Event()
    lines: list[bytes] = []

    def on_line(line: bytes) -> None:
        lines.append(line)
        started.set()

    following = asyncio.create_task(child.follow(on_line))
    await started.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    await gone(child.pid)


async def test_its_input_ends_when_the_parent_is_killed() -> None:
    parent = """
import asyncio, os, sys
from node.local_swarm.child_process import ChildProcess, SpawnedProcess
code = "import sys; print('up', flush=True); sys.stdin.read()"
child = ChildProcess(SpawnedProcess([sys.executable, "-c", code], os.environ))
asyncio.run(child.follow(lambda line: print(child.pid, flush=True)))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert runs(pid)
    process.kill()
    await process.wait()
    await gone(pid)


async def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(ResourceExhausted, match="cannot start"):
        SpawnedProcess(["/nonexistent/skipstone"], os.environ)
