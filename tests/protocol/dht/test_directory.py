"""The directory with real processes on loopback."""

import asyncio
import contextlib
import gc
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from protocol.dht.child import running_child, socket_parent
from protocol.dht.directory import DhtDirectory, DirectorySettings, LatestSequences, RelayTunnels
from protocol.dht.guards import node_id_of
from protocol.generated import dht_process_pb2
from protocol.identity.keys import Identity
from protocol.identity.signed_records import directory_key, encode_record
from protocol.interfaces.transport import Contact
from protocol.transport.settings import free_ports
from swarm.vocabulary.errors import ConfigError, Unreachable
from swarm.vocabulary.types import ModuleId, PeerState
from tests.kit.waiting import LONG_S, until
from tests.protocol.dht.running import MODULE, OTHER_RUN, RUN, Marked, announced, directory, needs_proc, publish
from tests.protocol.transport.link_peers import MIB, connected, digest_of, echo, sent, three

pytestmark = pytest.mark.e2e

FIRST = Identity.generate()
SECOND = Identity.generate()


async def found(looking: DhtDirectory, *modules: ModuleId) -> dict[str, int]:
    return {announcement.peer: announcement.sequence for announcement in await looking.look_up(modules)}


async def published_again(publishing: DhtDirectory, identity: Identity) -> int:
    while True:
        announcement = announced(identity)
        try:
            await publish(publishing, announcement)
        except Unreachable:
            await asyncio.sleep(0.05)
        else:
            return announcement.sequence


async def test_two_directories_see_each_other() -> None:
    async with directory(FIRST) as one, directory(SECOND, one) as two:
        ours, theirs = announced(FIRST), announced(SECOND, module=ModuleId(3, 1))
        visitor = announced(SECOND, module=None, state=PeerState.VISITING, sequence=theirs.sequence + 1)
        await publish(one, ours)
        await publish(two, theirs)
        assert (await one.look_up([ModuleId(3, 1)]), await two.look_up([MODULE])) == ([theirs], [ours])
        for wide in (True, False):
            assert await two.look_up([ModuleId(2)], wide=wide) == []
            newer = announced(FIRST, sequence=ours.sequence + 2 - wide)
            await publish(one, newer)
            assert await two.look_up([MODULE], wide=wide) == [newer], "the second one is stored without a search"
        await publish(two, visitor)
        assert await one.look_up([]) == [visitor]
        assert await one.look_up([ModuleId(3, 1)]) == [visitor], "a peer that moved is known by its newest record only"
        assert one.multiaddrs()[0].endswith(f"/p2p/{FIRST.peer}")


async def test_a_long_temporary_folder_is_not_used_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert socket_parent() == "/tmp"
    async with directory(FIRST) as one:
        assert one.multiaddrs()
        assert not list(deep.iterdir())
    monkeypatch.setattr("protocol.dht.child.MAX_SOCKET_BYTES", 49)
    with pytest.raises(ConfigError, match="unix sockets") as raised:
        socket_parent()
    assert "TMPDIR" in raised.value.hint


@pytest.mark.parametrize(("host", "kinds"), [("::1", {"ip6"}), ("::", {"ip4", "ip6"})])
async def test_it_listens_on_ip6_and_for_all_interfaces_on_both(host: str, kinds: set[str]) -> None:
    async with directory(FIRST, host=host, port=free_ports(host, host, 1)[0]) as one:
        assert {multiaddr.split("/")[1] for multiaddr in one.multiaddrs()} == kinds
        assert {multiaddr.split("/")[4] for multiaddr in one.multiaddrs()} == {str(one.port)}


async def test_a_client_need_not_listen_anywhere() -> None:
    async with directory(FIRST) as one, directory(SECOND, one, client=True, host="") as client:
        sequence = await published_again(client, SECOND)
        assert (await found(one, MODULE), client.multiaddrs()) == ({SECOND.peer: sequence}, [])
        assert client.port == 0


async def test_who_becomes_a_client_keeps_its_name_and_record_and_nothing_for_others() -> None:
    async with directory(FIRST) as one, directory(SECOND, one) as two:
        await publish(two, announced(SECOND, module=ModuleId(2)))
        before = two.multiaddrs()
        two.take_part(client=True)
        await until(lambda: two.restarts == 1 and two.process_id is not None)
        await published_again(one, FIRST)
        assert set(await found(one, ModuleId(2), MODULE)) == {FIRST.peer, SECOND.peer}
        assert two.multiaddrs() == before
        await until(lambda: one.situation.records == 2)
        assert two.situation.records == 0
        two.take_part(client=True)
        two.take_part(client=False)
        await until(lambda: two.restarts == 2)


