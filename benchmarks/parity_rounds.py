"""Replicas in one process that average as peers do: the real runner, round machine and transport, over loopback with
mutual TLS.

They train in lock-step, each on a compute thread of its own, and wait for the commit of each round; nothing overlaps,
so that what they compute does not depend on how fast the machine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import SystemRandom

import torch

from benchmarks.averaging_skipstone import Book, Host, dispatcher_of_one_module, receive_rounds
from benchmarks.parity_learner import Learner
from node.averaging.anchor.anchor import Anchor, AnchorStore, version_of
from node.averaging.anchor.local_replica import anchor_of
from node.averaging.anchor.outer_step import outer_rule
from node.averaging.exchange.all_reduce import ExchangeMeans
from node.averaging.module_rounds import rungs_to
from node.averaging.replica_sync import ReplicaSync
from node.averaging.round_runner import RoundRunner, RoundSettled
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import task_scope
from node.data.packing import Microbatch
from node.network.dispatcher import Dispatcher
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySeal, PieceSignatures
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.directory import Contact
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.manifest import Manifest
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.averaging.round_events import RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec, RunId

RUN = RunId("0" * 64)
PATIENCE_S = 60.0
"""Nobody fails here, and a busy machine must not change who takes part."""


@dataclass(eq=False)
class Peer:
    """A replica with all that a round needs."""

    learner: Learner
    runner: RoundRunner
    dispatcher: Dispatcher
    compute: ComputeThread
    transport: GrpcTransport
    book: Book
    contact: Contact
    settled: asyncio.Queue[RoundSettled]


class Hall:
    """All peers."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers

    async def step(self, dealt: Sequence[Sequence[Microbatch]]) -> None:
        """An inner step of every replica, one after the other. The round machines hear of it in `a_round`."""
        for peer, microbatches in zip(self._peers, dealt, strict=True):
            await peer.compute.run(Priority.UPKEEP, partial(_inner_step, peer, microbatches))

    async def a_round(self) -> Anchor:
        """Says that the steps of a round are done, waits until every replica stands on the next anchor, and returns it.

        Raises:
            StateError: not all took part, or they do not agree.
        """
        for peer in self._peers:
            peer.runner.stepped()
        async with asyncio.timeout(PATIENCE_S):
            settled = [await peer.settled.get() for peer in self._peers]
        versions = {one.version for one in settled}
        if len(versions) > 1 or any(len(one.members) != len(self._peers) for one in settled):
            raise StateError(f"round {settled[0].version.round} was not one of all replicas")
        return self._peers[0].runner.anchor


@asynccontextmanager
async def hall(learners: Sequence[Learner], manifest: Manifest) -> AsyncIterator[Hall]:
    """Peers around these learners, which are equal. The rounds' rules are the manifest's."""
    async with AsyncExitStack() as stack:
        peers = [_peer(learner, manifest, stack) for learner in learners]
        for number, peer in enumerate(peers):
            await stack.enter_async_context(peer.transport)
            peers[number].contact = replace(peer.contact, addresses=(f"127.0.0.1:{peer.transport.port}",))
        for peer in peers:
            peer.book.contacts = {one.contact.peer: one.contact for one in peers if one is not peer}
        tasks = await stack.enter_async_context(task_scope())
        for peer in peers:
            stack.enter_context(receive_rounds(peer.runner, peer.dispatcher))
        running = [tasks.create_task(peer.runner.run()) for peer in peers]
        try:
            for peer in peers:
                for other in peer.book.contacts:
                    await peer.transport.ask(other, Question(QuestionAbout.STATUS), PATIENCE_S)
            yield Hall(peers)
        finally:
            for task in running:
                task.cancel()


def _inner_step(peer: Peer, microbatches: Sequence[Microbatch]) -> None:
    peer.runner.after_inner_step(peer.learner.step(microbatches))


def _peer(learner: Learner, manifest: Manifest, stack: AsyncExitStack) -> Peer:
    identity, book, dispatcher = Identity.generate(), Book(), dispatcher_of_one_module()
    credentials = make_credentials(identity, RUN)
    compute = stack.enter_context(ComputeThread(set_up=lambda: torch.set_num_threads(1)))
    averaging = stack.enter_context(ComputeThread(name="averaging"))
    transport = GrpcTransport(credentials, book, dispatcher, SystemClock(), TransportSettings(), own_record=lambda: b"")
    contact = Contact(identity.peer, (), credentials.certificate_der)
    store = AnchorStore(_anchor_after(learner))
    host = Host(book, store.current.version)
    runner = _runner(identity, learner, manifest, store, (compute, averaging), transport, host)
    return Peer(learner, runner, dispatcher, compute, transport, book, contact, host.rounds)


def _runner(
    identity: Identity,
    learner: Learner,
    manifest: Manifest,
    store: AnchorStore,
    threads: tuple[ComputeThread, ComputeThread],
    transport: GrpcTransport,
    host: Host,
) -> RoundRunner:
    own, training, start = identity.peer, manifest.training, store.current.version
    compute, averaging = threads
    rules = RoundRules(
        training.inner_steps,
        training.fragments,
        learner.replica.layout.chunks,
        longest_s=1e9,
        answer_s=PATIENCE_S,
        prepare_s=PATIENCE_S,
        silence_s=PATIENCE_S,
        rungs=rungs_to(Codec[manifest.codecs.pseudo_gradients.upper()]),
    )
    machine = RoundMachine(own, learner.module, rules, start, EntrySeal(identity, RUN))
    clock, outer, signatures = SystemClock(), outer_rule(manifest), PieceSignatures(RUN, identity)
    means = ExchangeMeans(rules.codecs, outer, averaging, transport, clock, signatures, SystemRandom())
    replica_sync = ReplicaSync(learner.replica, store, compute, averaging, rules, outer, clock)
    return RoundRunner(own, learner.module, machine, store, replica_sync, means, host)


def _anchor_after(learner: Learner) -> Anchor:
    """The anchor before the first round, with the learner's steps behind it, so that the schedule goes on from
    there."""
    first = anchor_of(learner.replica)
    steps, tokens = learner.optimizer.steps, learner.optimizer.tokens
    version = version_of(first.layout, first.hashes, 0, steps, tokens, 0)
    return replace(first, version=version)
