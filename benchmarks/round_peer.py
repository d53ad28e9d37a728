"""Peers of rounds on loopback: the real round runner, machine and transport, without directory and training."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from random import SystemRandom
from types import SimpleNamespace
from typing import cast

import torch
import uvloop
from torch import nn

from benchmarks.kit import RUN
from benchmarks.transport import Book
from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.anchor.local_replica import LocalReplica, anchor_of
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.exchange.all_reduce import ExchangeMeans
from node.averaging.module_rounds import rung_of
from node.averaging.replica_sync import ReplicaSync
from node.averaging.round_runner import RoundRunner
from node.concurrency.compute_thread import ComputeThread
from node.model.optimizer import StepFigures
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.observability.events import RoundCommitted
from node.runtime.malloc import keep_freed_memory
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySeal, PieceSignatures
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Contact, Question, QuestionAbout
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.averaging.round_events import Caught, OtherReplica, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.compression.round_codecs import RoundCodecs
from swarm.membership.membership import Membership
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId

MODULE = ModuleId(1)
BLOCKS = 8
TOKENS = 1024
STEP = StepFigures(step=1, visits=(1,), tokens=TOKENS, gradient_norm=1.0, learning_rate=1e-3)
STEP_SIZE = 1e-3
PATIENCE_S = 60.0


class Everybody:
    """A `Membership` in which all peers are replicas of one module."""

    def get(self, peer: PeerId) -> SimpleNamespace:
        return SimpleNamespace(module=MODULE)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return module == MODULE


def dispatcher_of_one_module() -> Dispatcher:
    return Dispatcher(cast(LocalPeer, SimpleNamespace(module=MODULE)), cast(Membership, Everybody()))


async def status(asker: PeerId, question: Question) -> bytes:
    return b"{}"


@dataclass(eq=False)
class Host:
    """A `RoundHost` where no peer fails: the others stand on our anchor."""

    book: Book
    start: AnchorVersion
    rounds: asyncio.Queue[tuple[AnchorVersion, RoundCommitted]] = field(default_factory=asyncio.Queue)

    def others(self) -> tuple[OtherReplica, ...]:
        return tuple(OtherReplica(peer, self.start, True) for peer in self.book.contacts)

    async def catch_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
        raise StateError("nobody has to catch up here")

    def anchored(self, anchor: Anchor) -> None:
        return

    def settled(self, version: AnchorVersion, event: RoundCommitted, reason: str = "", clipping: float = 1.0) -> None:
        self.rounds.put_nowait((version, event))

    def accused(self, caught: Caught) -> None:
        raise StateError(caught.why)


class RoundPeer:
    """A replica with all that a round needs. Its threads end with the stack.

    Args:
        anchor: where it begins.
    """

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
        credentials = make_credentials(identity, RUN)
        self.book, self.dispatcher = Book(), dispatcher_of_one_module()
        self.transport = GrpcTransport(
            credentials, self.book, self.dispatcher, clock, TransportSettings(), own_record=lambda: b""
        )
        self._contact = Contact(identity.peer, (), credentials.certificate_der)
        self.compute = stack.enter_context(ComputeThread(set_up=lambda: torch.set_num_threads(1)))
        averaging = stack.enter_context(ComputeThread(name="averaging"))
        store = AnchorStore(anchor)
        machine = RoundMachine(identity.peer, module, rules, anchor.version, EntrySeal(identity, RUN))
        signatures = PieceSignatures(RUN, identity)
        means = ExchangeMeans(rules.codecs, outer, averaging, self.transport, clock, signatures, SystemRandom())
        sync = ReplicaSync(replica, store, self.compute, averaging, rules, outer, clock)
        host = Host(self.book, anchor.version)
        self.settled = host.rounds
        self.runner = RoundRunner(identity.peer, module, machine, store, sync, means, host)

    @property
    def contact(self) -> Contact:
        """How it is reached, once the transport runs."""
        return replace(self._contact, addresses=(f"127.0.0.1:{self.transport.port}",))

    def know(self, contacts: list[Contact]) -> None:
        """Has to come before the runner runs: without others it would take itself for a lone replica."""
        self.book.contacts = {contact.peer: contact for contact in contacts if contact.peer != self._contact.peer}

    async def connect(self) -> None:
        """Makes links to the others."""
        for peer in self.book.contacts:
            await self.transport.ask(peer, Question(QuestionAbout.STATUS), PATIENCE_S)

    def receiving(self) -> ExitStack:
        """Until it is closed, messages of rounds go to the runner, and questions for the status are answered."""
        stack = ExitStack()
        stack.enter_context(self.runner.receiving(self.dispatcher))
        stack.enter_context(self.dispatcher.registered(answers={QuestionAbout.STATUS: status}))
        return stack

    async def audits_are_done(self) -> None:
        """Waits for the audit of the last round, which would otherwise run in the next contender's turn."""
        while self.runner.auditor.busy:  # noqa: ASYNC110 - the auditor has no events to wait for
            await asyncio.sleep(0.001)


# ---- a peer whose module is only a vector ----------------------------------------------------------------------------


class Schedule:
    """An inner optimizer that only counts."""

    steps = tokens = 0
    replicas = 1
    before_step = before_change = staticmethod(lambda: None)

    def start_anew(self, steps: int, tokens: int) -> None:
        self.steps = steps


def module_of(elements: int) -> nn.Module:
    """The same in every process."""
    numbers = torch.Generator().manual_seed(1)
    blocks = [torch.randn(elements // BLOCKS, generator=numbers) for _ in range(BLOCKS)]
    return nn.ParameterList(nn.Parameter(block) for block in blocks)


def round_process(connection: Connection, elements: int, codec: str) -> None:
    """One peer. Holds a round for each message and says when it began and ended, its result, and the bytes sent."""
    keep_freed_memory()
    torch.set_num_threads(1)
    module = module_of(elements)
    replica = LocalReplica([module], 1, Schedule())
    rungs = (rung_of(RoundCodecs(Codec[codec])),)
    rules = RoundRules(inner_steps=1, fragments=1, chunks=replica.layout.chunks, longest_s=1e9, rungs=rungs)

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
                    _take_step(module)
                    peer.runner.after_inner_step(STEP)
                    connection.send("prepared")
                    await asyncio.to_thread(connection.recv)
                    before, begun = sent_bytes(peer.transport), time.monotonic()
                    peer.runner.stepped()
                    async with asyncio.timeout(PATIENCE_S):
                        version, _ = await peer.settled.get()
                    ended, sent = time.monotonic(), sent_bytes(peer.transport) - before
                    await peer.audits_are_done()
                    connection.send((begun, ended, version, sent))

    uvloop.run(main())


@torch.no_grad()
def _take_step(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.sub_(STEP_SIZE)


def sent_bytes(transport: GrpcTransport) -> int:
    return sum(figures.sent_bytes for figures in transport.figures().values())
