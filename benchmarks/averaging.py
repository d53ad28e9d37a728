"""What a round costs: a module's vector averaged among peers in processes of their own, on loopback.

The peers hold real rounds over mutual TLS, from agreement to commit, without a directory and without training. Beside
them, in turns: torch.distributed's all-reduce over gloo (no encryption, no agreement), hivemind's DecentralizedAverager
(the clock starts after matchmaking), and the rate of a bare gRPC stream. Times are medians, of the slowest peer. MB are
10**6 bytes.
"""

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import SystemRandom
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
import uvloop
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import RUN, hear, introduce, process, rounded, started, tell
from benchmarks.transport import Book, bare_stream, transport_of
from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.anchor.outer_step import LocalReplica, OuterRule, anchor_of
from node.averaging.exchange.all_reduce import ExchangeMeans
from node.averaging.round_runner import ReplicaSync, RoundRunner
from node.concurrency.compute_thread import ComputeThread
from node.model.optimizer import StepFigures
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.observability.events import RoundCommitted
from node.runtime.malloc import keep_freed_memory
from protocol.codecs import encoded_bytes
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySigner, PieceSignatures
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Contact, Question, QuestionAbout
from protocol.transport.grpc_transport import GrpcTransport
from swarm.averaging.round_events import Caught, OtherReplica, ReplicasChanged, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.membership.membership import Membership
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId
from tests.node.averaging.small_rounds import Everybody

keep_freed_memory()  # in every process: each imports this module

MODULE: Final = ModuleId(1)
WARM_UP_ROUNDS: Final = 2
RIVALS: Final = {"NONE": "NONE", "INT8": "FLOAT16"}
"""Our codecs, and hivemind's codec for each: the best that works in its averager."""
MESSAGE_BYTES: Final = 512 * 1024
MATCHMAKING_S: Final = 3.0
HIVEMIND_S: Final = 60.0
ROUND_S: Final = 60.0


async def status(asker: PeerId, question: Question) -> bytes:
    return b"{}"


@dataclass(eq=False)
class Host:
    """A `RoundHost` where no peer fails: the others have our anchor."""

    book: Book
    start: AnchorVersion
    rounds: asyncio.Queue[tuple[AnchorVersion, RoundCommitted]] = field(default_factory=asyncio.Queue)

    def others(self) -> ReplicasChanged:
        return ReplicasChanged(tuple(OtherReplica(peer, self.start, True) for peer in self.book.contacts))

    async def catch_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
        raise StateError("no replica has to catch up here")

    def anchored(self, anchor: Anchor) -> None:
        return

    def settled(self, version: AnchorVersion, event: RoundCommitted, reason: str = "", clipping: float = 1.0) -> None:
        self.rounds.put_nowait((version, event))

    def accused(self, caught: Caught) -> None:
        raise StateError(caught.why)


class RoundPeer:
    """A replica with all that a round needs. Its threads end with the stack."""

    def __init__(
        self,
        module: ModuleId,
        replica: LocalReplica,
        anchor: Anchor,
        rules: RoundRules,
        outer: OuterRule,
        stack: ExitStack,
    ) -> None:
        identity, clock = Identity.generate(), SystemClock()
        own, members = SimpleNamespace(module=MODULE), Everybody()
        self.book, self.dispatcher = Book(), Dispatcher(cast(LocalPeer, own), cast(Membership, members))
        self.transport, self._contact = transport_of(identity, self.dispatcher, self.book)
        self.compute = stack.enter_context(ComputeThread(set_up=lambda: torch.set_num_threads(1)))
        averaging = stack.enter_context(ComputeThread(name="averaging"))
        store = AnchorStore(anchor)
        machine = RoundMachine(identity.peer, module, rules, anchor.version, EntrySigner(identity, RUN))
        signatures = PieceSignatures(RUN, identity)
        means = ExchangeMeans(rules.codecs, outer, averaging, self.transport, clock, signatures, SystemRandom())
        sync = ReplicaSync(replica, store, self.compute, averaging, rules, outer, clock)
        host = Host(self.book, anchor.version)
        self.settled = host.rounds
        self.runner = RoundRunner(identity.peer, module, machine, store, sync, means, host)

    @property
    def contact(self) -> Contact:
        """Valid once the transport runs."""
        return replace(self._contact, addresses=(f"127.0.0.1:{self.transport.port}",))

    def know(self, contacts: list[Contact]) -> None:
        """Call it before the runner runs: without others it would take itself for a lone replica."""
        self.book.contacts = {contact.peer: contact for contact in contacts if contact.peer != self._contact.peer}

    async def connect(self) -> None:
        """Connects to the others."""
        for peer in self.book.contacts:
            await self.transport.ask(peer, Question(QuestionAbout.STATUS), ROUND_S)

    def receiving(self) -> ExitStack:
        """Passes messages of rounds to the runner until it is closed, and answers questions for the status."""
        stack = ExitStack()
        stack.enter_context(self.runner.receiving(self.dispatcher))
        stack.enter_context(self.dispatcher.registered(answers={QuestionAbout.STATUS: status}))
        return stack


