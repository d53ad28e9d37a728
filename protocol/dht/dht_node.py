"""One node of the swarm's DHT. Imports hivemind, so only the DHT's process imports this module."""

import asyncio
import contextlib
import logging
import random
import time
from typing import Any

import hivemind.dht.node
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from protocol.dht import guards
from protocol.dht.guards import MAX_NEAREST
from protocol.generated import dht_process_pb2
from protocol.identity.signed_records import MAX_LIFETIME_S
from protocol.libp2p.daemon import any_answers, start_daemon
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import RunId

log = logging.getLogger(__name__)

FIRST_JOIN_PATIENCE_S = 2.0  # Joining continues in the background
MISSING_RETRY_S = (0.2, 5.0)  # First and longest pause between attempts to reach missing initial peers
MISSING_PATIENCE_S = 120.0  # After this time missing initial peers are retried every REFRESH_S
REFRESH_S = 60.0
NEAREST = 5  # Nodes that store a record


class DhtService:
    """DHT node of this process. Run `stay_joined` and `daemon_ended` as tasks between `start` and `stop`."""

    def __init__(self, node: DHTNode, initial_peers: dict[PeerID, list[Multiaddr]], *, client: bool) -> None:
        self._node, self._initial_peers, self._client = node, initial_peers, client
        self._tried = asyncio.Event()

    @classmethod
    async def start(cls, start: dht_process_pb2.DhtStart) -> "DhtService":
        """Starts p2pd and the DHT node. Raises as `start_daemon`, and ValueError for a malformed initial peer."""
        initial_peers = _by_peer(start.initial_peers, own=start.peer)
        guards.guard_serializer()
        daemon = await start_daemon(start)
        try:
            node = await _guarded_node(daemon, start)
        except BaseException:
            await daemon.shutdown()
            raise
        return cls(node, initial_peers, client=start.client)

    @property
    def daemon(self) -> P2P:
        return self._node.p2p

    async def stop(self) -> None:
        if self._node.p2p._child.returncode is None:
            await self._node.shutdown()
        await self._node.p2p.shutdown()

    async def daemon_ended(self) -> int:
        """Waits until p2pd (libp2p's daemon), this node's only access to the network, ends. Returns its exit code."""
        return int(await self._node.p2p._child.wait())

    async def stay_joined(self) -> None:
        """Retries unreachable initial peers with growing pauses, and periodically looks up the nearest DHT nodes."""
        # The peers of a swarm may start in any order, and a partitioned DHT must merge again.
        pause_s, longest_s = MISSING_RETRY_S
        began = time.monotonic()
        while True:
            missing = await self._join()
            self._tried.set()
            if self._peers_known() and (not missing or time.monotonic() - began > MISSING_PATIENCE_S):
                pause_s = MISSING_RETRY_S[0]
                await asyncio.sleep(REFRESH_S * random.uniform(0.75, 1.25))  # noqa: S311
            else:
                await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311
                pause_s = min(longest_s, pause_s * 2)

    async def first_join(self) -> None:
        """Waits until all initial peers have been tried once, at most FIRST_JOIN_PATIENCE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_JOIN_PATIENCE_S):
                await self._tried.wait()

    async def store(self, request: dht_process_pb2.DhtStore) -> None:
        """Stores our record at the nodes nearest to its key. Raises Unreachable if no other node accepts it."""
        # Look-ups keep the routing table right about our key. A search would ask every node near it.
        protocol, key, value = self._node.protocol, DHTID.generate(request.key), MSGPackSerializer.dumps(request.record)
        nearest = protocol.routing_table.get_nearest_neighbors(key, NEAREST)
        record = ([key], [value], request.expires_at, [request.owner])
        answers = await asyncio.gather(*(protocol.call_store(peer, *record) for _, peer in nearest))
        kept = not self._client and protocol.storage.store(key, value, request.expires_at, subkey=request.owner)
        if not kept and not any(answer and all(answer) for answer in answers):
            raise Unreachable("no node of the DHT accepted the record")
        if self._initial_peers and not self._peers_known():
            raise Unreachable("no other node of the DHT is reachable; only this node has the record")

    async def find(self, keys: list[str], *, wide: bool) -> list[bytes]:
        """Looks records up: if `wide`, at all nodes near each key, so that no single node can hide a record."""
        if not wide:
            found = await asyncio.gather(*(self._find_at_one(DHTID.generate(key)) for key in keys))
            return [record for records in found for record in records]
        answers = await self._node.get_many(keys, sufficient_expiration_time=float("inf"))
        dictionaries = [answer.value for answer in answers.values() if answer is not None]
        return [item.value for dictionary in dictionaries for item in dictionary.values()]

    async def _find_at_one(self, key: Any) -> list[bytes]:
        """Looks a key's records up at a random one of the nodes that store them."""
        protocol = self._node.protocol
        known = dict(protocol.routing_table.get_nearest_neighbors(key, NEAREST))
        packed = [kept.value for kept in protocol.storage.of_key(key).values()]
        asked, answered = {self._node.node_id}, None
        while len(asked) <= 2 * NEAREST:
            nearest = sorted(known.keys() - asked | ({answered} & known.keys()), key=key.xor_distance)[:NEAREST]
            # An answer names nodes nearer to the key; the answer counts if its sender is among the nearest of all.
            if not nearest or answered in nearest:
                break
            chosen = random.choice(nearest)  # noqa: S311 - not a secret
            asked.add(chosen)
            answer = await protocol.call_find(known[chosen], [key])
            if answer is not None:
                answered, (item, more) = chosen, answer.get(key, (None, {}))
                known |= more
                packed += [] if item is None else [value for value, _ in item.value.data.values()]
        return list(map(guards.unpack_bytes, packed))

    async def situation(self) -> dht_process_pb2.DhtSituation:
        """Returns this node's addresses and counts of known nodes and records. Fails if p2pd does not answer."""
        _, addresses = await self._node.p2p._client.identify()
        own = Multiaddr(f"/p2p/{self.daemon.peer_id}")
        return dht_process_pb2.DhtSituation(
            multiaddrs=[str(address.encapsulate(own)) for address in addresses],
            peers=self._peers_known(),
            records=len(self._node.protocol.storage),
        )

    def _peers_known(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def _join(self) -> int:
        """Pings all initial peers and looks up the nearest DHT nodes. Returns how many initial peers did not answer."""
        greeted = await asyncio.gather(*(self._greet(peer, at) for peer, at in self._initial_peers.items()))
        if self._peers_known():
            await self._node.find_nearest_nodes([self._node.node_id], MAX_NEAREST, MAX_NEAREST)
        if len(self._node.blacklist.ban_counter) > 4096:
            self._node.blacklist.clear()
        return greeted.count(False)

    async def _greet(self, peer: PeerID, addresses: list[Multiaddr]) -> bool:
        try:
            async with asyncio.timeout(5.0):
                if not await any_answers(addresses):
                    return False
                await self._node.p2p._client.connect(peer, addresses)
                node_id = await self._node.protocol.call_ping(peer)
        except (P2PDaemonError, OSError, TimeoutError) as error:
            log.debug("initial peer %s is unreachable: %s", peer, error or type(error).__name__)
            return False
        # hivemind adds the node in a separate task; callers need it in the table when this returns.
        if node_id is not None:
            await self._node.protocol.update_routing_table(node_id, peer, responded=True)
        return node_id is not None


async def _guarded_node(daemon: P2P, start: dht_process_pb2.DhtStart) -> DHTNode:
    hivemind.dht.node.DHTProtocol = guards.GuardedProtocol
    # Set on the class, because requests can arrive before `create` returns.
    guards.GuardedProtocol.budgets = guards.SourceBudgets(time.monotonic)
    keys = 1 + sum(start.experts)  # one more key for visitors
    node = await DHTNode.create(
        p2p=daemon,
        node_id=guards.node_id_of(daemon.peer_id),
        client_mode=start.client,
        record_validator=guards.RecordRules(RunId(start.run), tuple(start.experts), time.time),
        # No caches: they could be poisoned, and every look-up asks the nodes near the key anyway.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        reuse_get_requests=False,
    )
    node.protocol.storage = guards.GuardedStorage(time.time, guards.owners_per_key(keys), longest_s=MAX_LIFETIME_S)
    node.protocol.cache = guards.GuardedStorage(time.time, owners_of_key=0, max_records=0)
    return node


def _by_peer(multiaddrs: Any, own: str) -> dict[PeerID, list[Multiaddr]]:
    peers: dict[PeerID, list[Multiaddr]] = {}
    for text in multiaddrs:
        multiaddr = Multiaddr(text)
        peer = PeerID.from_base58(multiaddr["p2p"])
        if peer.to_base58() != own:
            peers.setdefault(peer, []).append(multiaddr.decapsulate(Multiaddr(f"/p2p/{peer}")))
    return peers
