"""A real directory against a stranger who speaks hivemind's protocol and does not keep its manners."""

from __future__ import annotations

import contextlib
import math
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

from protocol.dht.directory import DhtDirectory
from protocol.dht.guards import node_id_of
from protocol.identity.keys import Identity
from protocol.identity.signed_records import directory_key, encode_record
from tests.protocol.announcements import MODULE, OTHER_RUN, RUN, announced
from tests.protocol.dht.running import directory, until

pytestmark = pytest.mark.e2e

OWNER = Identity.generate()
NEIGHBOUR = Identity.generate()
KEY = directory_key(RUN, MODULE)


@dataclass(frozen=True)
class Stranger:
    """Sends what it likes to one directory."""

    stub: Any

    async def stores(
        self, value: bytes, expires_at: float, *, subkey: bytes, key: str = KEY, in_cache: bool = False
    ) -> bool:
        """Whether the other side said that it took it."""
        request = dht_pb2.StoreRequest(
            keys=[bytes(DHTID.generate(key))],
            subkeys=[subkey],
            values=[value],
            expiration_time=[expires_at],
            in_cache=[in_cache],
        )
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
    p2p = await P2P.create(
        initial_peers=target.multiaddrs(),
        identity_path=str(key),
        check_if_identity_free=False,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )
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


def nested(levels: int) -> bytes:
    packed = b"\xc0"
    for _ in range(levels):
        packed = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + packed))
    return packed


async def test_only_honest_records_are_kept(tmp_path: Path) -> None:
    async with directory(NEIGHBOUR) as target, stranger_to(target, tmp_path) as stranger:
        announcement = announced(OWNER)
        record, expires_at = encode_record(announcement, OWNER), announcement.expires_at
        assert await stranger.replays(record, expires_at), "whoever brings an honest record is welcome"
        old = announced(OWNER, sequence=announcement.sequence - 5000, expires_at=expires_at - 5)
        foreign = announced(OWNER, run=OTHER_RUN)
        packed = MSGPackSerializer.dumps(record)
        for refused in (
            stranger.replays(record, math.inf),
            stranger.replays(record, math.nan),
            stranger.replays(record, time.time() + 31_536_000),
            stranger.replays(record, expires_at + 1),
            stranger.replays(b"x" * 3000, expires_at + 1),
            stranger.replays(record[:-1] + b"!", expires_at),
            stranger.replays(record, expires_at, owner=NEIGHBOUR),
            stranger.replays(encode_record(old, OWNER), old.expires_at),
            stranger.replays(record, expires_at, key=directory_key(RUN, None)),
            stranger.replays(record, expires_at, key="body1.0."),
            stranger.replays(encode_record(foreign, OWNER), foreign.expires_at, key=directory_key(OTHER_RUN, MODULE)),
            stranger.replays(record, expires_at, in_cache=True),
            stranger.stores(packed, expires_at + 1, subkey=MSGPackSerializer.dumps(None)),
        ):
            assert not await refused
        assert await target.look_up([MODULE]) == [announcement]
        await until(lambda: target.statistics.records == 1)


async def test_a_dictionary_of_good_and_bad_loses_the_bad_only(tmp_path: Path) -> None:
    async with directory(NEIGHBOUR) as target, stranger_to(target, tmp_path) as stranger:
        announcement = announced(OWNER)
        dictionary = DictionaryDHTValue()
        dictionary.store(
            str(OWNER.peer), MSGPackSerializer.dumps(encode_record(announcement, OWNER)), announcement.expires_at
        )
        dictionary.store("junk", b"junk", math.inf)
        await stranger.stores(MSGPackSerializer.dumps(dictionary), math.inf, subkey=b"")
        assert await target.look_up([MODULE]) == [announcement]
        assert not await stranger.stores(b"\xc0" * (2 * 2**20), math.inf, subkey=b"")


async def test_nested_extensions_do_not_end_the_process(tmp_path: Path) -> None:
    async with directory(NEIGHBOUR) as target, stranger_to(target, tmp_path) as stranger:
        process = target.process_id
        assert not await stranger.stores(nested(400), time.time() + 60, subkey=DHTProtocol.IS_DICTIONARY)
        await target.publish(announced(NEIGHBOUR))
        assert len(await target.look_up([MODULE])) == 1
        assert (target.process_id, target.statistics.restarts) == (process, 0)


async def test_a_lying_node_hides_nobody(tmp_path: Path) -> None:
    honest, other = announced(OWNER), announced(NEIGHBOUR)
    async with directory(OWNER) as keeper, directory(NEIGHBOUR, keeper) as looker, network_to(keeper, tmp_path) as p2p:
        await keeper.publish(honest)
        liar = await DHTNode.create(
            p2p=p2p, node_id=node_id_of(p2p.peer_id), initial_peers=[*keeper.multiaddrs(), *looker.multiaddrs()]
        )
        lie = DictionaryDHTValue()
        with lie.freeze():
            lie.store(str(NEIGHBOUR.peer), MSGPackSerializer.dumps(encode_record(other, NEIGHBOUR)), other.expires_at)
            lie.store("junk", b"junk", math.inf)
        liar.protocol.storage.data[DHTID.generate(KEY)] = ValueWithExpiration(lie, math.inf)
        await until(lambda: looker.statistics.peers == 2)
        for _ in range(5):
            found = {announcement.peer for announcement in await looker.look_up([MODULE])}
            assert found == {OWNER.peer, NEIGHBOUR.peer}, "the liar's one good record, and what it wanted to hide"
        await liar.shutdown()