async def test_whoever_starts_before_its_initial_peer_joins_when_that_comes(unused_port: int) -> None:
    late = f"/ip4/127.0.0.1/tcp/{unused_port}/p2p/{FIRST.peer}"
    async with directory(SECOND, initial_peers=(late,)) as early:
        with pytest.raises(Unreachable, match="no other node"):
            await publish(early, announced(SECOND))
        async with directory(FIRST, port=unused_port) as one:
            await published_again(early, SECOND)
            assert set(await found(one, MODULE)) == {SECOND.peer}


@needs_proc
async def test_a_killed_child_comes_back_with_its_name_and_our_record(marked: Marked) -> None:
    async with directory(FIRST) as one:
        announcement = announced(FIRST)
        await publish(one, announcement)
        before = one.multiaddrs()
        killed, daemons = one.process_id, marked.network_daemons()
        assert killed is not None
        assert len(daemons) == 1
        os.kill(killed, signal.SIGKILL)
        await until(lambda: one.process_id != killed)
        await until(lambda: one.process_id is not None)
        assert not daemons & marked.network_daemons(), "the dead child's p2pd must be gone"
        assert one.multiaddrs() == before, "same peer id, same port"
        assert one.restarts == 1
        async with asyncio.timeout(10):
            while await one.look_up([MODULE]) != [announcement]:
                await asyncio.sleep(0.05)
    assert marked.processes() == {}


@needs_proc
async def test_without_a_child_callers_are_told(marked: Marked) -> None:
    async with directory(FIRST) as one:
        assert one.process_id is not None
        os.kill(one.process_id, signal.SIGKILL)
        await until(lambda: one.process_id is None)
        with pytest.raises(Unreachable, match="restarted"):
            await one.look_up([MODULE])
        with pytest.raises(Unreachable, match="restarted"):
            await publish(one, announced(FIRST))
    # A child that is killed in the middle of its start takes its daemon along only a moment later.
    await until(lambda: marked.processes() == {})


@needs_proc
async def test_a_dead_network_daemon_is_replaced(marked: Marked) -> None:
    async with directory(FIRST) as one:
        os.kill(marked.network_daemons().pop(), signal.SIGKILL)
        await until(lambda: one.restarts == 1)
        await publish(one, announced(FIRST))
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
    assert (await node.stdout.readline(), len(marked.processes())) == (b"up\n", 3)
    node.kill()
    await node.wait()
    await until(lambda: marked.processes() == {})
    os.rmdir(folder)  # fails when something is left in it


