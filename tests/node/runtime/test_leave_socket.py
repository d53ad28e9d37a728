"""One node for each identity on a machine, and a door to it that nobody without the secret can keep shut."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.concurrency.task_groups import unless
from node.runtime import leave_socket as leave
from node.runtime.leave_socket import ask_to_leave, endpoint_path, leave_requests, sole_use
from node.runtime.serving import hand_over
from protocol.identity.keys import Identity
from swarm.vocabulary.errors import IdentityError

HOLDER = """
import asyncio, sys
from pathlib import Path
from node.runtime.leave_socket import leave_requests, sole_use

async def main():
    path = Path(sys.argv[1])
    async with sole_use(path), leave_requests(path, lambda: None):
        print("held", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    Identity.create(tmp_path / "identity.key")
    return tmp_path / "identity.key"


async def test_a_second_node_with_the_key_is_told_who_has_it(key: Path) -> None:
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, str(key), stdout=subprocess.PIPE)
    assert await holder.stdout.readline() == b"held\n"
    with pytest.raises(IdentityError, match=rf"another node \(process {holder.pid}\).*{key}") as told:
        async with sole_use(key):
            pytest.fail("two nodes have one key")
    assert told.value.exit_code == 78
    assert Identity.load(key).peer, "commands that only read it are not kept out"
    holder.kill()
    async with sole_use(key):  # the kernel frees it
        pass
    await holder.wait()


async def test_connections_that_say_nothing_do_not_keep_the_owner_out(key: Path) -> None:
    asked = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        async with leave_requests(key, asked.set):
            port = json.loads(endpoint_path(key).read_text())["port"]
            idle = [await asyncio.open_connection(leave.LOOPBACK, port) for _ in range(2 * leave.MAX_CONVERSATIONS)]
            leaving = tasks.create_task(ask_to_leave(key, 10.0))
            await asked.wait()
        await leaving
    for _, writer in idle:
        writer.close()


async def test_who_says_nothing_is_not_listened_to_for_ever(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "LISTEN_S", 0.01)
    async with leave_requests(key, lambda: pytest.fail("nobody has asked")):
        reader, writer = await asyncio.open_connection(
            leave.LOOPBACK, json.loads(endpoint_path(key).read_text())["port"]
        )
        async with asyncio.timeout(10):
            assert await reader.read(1) == b""
        writer.close()


async def test_who_has_asked_waits_as_long_as_it_takes(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "LISTEN_S", 0.01)
    asked = asyncio.Event()
    async with leave_requests(key, asked.set):
        leaving = asyncio.create_task(ask_to_leave(key, 10.0))
        await asked.wait()
        await asyncio.wait((leaving,), timeout=0.05)
        assert not leaving.done(), "the node is still there"
    await leaving
    assert not os.path.lexists(endpoint_path(key))


async def test_a_handover_is_waited_for_and_given_up_if_it_takes_too_long(caplog: pytest.LogCaptureFixture) -> None:
    done, cancelled = asyncio.Event(), asyncio.Event()

    async def finish() -> None:
        await asyncio.sleep(0)
        done.set()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await hand_over(finish, 60.0)
    assert done.is_set()
    await hand_over(endless, 0.01)
    assert cancelled.is_set()
    assert "gave up" in caplog.text


async def test_what_is_wanted_comes_unless_the_stop_comes_first() -> None:
    async def five() -> int:
        return 5

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    stop = asyncio.Event()
    assert await unless(stop, five()) == 5
    stop.set()
    assert await unless(stop, never()) is None
