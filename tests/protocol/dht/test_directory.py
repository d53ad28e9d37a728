"""The directory with real processes on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from protocol.dht.directory import DhtDirectory, DirectorySettings, LatestSequences
from protocol.identity.keys import Identity
from swarm.vocabulary.errors import ConfigError, Unreachable
from swarm.vocabulary.types import ModuleId, PeerState
from tests.protocol.announcements import MODULE, announced
from tests.protocol.dht.running import Marked, directory, needs_proc, until

pytestmark = pytest.mark.e2e

FIRST = Identity.generate()
SECOND = Identity.generate()


async def found(looking: DhtDirectory, *modules: ModuleId) -> dict[str, int]:
    return {announcement.peer: announcement.sequence for announcement in await looking.look_up(modules)}


async def published_again(publishing: DhtDirectory, identity: Identity) -> int:
    """Publishes as a node does: again when told to."""
    while True:
        announcement = announced(identity)
        try:
            await publishing.publish(announcement)
        except Unreachable:
            await asyncio.sleep(0.05)
        else:
            return announcement.sequence


async def test_two_directories_see_each_other() -> None:
    async with directory(FIRST) as one, directory(SECOND, one) as two:
        ours, theirs = announced(FIRST), announced(SECOND, module=ModuleId(3, 1))
        visitor = announced(SECOND, module=None, state=PeerState.VISITING, sequence=theirs.sequence + 1)
        await one.publish(ours)
        await two.publish(theirs)
        assert await one.look_up([ModuleId(3, 1)]) == [theirs]
        assert await two.look_up([MODULE]) == [ours]
        assert await two.look_up([ModuleId(2)]) == []
        await two.publish(visitor)
        assert await one.look_up([]) == [visitor]
        assert await one.look_up([ModuleId(3, 1)]) == [visitor], "a peer that moved is known by its newest record only"
        assert one.multiaddrs()[0].endswith(f"/p2p/{FIRST.peer}")


async def test_a_client_need_not_listen_anywhere() -> None:
    async with directory(FIRST) as one, directory(SECOND, one, client=True, host="") as client:
        sequence = await published_again(client, SECOND)
        assert await found(one, MODULE) == {SECOND.peer: sequence}
        assert client.multiaddrs() == []
        assert client.port == 0


async def test_a_client_stores_with_others_only() -> None:
    async with directory(FIRST) as one, directory(SECOND, one, client=True) as client:
        await client.publish(announced(SECOND))
        assert set(await found(one, MODULE)) == {SECOND.peer}


async def test_who_becomes_a_client_keeps_its_name_and_record_and_nothing_for_others() -> None:
    async with directory(FIRST) as one, directory(SECOND, one) as two:
        await two.publish(announced(SECOND, module=ModuleId(2)))
        before = two.multiaddrs()
        two.take_part(client=True)
        await until(lambda: two.statistics.restarts == 1 and two.statistics.running)
        await published_again(one, FIRST)
        assert set(await found(one, ModuleId(2), MODULE)) == {FIRST.peer, SECOND.peer}
        assert two.multiaddrs() == before
        await until(lambda: one.statistics.records == 2)
        assert two.statistics.records == 0
        two.take_part(client=True)
        two.take_part(client=False)
        await until(lambda: two.statistics.restarts == 2)


async def test_whoever_starts_before_its_initial_peer_joins_when_that_comes(unused_port: int) -> None:
    late = f"/ip4/127.0.0.1/tcp/{unused_port}/p2p/{FIRST.peer}"
    async with directory(SECOND, initial_peers=(late,)) as early:
        with pytest.raises(Unreachable, match="no other node"):
            await early.publish(announced(SECOND))
        async with directory(FIRST, port=unused_port) as one:
            await published_again(early, SECOND)
            assert set(await found(one, MODULE)) == {SECOND.peer}


@needs_proc
async def test_a_killed_child_comes_back_with_its_name_and_our_record(marked: Marked) -> None:
    async with directory(FIRST) as one:
        announcement = announced(FIRST)
        await one.publish(announcement)
        before = one.multiaddrs()
        killed, daemons = one.process_id, marked.network_daemons()
        assert killed is not None
        assert len(daemons) == 1
        os.kill(killed, signal.SIGKILL)
        await until(lambda: one.process_id != killed)
        await until(lambda: one.process_id is not None)
        assert not daemons & marked.network_daemons(), "the dead child's p2pd must be gone"
        assert one.multiaddrs() == before, "same peer id, same port"
        assert one.statistics.restarts == 1
        async with asyncio.timeout(10):
            while await one.look_up([MODULE]) != [announcement]:
                await asyncio.sleep(0.05)
    assert marked.processes() == {}


@needs_proc
async def test_without_a_child_callers_are_told(marked: Marked) -> None:
    async with directory(FIRST) as one:
        assert one.process_id is not None
        os.kill(one.process_id, signal.SIGKILL)
        await until(lambda: not one.statistics.running)
        with pytest.raises(Unreachable, match="restarted"):
            await one.look_up([MODULE])
        with pytest.raises(Unreachable, match="restarted"):
            await one.publish(announced(FIRST))
    assert marked.processes() == {}, "leaving in the middle of a restart leaves nothing either"


@needs_proc
async def test_a_dead_network_daemon_is_replaced(marked: Marked) -> None:
    async with directory(FIRST) as one:
        daemons = marked.network_daemons()
        os.kill(daemons.pop(), signal.SIGKILL)
        await until(lambda: one.statistics.restarts == 1)
        await one.publish(announced(FIRST))
    assert marked.processes() == {}


@needs_proc
async def test_a_killed_node_takes_the_dht_with_it(marked: Marked) -> None:
    folder = tempfile.mkdtemp()  # short: the names of Unix sockets must fit into 107 bytes
    node = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import asyncio\n"
        "from protocol.identity.keys import Identity\n"
        "from tests.protocol.dht.running import directory\n"
        "async def main():\n"
        "    async with directory(Identity.generate()):\n"
        "        print('up', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n",
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TMPDIR": folder},
        stdout=asyncio.subprocess.PIPE,
    )
    assert node.stdout is not None
    assert await node.stdout.readline() == b"up\n"
    assert len(marked.processes()) == 3
    node.kill()
    await node.wait()
    await until(lambda: marked.processes() == {})
    os.rmdir(folder)  # fails when something is left in it


@needs_proc
@pytest.mark.parametrize("patience_s", [0.0, 0.03, 0.15, 0.3])
async def test_a_start_given_up_half_way_leaves_nothing(
    marked: Marked, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tempfile.mkdtemp()  # short, see above
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(patience_s), directory(FIRST):
            await asyncio.sleep(60)
    assert marked.processes() == {}
    os.rmdir(folder)  # likewise


@needs_proc
async def test_a_taken_port_is_said(marked: Marked) -> None:
    async with directory(FIRST) as one:
        port = int(one.multiaddrs()[0].split("/")[4])
        with pytest.raises(ConfigError, match=f"port {port}"):
            async with directory(SECOND, port=port):
                pass
    assert marked.processes() == {}


async def test_the_callers_error_arrives_as_it_is() -> None:
    with pytest.raises(KeyError, match="ours"):
        async with directory(FIRST):
            raise KeyError("ours")


def test_what_was_replaced_does_not_come_back() -> None:
    sequences = LatestSequences(limit=2)
    new, old = announced(FIRST, sequence=2_000), announced(FIRST, sequence=1_000)
    now = new.expires_at - 60
    assert sequences.is_current(new, now)
    assert not sequences.is_current(old, now)
    assert sequences.is_current(new, now)
    for identity in (SECOND, Identity.generate()):
        assert sequences.is_current(announced(identity), now)
    assert sequences.is_current(old, now), "only so many peers are remembered"


def test_who_began_with_a_clock_far_ahead_and_starts_again_is_heard_when_the_old_record_has_run_out() -> None:
    sequences = LatestSequences()
    ahead, right = announced(FIRST, sequence=2_000), announced(FIRST, sequence=1_000)
    assert sequences.is_current(ahead, ahead.expires_at - 60)
    assert not sequences.is_current(right, ahead.expires_at - 1)
    assert sequences.is_current(right, ahead.expires_at)


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "localhost"},
        {"initial_peers": ("/ip4/127.0.0.1/tcp/4001",)},
        {"initial_peers": ("/ip4/1.2.3.4/tcp/1/p2p/a,/ip4/1.2.3.4",)},
        {"port": 70_000},
        {"experts": ()},
        {"experts": (1, 0)},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        DirectorySettings(**settings)
