"""What catching up costs: a state of 200 MB from 1 and from 3 donors, each a process of its own, over loopback with
mutual TLS.

Prints one JSON object: for each number of donors the medians of 5 of MB/s (10**6 bytes, dial to checked anchor) and of
the longest time in ms that the joiner's event loop did not turn; over all of them the most that one donor sent over the
mean (`spread`), and all that was sent over what was needed.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import statistics
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from random import Random

import numpy as np
import uvloop

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.raw_stream import RUN, process
from node.averaging.anchor.anchor import Anchor, initial_anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.layout import layout_of
from node.averaging.module_rounds import StateDesk
from node.averaging.state_sync.chunk_codec import STATE_CODECS
from node.averaging.state_sync.donor import Donor
from node.averaging.state_sync.download import CatchingUp, Surroundings
from node.averaging.state_sync.partial_state import FreshSpace
from node.concurrency.compute_thread import ComputeThread
from node.concurrency.task_groups import task_scope
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.directory import Contact
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Question, Refusal, Topic
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.averaging_messages import StateChunk, StateRefused, StateRequest
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import ControlMessage, TensorMessage
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId

MEGABYTES = 200
MODULE = ModuleId(1)
REPEATS = 5
BEAT_S = 0.005
CODECS = STATE_CODECS["planes"]
"""Which leaves it to the donors; what loopback carries is faster than encoding, so they send the elements as they
are."""


LAYOUT = layout_of({"model.layers.0.weight": (MEGABYTES * 10**6 // 8,)}, 1)


def make_anchor() -> Anchor:
    """The same in every process."""
    return initial_anchor(LAYOUT, np.random.default_rng(0).standard_normal(LAYOUT.elements, np.float32))


class Book:
    def __init__(self, *contacts: Contact) -> None:
        self._contacts = {contact.peer: contact for contact in contacts}

    def contact(self, peer: PeerId) -> Contact | None:
        return self._contacts.get(peer)


class Handler:
    """A desk and nothing else."""

    desk: StateDesk

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview | Refusal:
        return self.desk.admit(sender, message, tensor) if isinstance(message, StateChunk) else Refusal(False, "no")

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, StateChunk):
            self.desk.received(sender, message, buffer)

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        if isinstance(message, StateChunk):
            self.desk.broken_off(sender, message, buffer)

    def told(self, sender: PeerId, message: ControlMessage) -> None:
        if isinstance(message, StateRequest | StateRefused):
            self.desk.told(sender, message)

    def announced(self, sender: PeerId, record: bytes) -> None:
        return

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        assert self.desk.donor is not None
        return await self.desk.donor.answer(question)

    def serves(self, sender: PeerId) -> bool:
        return True

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        return True

    def link_up(self, peer: PeerId) -> None:
        return

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.desk.link_down(peer, error)


def make_peer(*others: Contact) -> tuple[GrpcTransport, Handler, Contact]:
    """A peer that knows these others and has no state yet; the contact is to be completed with the port."""
    identity, handler, clock = Identity.generate(), Handler(), SystemClock()
    credentials = make_credentials(identity, RUN)
    settings = TransportSettings()
    transport = GrpcTransport(credentials, Book(*others), handler, clock, settings, own_record=lambda: b"")
    around = Surroundings(MODULE, LAYOUT, transport, clock, Random(), FreshSpace(LAYOUT), CODECS)
    handler.desk = StateDesk(CatchingUp(around))
    return transport, handler, Contact(identity.peer, (), credentials.certificate_der)


def give(pipe: Connection) -> None:
    """A donor's process. Answers each message with the bytes it has sent so far."""

    async def main() -> None:
        transport, handler, contact = make_peer()
        async with AsyncExitStack() as stack:
            averaging = stack.enter_context(ComputeThread(name="averaging"))
            donor = handler.desk.donor = Donor(MODULE, AnchorStore(make_anchor()), SystemClock(), CODECS, averaging)
            await stack.enter_async_context(transport)
            tasks = await stack.enter_async_context(task_scope())
            tasks.create_task(donor.run(transport))
            pipe.send(replace(contact, addresses=(f"127.0.0.1:{transport.port}",)))
            while True:
                await asyncio.to_thread(pipe.recv)
                pipe.send(donor.sent_bytes)

    uvloop.run(main())


async def longest_pause_s() -> float:
    """Until cancelled; how long the event loop was kept from turning."""
    longest = 0.0
    try:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            longest = max(longest, time.perf_counter() - before - BEAT_S)
    except asyncio.CancelledError:
        return longest


async def fetch(contacts: list[Contact], wanted: AnchorVersion) -> tuple[float, float]:
    """MB/s of one download by a joiner that has just come, and the longest pause in ms."""
    transport, handler, _ = make_peer(*contacts)
    async with transport:
        beating = asyncio.create_task(longest_pause_s())
        started = time.perf_counter()
        await handler.desk.catching_up.catch_up(wanted, [contact.peer for contact in contacts])
        rate = MEGABYTES / (time.perf_counter() - started)
        beating.cancel()
        return rate, 1e3 * await beating


def measure(donors: int, wanted: AnchorVersion) -> dict[str, float]:
    with ExitStack() as stack:
        pipes = [stack.enter_context(process(give)) for _ in range(donors)]
        contacts = [pipe.recv() for pipe in pipes]
        results = [uvloop.run(fetch(contacts, wanted)) for _ in range(REPEATS)]
        for pipe in pipes:
            pipe.send(None)
        served = [pipe.recv() for pipe in pipes]
    return {
        "donors": donors,
        "mb_per_s": round(statistics.median(rate for rate, _ in results), 1),
        "longest_pause_ms": round(statistics.median(pause for _, pause in results), 1),
        "spread": round(max(served) / statistics.mean(served), 2),
        "sent_over_state": round(sum(served) / (REPEATS * 8 * LAYOUT.elements), 3),
    }


def main() -> None:
    wanted = make_anchor().version
    print(json.dumps({"megabytes": MEGABYTES, "downloads": [measure(donors, wanted) for donors in (1, 3)]}))


if __name__ == "__main__":
    main()
