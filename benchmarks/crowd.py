"""What the control plane of a large swarm costs a node, in virtual time: bytes, messages, CPU, and a lost stage.

Each node's own view of the swarm, its look-ups, records, links and moves (`MembershipSync`, `Mover`) run on a loop
whose clock jumps from timer to timer. Between them are a directory in memory, which answers as the guarded DHT does
(one of the nodes nearest to a key, a sample of its records), and links with delays by region. Nothing is trained.
`churn`: share of the nodes that end in an hour; for each a newcomer chooses its module. `busiest`: bytes of the node
that sends most. `checked_per_s`: records whose signatures are new to a node. `known_own`, `known_all`: mean share of
the replicas of its module, and of all modules, in a node's view.

Then every replica of one stage ends at once. `served_s`: until another one serves; `noticed_s`: until a data node knows
it (null: not within 300 s, because no stage can spare a node). Bytes of links, DHT messages and p2pd are constants,
fitted to 4 to 32 real nodes (`idle`).
"""

import asyncio
import hashlib
import random
import selectors
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import run_of, tell
from node.network.local_peer import LocalPeer, OwnRecord
from node.network.session import MembershipSync
from node.runtime.module_choice import SETTING_UP_S, Mover, workload_of
from protocol.dht.dht_node import NEAREST, REFRESH_S
from protocol.dht.guards import MAX_ANSWERED, owners_per_key
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.transport import Question
from swarm.membership.membership import Membership
from swarm.membership.placement import choose_module
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId

RUN: Final = RunId("c" * 64)
STARTED_S: Final = 1.8e9  # Unix time at the start
FRAME: Final = 120  # Bytes of TCP, TLS, HTTP/2 and gRPC, with their acknowledgements, around a small message
HANDSHAKE: Final = 3_000  # Bytes that each side sends to open a link
LINK_BYTES_PER_S: Final = 6.0  # Pings of an idle link, from each side
STATUS: Final = 1_500
QUESTION, NEAREST_NAMED, STORED = 350, 700, 150  # DHT: a question, the nodes that an answer names, around a record
WIDE_ASKED: Final = 20  # Nodes that a wide look-up asks
P2PD_BYTES_PER_S: Final = (600.0, 40.0, 32)  # p2pd's own: alone, for each other node, and of at most so many
DELAYS_S: Final = ((0.02, 0.06, 0.11), (0.06, 0.02, 0.09), (0.11, 0.09, 0.02))  # One way, between regions
GONE_S: Final = 8.0  # Until a broken link is noticed
DATA_NODES: Final = 20  # One of so many nodes reads text
PATIENCE_S: Final = 300.0
ZERO: Final = ModuleId(0)


