"""Nodes that are forked: started, told of, killed and let go as those that are spawned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.local_swarm.child_process import ChildEnd, ChildProcess
from node.local_swarm.forked_nodes import ForkServer, may_fork
from node.local_swarm.setup import node_command
from protocol.libp2p.child_process import with_packages
from tests.node.local_swarm.test_local_swarm import gone

pytestmark = pytest.mark.skipif(not may_fork(node_command()), reason="nodes are forked on Linux only")

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def waiting(tmp_path: Path) -> list[str]:
    os.mkfifo(tmp_path / "instance.json")
    return ["simulate", "--instance", str(tmp_path / "instance.json")]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(with_packages(os.environ, str(ROOT), OMP_NUM_THREADS="1"))
    yield server
    server.close()


async def forked(server: ForkServer, *arguments: str) -> ChildProcess:
    process = await server.start(arguments)
    assert process is not None
    return ChildProcess(process)


async def run(server: ForkServer, *arguments: str) -> tuple[ChildEnd, list[bytes]]:
    said: list[bytes] = []
    child = await forked(server, *arguments)
    return await child.follow(said.append), said


async def test_it_does_what_the_command_does_and_ends_with_its_exit_code(server: ForkServer) -> None:
    well, wrong = await asyncio.gather(run(server, "version"), run(server, "no-such-command"))
    assert well[0].exit_code == 0
    assert well[1][0].startswith(b"skipstone ")
    assert wrong[0].exit_code == 2
    assert any("no-such-command" in line for line in wrong[0].stderr)


async def test_it_leads_a_group_and_holds_its_own_descriptors_only(server: ForkServer, waiting: list[str]) -> None:
    first, second = await forked(server, *waiting), await forked(server, *waiting)
    async with asyncio.TaskGroup() as tasks:
        ends = [tasks.create_task(child.follow(lambda _: None)) for child in (first, second)]
        for child in (first, second):
            assert os.getpgid(child.pid) == child.pid
        async with asyncio.timeout(30):  # its streams, and nothing of the server's or of the other's
            while len(shared(second.pid)) > 3:
                await asyncio.sleep(0.02)
        first.signal_group(signal.SIGKILL)
        second.terminate()
    assert [end.result().exit_code for end in ends] == [128 + signal.SIGKILL, 128 + signal.SIGTERM]
    await gone(first.pid)
    await gone(second.pid)


async def test_a_server_that_is_killed_ends_its_nodes_for_whoever_follows_them(
    server: ForkServer, waiting: list[str]
) -> None:
    """The last of this module: it ends the server that the tests share."""
    child = await forked(server, *waiting)
    following = asyncio.create_task(child.follow(lambda _: None))
    server.close()
    assert (await following).exit_code == 128 + signal.SIGKILL
    await gone(child.pid)
    assert await server.start(["version"]) is None


def shared(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {target for target in found if target.startswith(("socket:", "pipe:"))}
