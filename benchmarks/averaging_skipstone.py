"""One peer of a round on loopback: the real runner of rounds, round machine and transport, around a module that is
only a vector.

Left out are the directory (the processes get each other's addresses by a pipe) and training: a step's effect on the
parameters is made up before the clock starts.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import SystemRandom
from types import SimpleNamespace
from typing import cast

import torch
import uvloop
from torch import nn

from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.anchor.local_replica import LocalReplica, anchor_of
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.exchange.all_reduce import ExchangeMeans
from node.averaging.module_rounds import rung_of
from node.averaging.replica_sync import ReplicaSync
from node.averaging.round_runner import RoundRunner, RoundSettled
from node.concurrency.compute_thread import ComputeThread
from node.model.optimizer import StepFigures
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySeal, PieceSignatures
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.directory import Contact
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.averaging.round_events import Caught, OtherReplica, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.compression.round_codecs import RoundCodecs
from swarm.membership.membership import Membership
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, RunId

RUN = RunId("0" * 64)
MODULE = ModuleId(1)
BLOCKS = 8
TOKENS = 1024
STEP = StepFigures(step=1, visits=(1,), tokens=TOKENS, gradient_norm=1.0, learning_rate=1e-3)
STEP_SIZE = 1e-3


class Schedule:
    """Stands for the inner optimizer, which has no part in a round but its count."""

    steps = tokens = 0
    replicas = 1
    before_step = before_change = staticmethod(lambda: None)

    def start_anew(self, steps: int, tokens: int) -> None:
        self.steps = steps


def module_of(elements: int) -> nn.Module:
    """The same everywhere."""
    numbers = torch.Generator().manual_seed(1)
    blocks = [torch.randn(elements // BLOCKS, generator=numbers) for _ in range(BLOCKS)]
    return nn.ParameterList(nn.Parameter(block) for block in blocks)


class Everybody:
    """Stands for `swarm.membership.membership.Membership` where all are replicas of one module."""

    def get(self, peer: PeerId) -> SimpleNamespace:
        return SimpleNamespace(module=MODULE)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return module == MODULE


def dispatcher_of_one_module() -> Dispatcher:
    return Dispatcher(cast(LocalPeer, SimpleNamespace(module=MODULE)), cast(Membership, Everybody()))


async def status(asker: PeerId, question: Question) -> bytes:
    return b"{}"


def receive_rounds(runner: RoundRunner, dispatcher: Dispatcher) -> ExitStack:
    """Until it is closed, what arrives for rounds goes to the runner, and whoever asks for the status is answered."""
    stack = ExitStack()
    stack.enter_context(runner.receiving(dispatcher))
    stack.enter_context(dispatcher.registered(answers={QuestionAbout.STATUS: status}))
    return stack


class Book:
    """The other peers. What each stands on is taken to be what we stand on: nobody fails here."""

    def __init__(self) -> None:
        self.contacts: dict[PeerId, Contact] = {}

    def contact(self, peer: PeerId) -> Contact | None:
        return self.contacts.get(peer)


@dataclass(eq=False)
class Host:
    """`node.averaging.round_runner.RoundHost` where nobody fails."""

    book: Book
    start: AnchorVersion
    rounds: asyncio.Queue[RoundSettled] = field(default_factory=asyncio.Queue)

    def others(self) -> tuple[OtherReplica, ...]:
        return tuple(OtherReplica(peer, self.start, True) for peer in self.book.contacts)

    async def catch_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
        raise StateError("nobody has to catch up here")

    def anchored(self, anchor: Anchor) -> None:
        return

    def settled(self, settled: RoundSettled) -> None:
        self.rounds.put_nowait(settled)

    def accused(self, caught: Caught) -> None:
        raise StateError(caught.why)


class RoundPeer:
    """What a process measures: one round after another."""

    def __init__(
        self,
        identity: Identity,
        book: Book,
        transport: GrpcTransport,
        elements: int,
        codec: Codec,
        compute: ComputeThread,
        averaging: ComputeThread,
    ):
        own = identity.peer
        self.module = module_of(elements)
        replica = LocalReplica([self.module], 1, Schedule())
        store = AnchorStore(anchor_of(replica))
        start = store.current.version
        rules = RoundRules(
            inner_steps=1,
            fragments=1,
            chunks=replica.layout.chunks,
            longest_s=1e9,
            rungs=(rung_of(RoundCodecs(codec)),),
        )
        machine = RoundMachine(own, MODULE, rules, start, EntrySeal(identity, RUN))
        clock, outer = SystemClock(), OuterRule(0.7, 0.9)
        signatures = PieceSignatures(RUN, identity)
        means = ExchangeMeans(rules.codecs, outer, averaging, transport, clock, signatures, SystemRandom())
        replica_sync = ReplicaSync(replica, store, compute, averaging, rules, outer, clock)
        host = Host(book, start)
        self.settled = host.rounds
        self.runner = RoundRunner(own, MODULE, machine, store, replica_sync, means, host)

    @torch.no_grad()
    def work(self) -> None:
        """An inner step that was taken."""
        for parameter in self.module.parameters():
            parameter.sub_(STEP_SIZE)
        self.runner.after_inner_step(STEP)

    async def a_round(self) -> tuple[float, float, AnchorVersion]:
        begun = time.monotonic()
        self.runner.stepped()
        async with asyncio.timeout(60):
            settled = await self.settled.get()
        return begun, time.monotonic(), settled.version

    async def audits_are_done(self) -> None:
        """They come after the round, beside the training that follows; here they are kept out of the next contender's
        turn."""
        auditor = self.runner.auditor
        while auditor.busy:  # noqa: ASYNC110 - the auditor has no events to wait for
            await asyncio.sleep(0.001)


def round_process(connection: Connection, elements: int, codec_name: str) -> None:
    """One peer. After the contacts, a round for each message on the connection; says when it began and ended, what it
    led to, and the bytes sent."""
    torch.set_num_threads(1)
    identity = Identity.generate()
    credentials = make_credentials(identity, RUN)
    clock, book, dispatcher = SystemClock(), Book(), dispatcher_of_one_module()
    transport = GrpcTransport(credentials, book, dispatcher, clock, TransportSettings(), own_record=lambda: b"")

    async def main() -> None:
        with ComputeThread() as compute, ComputeThread(name="averaging") as averaging:
            peer = RoundPeer(identity, book, transport, elements, Codec[codec_name], compute, averaging)
            with receive_rounds(peer.runner, dispatcher):
                async with transport, asyncio.TaskGroup() as tasks:
                    address = f"127.0.0.1:{transport.port}"
                    connection.send(Contact(identity.peer, (address,), credentials.certificate_der))
                    contacts: list[Contact] = await asyncio.to_thread(connection.recv)
                    others = [contact for contact in contacts if contact.peer != identity.peer]
                    book.contacts = {contact.peer: contact for contact in others}
                    tasks.create_task(peer.runner.run())
                    for contact in others:
                        await transport.ask(contact.peer, Question(QuestionAbout.STATUS), 20)
                    connection.send("ready")
                    while await asyncio.to_thread(connection.recv):
                        peer.work()
                        connection.send("prepared")
                        await asyncio.to_thread(connection.recv)
                        before = sent_bytes(transport)
                        begun, ended, version = await peer.a_round()
                        sent = sent_bytes(transport) - before
                        await peer.audits_are_done()
                        connection.send((begun, ended, version, sent))

    uvloop.run(main())


def sent_bytes(transport: GrpcTransport) -> int:
    """All frames on all links."""
    return sum(figures.sent_bytes for figures in transport.figures().values())