Round = Callable[[], dict[str, Any] | None]
"""Holds one round and returns its `seconds` and, if known, `sent_bytes`; None if it failed."""


@dataclass
class Contender:
    """One of those compared, at one size and number of peers."""

    hold: Round
    turns: list[dict[str, Any] | None] = field(default_factory=list)

    @property
    def median_ms(self) -> float | None:
        return rounded(kit.median(1e3 * turn["seconds"] for turn in self.turns if turn is not None), 1)


def spanned(times: list[tuple[float, float]]) -> float:
    """From the first beginning to the last end."""
    return max(end for _, end in times) - min(begin for begin, _ in times)


def all_in_step(peers: list[Connection]) -> list[Any]:
    """Lets all prepare, then all go; returns what each has measured."""
    for word in ("prepare", "go"):
        for peer in peers:
            peer.send(word)
        heard = [hear(peer) for peer in peers]
    return heard


class Schedule:
    """An inner optimizer that only counts."""

    steps = tokens = 0
    replicas = 1
    before_step = before_change = staticmethod(lambda: None)

    def start_anew(self, steps: int, tokens: int) -> None:
        self.steps = steps


def round_process(connection: Connection, elements: int, codec: str) -> None:
    """One peer. Holds a round for each message; sends its begin and end, the new anchor and the bytes sent."""
    torch.set_num_threads(1)
    numbers = torch.Generator().manual_seed(1)  # the same in every process
    module = nn.ParameterList(nn.Parameter(torch.randn(elements // 8, generator=numbers)) for _ in range(8))
    replica = LocalReplica([module], 1, Schedule())
    codecs = (Codec[codec],)
    rules = RoundRules(inner_steps=1, fragments=1, chunks=replica.layout.chunks, longest_s=1e9, codecs=codecs)

    async def main() -> None:
        with ExitStack() as stack:
            peer = RoundPeer(MODULE, replica, anchor_of(replica), rules, OuterRule(0.7, 0.9), stack)
            stack.enter_context(peer.receiving())
            async with peer.transport, asyncio.TaskGroup() as tasks:
                connection.send(peer.contact)
                peer.know(await asyncio.to_thread(connection.recv))
                tasks.create_task(peer.runner.run())
                await peer.connect()
                connection.send("ready")
                while await asyncio.to_thread(connection.recv):
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter.sub_(1e-3)
                    peer.runner.after_inner_step(StepFigures(1, (1,), 1024, 1.0, 1e-3))
                    connection.send("prepared")
                    await asyncio.to_thread(connection.recv)
                    before, begun = sent_bytes(peer.transport), time.monotonic()
                    peer.runner.stepped()
                    async with asyncio.timeout(ROUND_S):
                        version, _ = await peer.settled.get()
                    ended, sent = time.monotonic(), sent_bytes(peer.transport) - before
                    # The audit would otherwise run while the next contender is measured.
                    while peer.runner.auditor.busy:  # noqa: ASYNC110 - the auditor has no events to wait for
                        await asyncio.sleep(0.001)
                    connection.send((begun, ended, version, sent))

    uvloop.run(main())


def sent_bytes(transport: GrpcTransport) -> int:
    return sum(figures.sent_bytes for figures in transport.figures().values())


@contextmanager
def skipstone(codec: str, elements: int, count: int) -> Iterator[Round]:
    with ExitStack() as processes:
        peers = [processes.enter_context(process(round_process, elements, codec)) for _ in range(count)]
        introduce(peers)

        def hold() -> dict[str, Any]:
            results = all_in_step(peers)
            versions = {version for _, _, version, _ in results}
            assert len(versions) == 1, f"the peers' anchors differ: {versions}"
            times = [(begin, end) for begin, end, _, _ in results]
            return {"seconds": spanned(times), "sent_bytes": sum(sent for _, _, _, sent in results)}

        yield hold


@contextmanager
def gloo(elements: int, count: int) -> Iterator[Round]:
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory()) + "/store"
        peers = [stack.enter_context(process(gloo_process, rank, count, elements, store)) for rank in range(count)]
        for peer in peers:
            hear(peer)
        yield lambda: {"seconds": spanned(all_in_step(peers))}


def gloo_process(connection: Connection, rank: int, count: int, elements: int, store: str) -> None:
    """One of `count` processes that sum a vector; a round for each message."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=patience)
    values = torch.full((elements,), float(rank))
    connection.send("ready")
    while connection.recv():
        values.fill_(float(rank))
        connection.send("prepared")
        connection.recv()
        begun = time.monotonic()
        dist.all_reduce(values)
        connection.send((begun, time.monotonic()))
        assert values[-1].item() == sum(range(count))


@contextmanager
def hivemind(codec: str, elements: int, count: int) -> Iterator[Round]:
    """If it cannot be started every round counts as failed."""

    def start(processes: ExitStack) -> list[Connection]:
        peers, addresses = list[Connection](), list[str]()
        for _ in range(count):
            peer = process(averager_process, count, elements, codec, addresses, grace_s=10.0)
            peers.append(processes.enter_context(peer))
            addresses = hear(peers[-1], kit.START_S)
        return peers

    with started(start) as peers:
        yield partial(hivemind_round, peers or [])


def hivemind_round(peers: list[Connection]) -> dict[str, Any] | None:
    """A round that hung leaves the peers out of step, so none is held after it."""
    try:
        times: list[Any] = all_in_step(peers) if peers else [None]
    except (TimeoutError, EOFError, OSError):
        peers.clear()
        return None
    return None if None in times else {"seconds": spanned(times)}


def averager_process(connection: Connection, count: int, elements: int, codec: str, peers: list[str]) -> None:
    """One of `count` averagers, in float32 or half precision (with NumPy 2.4 its 8-bit codecs fail)."""
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, NoCompression
    from hivemind.dht import DHT

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # its averager is a process that cannot be started otherwise
    dht = DHT(initial_peers=peers, start=True)
    averager = DecentralizedAverager(
        [torch.randn(elements)],
        dht,
        prefix="bench",
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=1.0,
        compression=Float16Compression() if codec == "FLOAT16" else NoCompression(),
        start=True,
    )
    connection.send([str(address) for address in dht.get_visible_maddrs()])
    try:
        while connection.recv():
            control = averager.step(wait=False, require_trigger=True, timeout=HIVEMIND_S)
            connection.send(is_matched(control))
            connection.recv()
            connection.send(all_reduced(control))
    finally:
        averager.shutdown()
        dht.shutdown()


def is_matched(control: Any) -> bool:
    """Waits for the group."""
    from hivemind.averaging.control import AveragingStage

    deadline = time.monotonic() + HIVEMIND_S
    while control.stage != AveragingStage.AWAITING_TRIGGER:
        if control.done() or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def all_reduced(control: Any) -> tuple[float, float] | None:
    begun = time.monotonic()
    try:
        control.allow_allreduce()
        control.result(HIVEMIND_S)
    except Exception as error:
        tell(f"hivemind: a round failed: {error!r:.200}")
        return None
    return begun, time.monotonic()


def race(codec: str, megabytes: float, count: int, options: Any) -> dict[str, Any]:
    """All contenders in turns, for one of our codecs."""
    elements = int(megabytes * 250_000)
    size, rates = encoded_bytes(Codec[codec], elements), list[float]()
    with ExitStack() as stack:
        arms = {"ours": skipstone(codec, elements, count), "gloo": gloo(elements, count)}
        if not options.without_hivemind:
            arms["hivemind"] = hivemind(RIVALS[codec], elements, count)
        found = {name: Contender(stack.enter_context(arm)) for name, arm in arms.items()}
        stream_rate = stack.enter_context(bare_stream(128 * 2**20))
        for number in range(-WARM_UP_ROUNDS, options.rounds):
            for contender in found.values():
                turn = contender.hold()
                contender.turns += [turn] if number >= 0 else []
            rates.append(stream_rate(MESSAGE_BYTES))
            shown = {name: contender.median_ms for name, contender in found.items()}
            tell(f"{megabytes} MB, {count} peers, {codec}: {shown} ms, stream {rates[-1]:.0f} MB/s")
    sent = statistics.median(turn["sent_bytes"] for turn in found["ours"].turns if turn is not None)
    ours_ms = found["ours"].median_ms or 0.0
    rate, rival = statistics.median(rates), found.get("hivemind")
    rival_ms = rival.median_ms if rival else None
    return {
        "ms": ours_ms,
        "sent_bytes": sent,
        "sent_over_optimum": round(sent / (2 * (count - 1) * size), 4),
        "stream_mb_per_s": round(rate, 1),
        "over_transport": round(ours_ms * rate * 1e3 / sent, 3),
        "gloo_ms": found["gloo"].median_ms,
        "hivemind_ms": rival_ms,
        "hivemind_failed": rival.turns.count(None) if rival else None,
        "speedup_over_hivemind": rounded(rival_ms / ours_ms if rival_ms else None, 2),
    }


def measure(options: Any) -> dict[str, Any]:
    """One codec after the other: all contenders of both need more than 24 GB at the largest size."""
    results = [
        {"mb": megabytes, "peers": count, **{codec.lower(): race(codec, megabytes, count, options) for codec in RIVALS}}
        for megabytes in options.mb
        for count in options.peers
    ]
    return {"rounds": options.rounds, "results": results}


if __name__ == "__main__":
    quick = {"mb": [0.4], "peers": [2], "rounds": 1, "without_hivemind": True}
    kit.run(__doc__, measure, quick, mb=[4.0, 40.0, 200.0], peers=[2, 4], rounds=5, without_hivemind=False)