@needs_proc
@pytest.mark.parametrize("patience_s", [0.0, 0.03, 0.2])
async def test_a_failed_start_is_clean(marked: Marked, patience_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp()  # short, see above
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(patience_s), directory(FIRST):
            await asyncio.sleep(60)
    await until(lambda: marked.processes() == {})  # a killed child takes its daemon along only a moment later
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


def test_what_was_replaced_does_not_come_back_before_the_newer_record_has_run_out() -> None:
    sequences = LatestSequences(limit=2)
    new, old = announced(FIRST, sequence=2_000), announced(FIRST, sequence=1_000)
    now = new.expires_at - 60
    assert sequences.is_current(new, now)
    assert not sequences.is_current(old, now)
    assert sequences.is_current(new, now)
    for identity in (SECOND, Identity.generate()):
        assert sequences.is_current(announced(identity), now)
    assert sequences.is_current(old, now), "only so many peers are remembered"
    sequences = LatestSequences()
    assert sequences.is_current(new, now)
    assert not sequences.is_current(old, new.expires_at - 1)
    assert sequences.is_current(old, new.expires_at), "it began with a clock far ahead, and has started again"


def test_a_name_to_listen_on_is_refused() -> None:
    with pytest.raises(ConfigError):
        DirectorySettings("localhost")


OWNER = Identity.generate()
NEIGHBOUR = Identity.generate()
KEY = directory_key(RUN, MODULE)


@dataclass(frozen=True)
class Stranger:
    stub: Any

    async def stores(
        self, value: bytes, expires_at: float, *, subkey: bytes, key: str = KEY, in_cache: bool = False
    ) -> bool:
        place = {"keys": [bytes(DHTID.generate(key))], "subkeys": [subkey], "in_cache": [in_cache]}
        request = dht_pb2.StoreRequest(values=[value], expiration_time=[expires_at], **place)
        try:
            return list((await self.stub.rpc_store(request, timeout=10)).store_ok) == [True]
        except P2PHandlerError:
            return False

    async def replays(self, record: bytes, expires_at: float, *, owner: Identity = OWNER, **where: Any) -> bool:
        subkey = MSGPackSerializer.dumps(str(owner.peer))
        return await self.stores(MSGPackSerializer.dumps(record), expires_at, subkey=subkey, **where)


@contextlib.asynccontextmanager
async def network_to(target: DhtDirectory, folder: Path) -> AsyncIterator[P2P]:
    key = folder / "stranger"
    key.write_bytes(Identity.generate().libp2p_private_key())
    switched_off = dict.fromkeys(("check_if_identity_free", "use_relay", "auto_nat", "nat_port_map"), False)
    p2p = await P2P.create(initial_peers=target.multiaddrs(), identity_path=str(key), **switched_off)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


@contextlib.asynccontextmanager
async def stranger_to(target: DhtDirectory, folder: Path) -> AsyncIterator[Stranger]:
    async with network_to(target, folder) as p2p:
        peer = (await p2p.list_peers())[0].peer_id
        DHTProtocol._collect_rpc_handlers()
        yield Stranger(super(DHTProtocol, DHTProtocol).get_stub(p2p, peer))


async def test_only_honest_records_are_kept(tmp_path: Path) -> None:
    async with directory(NEIGHBOUR) as target, stranger_to(target, tmp_path) as stranger:
        announcement = announced(OWNER)
        record, expires_at = encode_record(announcement, OWNER), announcement.expires_at
        assert await stranger.replays(record, expires_at), "whoever brings an honest record is welcome"
        old = announced(OWNER, sequence=announcement.sequence - 5000, expires_at=expires_at - 5)
        foreign = announced(OWNER, run=OTHER_RUN)
        for refused in (
            stranger.replays(record, math.inf),
            stranger.replays(record, expires_at + 1),
            stranger.replays(b"x" * 3000, expires_at + 1),
            stranger.replays(record[:-1] + b"!", expires_at),
            stranger.replays(record, expires_at, owner=NEIGHBOUR),
            stranger.replays(encode_record(old, OWNER), old.expires_at),
            stranger.replays(record, expires_at, key="body1.0."),
            stranger.replays(encode_record(foreign, OWNER), foreign.expires_at, key=directory_key(OTHER_RUN, MODULE)),
            stranger.replays(record, expires_at, in_cache=True),
            stranger.stores(MSGPackSerializer.dumps(record), expires_at + 1, subkey=MSGPackSerializer.dumps(None)),
        ):
            assert not await refused
        assert await target.look_up([MODULE]) == [announcement]
        await until(lambda: target.situation.records == 1)


async def test_a_dictionary_of_good_and_bad_loses_the_bad_only(tmp_path: Path) -> None:
    async with directory(NEIGHBOUR) as target, stranger_to(target, tmp_path) as stranger:
        announcement = announced(OWNER)
        dictionary, record = DictionaryDHTValue(), MSGPackSerializer.dumps(encode_record(announcement, OWNER))
        dictionary.store(str(OWNER.peer), record, announcement.expires_at)
        dictionary.store("junk", b"junk", math.inf)
        await stranger.stores(MSGPackSerializer.dumps(dictionary), math.inf, subkey=b"")
        assert await target.look_up([MODULE]) == [announcement]
        assert not await stranger.stores(b"\xc0" * (2 * 2**20), math.inf, subkey=b"")


async def test_nested_extensions_do_not_end_the_process(tmp_path: Path) -> None:
    async with directory(NEIGHBOUR) as target, stranger_to(target, tmp_path) as stranger:
        process, nested = target.process_id, b"\xc0"
        for _ in range(400):
            nested = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + nested))
        assert not await stranger.stores(nested, time.time() + 60, subkey=DHTProtocol.IS_DICTIONARY)
        await publish(target, announced(NEIGHBOUR))
        assert len(await target.look_up([MODULE])) == 1
        assert (target.process_id, target.restarts) == (process, 0)


async def test_a_lying_node_hides_nobody(tmp_path: Path) -> None:
    honest, other = announced(OWNER), announced(NEIGHBOUR)
    async with directory(OWNER) as keeper, directory(NEIGHBOUR, keeper) as looker, network_to(keeper, tmp_path) as p2p:
        await publish(keeper, honest)
        liar = await DHTNode.create(
            p2p=p2p, node_id=node_id_of(p2p.peer_id), initial_peers=[*keeper.multiaddrs(), *looker.multiaddrs()]
        )
        lie = DictionaryDHTValue()
        with lie.freeze():
            lie.store(str(NEIGHBOUR.peer), MSGPackSerializer.dumps(encode_record(other, NEIGHBOUR)), other.expires_at)
            lie.store("junk", b"junk", math.inf)
        liar.protocol.storage.data[DHTID.generate(KEY)] = ValueWithExpiration(lie, math.inf)
        await until(lambda: looker.situation.peers == 2)
        for _ in range(5):
            found = {announcement.peer for announcement in await looker.look_up([MODULE])}
            assert found == {OWNER.peer, NEIGHBOUR.peer}, "the liar's one good record, and what it wanted to hide"
        await liar.shutdown()


