"""One peer of a round on loopback: the real averager, round machine and transport, around a module that is only a
vector.

Left out are the directory (the processes get each other's addresses by a pipe) and training: a step's effect on the
parameters is made up before the clock starts.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from random import SystemRandom
from typing import Any

import torch
import uvloop
from torch import nn

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.lone_replica import anchor_of
from node.averaging.anchor.module_vector import LocalReplica
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.module_rounds import rung_of
from node.averaging.round_runner import RoundRunner, RoundRunnerHooks, RoundRunnerParts, RoundSettled
from node.concurrency.compute_thread import ComputeThread
from node.model.optimizer import StepFigures
from protocol.identity.certificates import make_credentials
from protocol.identity.entry_signatures import EntrySeal
from protocol.identity.keys import Identity
from protocol.identity.piece_signatures import PieceSignatures
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.directory import Contact
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal, Topic
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.averaging.round_events import Fellow, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.compression.round_codecs import RoundCodecs
from swarm.vocabulary.errors import PeerError, Rejected, StateError
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, RunId

RUN = RunId("0" * 64)
MODULE = ModuleId(1)
BLOCKS = 8
TOKENS = 1024
STEP = StepFigures(step=1, visits=(1,), gradient_norm=1.0, learning_rate=1e-3)
STEP_SIZE = 1e-3


class Schedule:
    """Stands for the inner optimizer, which has no part in a round but its count."""

    steps = 0

    def start_anew(self, steps: int) -> None:
        self.steps = steps


def module_of(elements: int) -> nn.Module:
    """The same everywhere."""
    numbers = torch.Generator().manual_seed(1)
    blocks = [torch.randn(elements // BLOCKS, generator=numbers) for _ in range(BLOCKS)]
    return nn.ParameterList(nn.Parameter(block) for block in blocks)


class Handler:
    """`protocol.interfaces.transport.LinkHandler` of a peer that only holds rounds."""

    averager: RoundRunner

    def admit(self, sender: PeerId, message: Any, tensor: TensorSpec) -> memoryview | Refusal:
        return self.averager.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: Any, tensor: TensorSpec, buffer: memoryview) -> None:
        self.averager.received(sender, message, tensor, buffer)

    def broken_off(self, sender: PeerId, message: Any, buffer: memoryview, error: PeerError) -> None:
        self.averager.broken_off(sender, message, buffer, error)

    def told(self, sender: PeerId, message: Any) -> None:
        self.averager.told(sender, message)

    def announced(self, sender: PeerId, record: bytes) -> None:
        return

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        if question.about is QuestionAbout.STATUS:
            return b"{}"
        raise Rejected("only rounds are held here")

    def serves(self, sender: PeerId) -> bool:
        return True

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        return True

    def link_up(self, peer: PeerId) -> None:
        return

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.averager.link_down(peer, error)


class Book:
    """The other peers. What each stands on is taken to be what we stand on: nobody fails here."""

    def __init__(self) -> None:
        self.contacts: dict[PeerId, Contact] = {}

    def contact(self, peer: PeerId) -> Contact | None:
        return self.contacts.get(peer)


async def no_catching_up(version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
    raise StateError("nobody has to catch up here")


class RoundPeer:
    """What a process measures: one round after another."""

    def __init__(
        self,
        identity: Identity,
        book: Book,
        elements: int,
        codec: Codec,
        compute: ComputeThread,
        averaging: ComputeThread,
    ):
        own = identity.peer
        self.module = module_of(elements)
        replica = LocalReplica([self.module], 1, Schedule())
        shelf = AnchorStore(anchor_of(replica))
        start = shelf.current.version
        rules = RoundRules(
            inner_steps=1,
            fragments=1,
            chunks=replica.layout.chunks,
            longest_s=1e9,
            rungs=(rung_of(RoundCodecs(codec)),),
        )
        self.settled: asyncio.Queue[RoundSettled] = asyncio.Queue()
        parts = RoundRunnerParts(
            own,
            MODULE,
            RoundMachine(own, MODULE, rules, start, EntrySeal(identity, RUN)),
            shelf,
            replica,
            compute,
            averaging,
            rules.codecs,
            OuterRule(0.7, 0.9),
            1,
            TOKENS,
            SystemClock(),
            PieceSignatures(RUN, identity),
            SystemRandom(),
        )
        hooks = RoundRunnerHooks(
            fellows=lambda: tuple(Fellow(peer, start, True) for peer in book.contacts),
            catch_up=no_catching_up,
            settled=self.settled.put_nowait,
        )
        self.averager = RoundRunner(parts, hooks)

    @torch.no_grad()
    def work(self) -> None:
        """An inner step that was taken."""
        for parameter in self.module.parameters():
            parameter.sub_(STEP_SIZE)
        self.averager.after_inner_step(STEP)

    async def a_round(self) -> tuple[float, float, AnchorVersion]:
        begun = time.monotonic()
        self.averager.stepped()
        async with asyncio.timeout(60):
            settled = await self.settled.get()
        return begun, time.monotonic(), settled.version

    async def audits_are_done(self) -> None:
        """They come after the round, beside the training that follows; here they are kept out of the next contender's
        turn."""
        auditor = self.averager.auditor
        while auditor is not None and auditor.busy:  # noqa: ASYNC110 - the auditor has no events to wait for
            await asyncio.sleep(0.001)


def round_process(connection: Connection, elements: int, codec_name: str) -> None:
    """One peer. After the contacts, a round for each message on the connection; says when it began and ended, what it
    led to, and the bytes sent."""
    torch.set_num_threads(1)
    identity = Identity.generate()
    credentials = make_credentials(identity, RUN)
    clock, book, handler = SystemClock(), Book(), Handler()
    transport = GrpcTransport(credentials, book, handler, clock, TransportSettings(), own_record=lambda: b"")

    async def main() -> None:
        with ComputeThread() as compute, ComputeThread(name="averaging") as averaging:
            peer = RoundPeer(identity, book, elements, Codec[codec_name], compute, averaging)
            handler.averager = peer.averager
            async with transport, asyncio.TaskGroup() as tasks:
                connection.send(Contact(identity.peer, (f"127.0.0.1:{transport.port}",), credentials.certificate_der))
                contacts: list[Contact] = await asyncio.to_thread(connection.recv)
                others = [contact for contact in contacts if contact.peer != identity.peer]
                book.contacts = {contact.peer: contact for contact in others}
                tasks.create_task(peer.averager.run(transport))
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
