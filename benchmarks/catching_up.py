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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import cast

import numpy as np
import uvloop

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.averaging_skipstone import dispatcher_of_one_module
from benchmarks.raw_stream import RUN, process
from node.averaging.anchor.anchor import Anchor, AnchorStore, initial_anchor
from node.averaging.anchor.layout import layout_of
from node.averaging.state_sync.donor import Donor
from node.averaging.state_sync.download import StateDownloads
from node.averaging.state_sync.partial_state import STATE_CODECS, FreshSpace
from node.concurrency.compute_thread import ComputeThread
from node.concurrency.task_groups import task_scope
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.network.session import NetworkSession
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.directory import Contact
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
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


@dataclass
class Session:
    """What a download needs of `node.network.session.NetworkSession`."""

    own: LocalPeer
    transport: GrpcTransport
    dispatcher: Dispatcher


def make_peer(*others: Contact) -> tuple[Session, Contact]:
    """A peer that knows these others and has no state yet; the contact is to be completed with the port."""
    identity, clock, dispatcher = Identity.generate(), SystemClock(), dispatcher_of_one_module()
    credentials = make_credentials(identity, RUN)
    settings = TransportSettings()
    transport = GrpcTransport(credentials, Book(*others), dispatcher, clock, settings, own_record=lambda: b"")
    own = LocalPeer(RUN, identity.peer, credentials.certificate_der, clock)
    return Session(own, transport, dispatcher), Contact(identity.peer, (), credentials.certificate_der)


def give(pipe: Connection) -> None:
    """A donor's process. Answers each message with the bytes it has sent so far."""

    async def main() -> None:
        session, contact = make_peer()
        transport = session.transport
        async with AsyncExitStack() as stack:
            averaging = stack.enter_context(ComputeThread(name="averaging"))
            donor = Donor(MODULE, AnchorStore(make_anchor()), SystemClock(), CODECS, averaging, transport)
            stack.enter_context(donor.receiving(session.dispatcher))
            await stack.enter_async_context(transport)
            tasks = await stack.enter_async_context(task_scope())
            tasks.create_task(donor.run())
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
    session, _ = make_peer(*contacts)
    downloads = StateDownloads(cast(NetworkSession, session), MODULE, FreshSpace(LAYOUT), CODECS)
    async with session.transport:
        beating = asyncio.create_task(longest_pause_s())
        started = time.perf_counter()
        await downloads.catch_up(wanted, [contact.peer for contact in contacts])
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