class _Jump(selectors.SelectSelector):
    """Reads no file: waiting means that the clock moves."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Jump()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


class VirtualClock:
    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return STARTED_S + self.monotonic()


@dataclass(slots=True, eq=False)
class Node:
    """A node: its real view of the swarm, and, for that view, its directory, its transport and its proofs of work."""

    crowd: "Crowd"
    own: LocalPeer
    record: OwnRecord
    region: int
    place: int  # In the DHT
    sync: MembershipSync = field(init=False)
    links: set[PeerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        ends: Any = SimpleNamespace(emit=lambda event: None), self, self
        self.sync = MembershipSync(self.own, self.record, Membership(RUN, self.own.peer), *ends)
        self.sync.watch(self.crowd.modules)

    async def publish(self, announcement: Announcement, record: bytes) -> None:
        self.crowd.keep(self, announcement, record)

    async def look_up(self, modules: Sequence[ModuleId], *, wide: bool) -> list[Announcement]:
        await asyncio.sleep(random.uniform(0.1, 0.4))
        return self.crowd.found(self, modules, wide)

    def announce(self, record: bytes) -> None:
        for peer in self.links:
            self.crowd.say(self, peer, record)

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        await asyncio.sleep(0.2)
        if (other := self.crowd.nodes.get(peer)) is None:
            raise Unreachable("it is gone")
        self.crowd.link(self, other)
        self.crowd.count(self, FRAME, "links")
        self.crowd.count(other, FRAME + STATUS, "links")
        return b"{}"

    def figures(self) -> dict[PeerId, Any]:
        return {}

    @property
    def proven(self) -> frozenset[PeerId]:
        return frozenset(a.peer for a in self.sync.membership.peers() if a.module == self.own.module)

    async def refresh(self) -> None:
        return

    async def live(self, module: ModuleId | None) -> None:
        """Joins, serves, and moves where it is needed, until it is cancelled. None: it chooses its first module."""
        crowd, own, membership = self.crowd, self.own, self.sync.membership
        ends = SimpleNamespace(own=own, membership=membership, membership_sync=self.sync, transport=self)
        fitting = SimpleNamespace(of=lambda modules, held: modules, beside=tuple, needs={})
        others: Any = ends, crowd.manifest, self, fitting
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sync.run())
            tasks.create_task(self._stay_in_the_dht())
            if module is None:
                await asyncio.sleep(2.0)  # as a newcomer looks around
                module = choose_module(own.peer, crowd.modules[1:], membership.peers(), crowd.workload).value
            while True:
                own.take(module)
                own.slots = 8
                self.sync.announce()
                await asyncio.sleep(SETTING_UP_S)
                own.state, own.speed = PeerState.SERVING, 1000.0
                self.sync.announce()
                if module == crowd.lost:
                    crowd.served.set()
                if module == ZERO:
                    await asyncio.Event().wait()
                module = (await Mover(*others).next_module()).value

    async def _stay_in_the_dht(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S * random.uniform(0.75, 1.25))
            self.crowd.route(self, 2 * NEAREST)


class Crowd:
    """The nodes, and what lies between them."""

    def __init__(self, stages: int) -> None:
        self.manifest = run_of("crowd", [0] + [1] * (stages - 1), hidden=64, sequence=64, rows=2, microbatches=2)
        self.modules, self.workload = self.manifest.modules(), workload_of(self.manifest)
        self.nodes: dict[PeerId, Node] = {}
        self.all: list[Node] = []
        self.tasks: dict[PeerId, asyncio.Task[None]] = {}
        self.sent, self.checked = Counter[PeerId](), Counter[PeerId]()
        self.kinds, self.messages = Counter[str](), 0
        self.lost: ModuleId | None = None
        self.served = asyncio.Event()
        self._clock, self._born = VirtualClock(), 0
        self._rooms: dict[ModuleId | None, dict[PeerId, tuple[Announcement, int]]] = {}
        self._keepers: dict[ModuleId | None, list[Node]] = {}
        self._most = owners_per_key(1 + len(self.modules))

    def start(self, module: ModuleId | None) -> None:
        identity = Identity.generate()
        peer, self._born = identity.peer, self._born + 1
        own = LocalPeer(RUN, peer, make_credentials(identity, RUN).certificate_der, self._clock)
        own.addresses = (f"10.0.{self._born // 250}.{self._born % 250 + 1}:31337",)
        place = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8], "big")
        node = Node(self, own, OwnRecord(own, identity), random.randrange(len(DELAYS_S)), place)
        self.nodes[peer] = node
        self._changed()
        self.tasks[peer] = asyncio.get_running_loop().create_task(node.live(module))

    async def end(self, node: Node) -> None:
        """Kills a node. Those with a link to it notice within seconds; its records stay until they run out."""
        gone = node.own.peer
        del self.nodes[gone]
        self._changed()
        task = self.tasks.pop(gone)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for other in [self.nodes[peer] for peer in node.links if peer in self.nodes]:
            other.links.discard(gone)
            after_s = random.uniform(0.1, GONE_S)
            asyncio.get_running_loop().call_later(after_s, other.sync.link_down, gone, Unreachable("it is gone"))

    def _changed(self) -> None:
        self.all = list(self.nodes.values())
        for module in (None, *self.modules):
            key = int.from_bytes(hashlib.sha256(str(module).encode()).digest()[:8], "big")
            self._keepers[module] = sorted(self.all, key=lambda node, key=key: node.place ^ key)[:NEAREST]  # type: ignore[misc]

    async def replace_some(self, share_an_hour: float) -> None:
        """Ends nodes at random for ever, and starts a newcomer for each; a data node follows a data node."""
        while share_an_hour:
            await asyncio.sleep(random.expovariate(share_an_hour * len(self.all) / 3600))
            node = random.choice(self.all)
            await self.end(node)
            self.start(ZERO if node.own.module == ZERO else None)

    def count(self, node: Node, size: int, kind: str) -> None:
        self.sent[node.own.peer] += size
        self.kinds[kind] += size
        self.messages += 1

    def link(self, node: Node, other: Node) -> None:
        """Opens a link, over which each introduces itself."""
        if other.own.peer in node.links:
            return
        for one, two in ((node, other), (other, node)):
            one.links.add(two.own.peer)
            self.count(one, HANDSHAKE, "links")
            one.sync.link_up(two.own.peer)
            self.say(one, two.own.peer, one.record.fresh())

    def say(self, node: Node, peer: PeerId, record: bytes) -> None:
        if (other := self.nodes.get(peer)) is None:
            return
        self.count(node, FRAME + len(record), "records")
        self.checked[peer] += 1
        delay_s = DELAYS_S[node.region][other.region]
        asyncio.get_running_loop().call_later(delay_s, other.sync.announced, node.own.peer, record)

    def route(self, node: Node, asked: int) -> None:
        """A search in the DHT asks so many nodes, which name others."""
        for other in random.choices(self.all, k=asked):
            self.count(node, QUESTION, "routes")
            self.count(other, NEAREST_NAMED, "routes")

    def keep(self, node: Node, announcement: Announcement, record: bytes) -> None:
        room, now = self._rooms.setdefault(announcement.module, {}), self._clock.wall()
        for peer in [peer for peer, (kept, _) in room.items() if kept.expires_at < now]:
            del room[peer]
        if announcement.peer in room or len(room) < self._most:
            room[announcement.peer] = announcement, len(record)
        for keeper in self._keepers[announcement.module]:
            self.count(node, STORED + len(record), "stored")
            self.checked[keeper.own.peer] += 1

    def found(self, node: Node, modules: Sequence[ModuleId], wide: bool) -> list[Announcement]:
        """Answers a look-up, at the cost of those who are asked."""
        now, found = self._clock.wall(), dict[PeerId, Announcement]()
        for module in (None, *modules):
            keepers = self._keepers[module]
            room = [kept for kept in self._rooms.get(module, {}).values() if kept[0].expires_at > now]
            for keeper in keepers if wide else [random.choice(keepers)]:
                answer = random.sample(room, min(len(room), MAX_ANSWERED))
                found |= {kept.peer: kept for kept, _ in answer}
                if keeper is not node:
                    self.count(node, QUESTION, "questions")
                    size = NEAREST_NAMED + sum(STORED // 2 + size for _, size in answer)
                    self.count(keeper, size, "wide answers" if wide else "answers")
                    self.checked[node.own.peer] += len(answer)
            self.route(node, (WIDE_ASKED - NEAREST) * wide)
        found.pop(node.own.peer, None)
        return list(found.values())


async def one(count: int, options: Any) -> dict[str, Any]:
    random.seed(options.seed)
    crowd, loop = Crowd(options.stages), asyncio.get_running_loop()
    data = max(1, count // DATA_NODES)
    for index in range(count):
        crowd.start(ZERO if index < data else crowd.modules[1 + index % (options.stages - 1)])
        await asyncio.sleep(60.0 / count)
    await asyncio.sleep(options.settle)
    churn, began, cpu = loop.create_task(crowd.replace_some(options.churn)), loop.time(), time.process_time()
    for counter in (crowd.kinds, crowd.sent, crowd.checked):
        counter.clear()
    crowd.messages, before = 0, set(crowd.all)
    await asyncio.sleep(options.seconds)
    churn.cancel()
    elapsed, cpu = loop.time() - began, time.process_time() - cpu
    staying = [node for node in crowd.all if node in before]
    alone, each, most = P2PD_BYTES_PER_S
    base = alone + each * min(count - 1, most)
    rates = [crowd.sent[n.own.peer] / elapsed + base + LINK_BYTES_PER_S * len(n.links) for n in staying]
    row: dict[str, Any] = {"nodes": count, "bytes_per_s": round(fmean(rates)), "busiest": round(max(rates))}
    row |= {"bytes_of": {kind: round(size / elapsed / count) for kind, size in crowd.kinds.items()}}
    row |= {"p2pd": base, "messages_per_s": round(crowd.messages / elapsed / count, 2)}
    row |= {"cpu": round(cpu / elapsed / count, 5)}
    row |= {"checked_per_s": round(fmean(crowd.checked[n.own.peer] for n in staying) / elapsed, 2)}
    links = [len(node.links) for node in crowd.all]
    row |= {"links": round(fmean(links), 1), "most_links": max(links)}
    row |= {"known_own": known_share(crowd, every=False), "known_all": known_share(crowd, every=True)}
    row |= await without_a_stage(crowd, crowd.modules[-1])
    tell(row)
    return row


def known_share(crowd: Crowd, *, every: bool) -> float:
    shares = []
    for node in crowd.all:
        known = {a.peer for a in node.sync.membership.peers()}
        others = (other.own for other in crowd.all if other is not node)
        wanted = {own.peer for own in others if every or own.module == node.own.module}
        shares.append(len(wanted & known) / len(wanted) if wanted else 1.0)
    return round(fmean(shares), 3)


async def without_a_stage(crowd: Crowd, lost: ModuleId) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    began, crowd.lost = loop.time(), lost
    for node in [node for node in crowd.all if node.own.module == lost]:
        await crowd.end(node)
    try:
        await asyncio.wait_for(crowd.served.wait(), PATIENCE_S)
        served_s = round(loop.time() - began, 1)
        views = [node.sync for node in crowd.all if node.own.module == ZERO]
        while not any(each.membership.is_served(lost, loop.time()) for each in views):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.25)
    except TimeoutError:
        return {"served_s": None, "noticed_s": None}
    return {"served_s": served_s, "noticed_s": round(loop.time() - began, 1)}


def measure(options: Any) -> dict[str, Any]:
    rows = []
    for count in options.nodes:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            rows.append(runner.run(one(count, options)))
    return {"rows": rows}


if __name__ == "__main__":
    quick = {"nodes": [30], "stages": 4, "settle": 30.0, "seconds": 30.0}
    usual = {"stages": 10, "churn": 0.2, "settle": 240.0, "seconds": 600.0, "seed": 1}
    kit.run(__doc__, measure, quick, nodes=[10, 100, 1000], **usual)