@needs_proc
async def test_who_is_cancelled_twice_while_it_starts_leaves_nothing(marked: Marked) -> None:
    """The second one comes when a group of tasks around it ends."""

    async def start() -> None:
        async with running_child(dht_process_pb2.DhtStart(timeout_s=10.0), Identity.generate()):
            await asyncio.sleep(3600)

    for turns in range(1, 12):
        starting = asyncio.create_task(start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert marked.processes() == {}
    gc.collect()


async def test_the_bytes_of_the_hour_end_the_tunnel_and_then_none_is_opened() -> None:
    async with three(echo, bytes_per_hour=16 * MIB) as peers:
        async with connected(await peers.tunnels.way_to(peers.contact)) as (reader, writer):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                # A pair has a quarter, half of that at once: 2 MiB, the echo counted.
                await asyncio.gather(sent(writer, bytes(8 * MIB)), digest_of(reader, 8 * MIB))
        await until(lambda: peers.relaying.situation.relay.cut_off == 1)
        assert MIB < peers.relaying.situation.relay.carried_bytes <= 2 * MIB
        with pytest.raises(Unreachable, match="had their share"):
            await peers.tunnels.way_to(peers.contact)


async def way_after_backoff(tunnels: RelayTunnels, contact: Contact) -> str:
    """For some seconds after it has failed to dial somebody, libp2p does not try again and says so."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                return await tunnels.way_to(contact)
            except Unreachable as error:
                if "dial backoff" not in str(error):
                    raise
            await asyncio.sleep(0.1)


@needs_proc
async def test_when_the_relay_dies_the_tunnel_ends_and_the_next_one_says_why(marked: Marked) -> None:
    async with three(echo) as peers:
        killed = peers.relaying.process_id
        assert killed is not None
        async with connected(await peers.tunnels.way_to(peers.contact)) as (reader, writer):
            await sent(writer, b"x")
            assert await reader.readexactly(1) == b"x"
            os.kill(killed, signal.SIGSTOP)  # so that nobody starts it again before the assertions below
            os.kill(marked.network_daemon_of(killed), signal.SIGKILL)
            assert await reader.read() == b"", "the tunnel has to end, not to hang"
        with pytest.raises(Unreachable, match="no tunnel"):
            await peers.tunnels.way_to(peers.contact)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: peers.relaying.process_id not in (None, killed))
        await until(lambda: peers.relaying.situation.relay.attached == 1)
        async with connected(await way_after_backoff(peers.tunnels, peers.contact)) as (reader, writer):
            await sent(writer, b"y")
            assert await reader.readexactly(1) == b"y", "the attachment has to be made again"
    assert marked.processes() == {}


@needs_proc
async def test_attachments_and_what_was_given_survive_the_end_of_a_child() -> None:
    async with three(echo) as peers:
        async with connected(await peers.tunnels.way_to(peers.contact)) as (reader, writer):
            await sent(writer, bytes(MIB))
            await digest_of(reader, MIB)
        await until(lambda: peers.relaying.situation.relay.carried_bytes == 2 * MIB)
        left = peers.relaying.situation.relay.left_bytes
        for each in (peers.relaying, peers.far):
            restarts, process = each.restarts, each.process_id
            assert process is not None
            os.kill(process, signal.SIGKILL)
            await until(lambda each=each, restarts=restarts: each.restarts > restarts)  # type: ignore[misc]
        await until(lambda: peers.relaying.situation.relay.attached == 1)
        await until(lambda: [each.standing for each in peers.far_tunnels.attachments()] == [True])
        after = peers.relaying.situation.relay
        assert (after.carried_bytes, after.opened) == (2 * MIB, 1)
        assert after.left_bytes <= left + 10 * MIB, "a death must not refill the hour"


async def test_who_is_no_relay_or_has_nobody_attached_is_said() -> None:
    async with three(echo) as peers:
        relay_of = {peers.contact.via[0]: peers.far.multiaddrs()[0]}.__getitem__
        with pytest.raises(Unreachable, match="no stream to the relay"):
            await RelayTunnels(peers.near, relay_of).way_to(peers.contact)
        with pytest.raises(Unreachable, match="no known relay"):
            await RelayTunnels(peers.near, lambda peer: "").way_to(peers.contact)
        with pytest.raises(Unreachable, match="is not of the form"):
            await RelayTunnels(peers.near, lambda peer: "/unix/tmp/x/p2p/Qm").way_to(peers.contact)
        await peers.far_tunnels.attach([], "")
        await until(lambda: peers.relaying.situation.relay.attached == 0)
        with pytest.raises(Unreachable, match="not attached here"):
            await peers.tunnels.way_to(peers.contact)
