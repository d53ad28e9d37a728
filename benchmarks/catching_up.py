"""What catching up costs: a state of 200 MB from 1 and from 3 donors, each a process, over loopback with mutual TLS.

For each number of donors the medians of MB/s (10**6 bytes, dial to checked anchor) and of the longest pause of the
joiner's event loop; `spread` is the most that one donor sent over the mean, `sent_over_state` all that was sent over
what was needed.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import RUN, hear, process
from benchmarks.round_peer import MODULE, dispatcher_of_one_module
from benchmarks.transport import Book
from node.averaging.anchor.anchor import Anchor, AnchorStore, initial_anchor
from node.averaging.anchor.layout import Layout, layout_of
from node.averaging.state_sync.donor import Donor
from node.averaging.state_sync.download import StateDownloads
from node.averaging.state_sync.partial_state import STATE_CODECS, FreshSpace
from node.concurrency.compute_thread import ComputeThread
from node.concurrency.task_groups import task_scope
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.network.session import NetworkSession
from node.runtime.malloc import keep_freed_memory
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Contact
from protocol.transport.grpc_transport import GrpcTransport
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.types import AnchorVersion

BEAT_S = 0.005
CODECS = STATE_CODECS["planes"]
"""The donors choose; loopback is faster than encoding, so they send the elements as they are."""

# In every process: each imports this module.
keep_freed_memory()


def layout_for(megabytes: int) -> Layout:
    """Parameters and momentum have 4 bytes each."""
    return layout_of({"model.layers.0.weight": (megabytes * 10**6 // 8,)}, 1)


def make_anchor(megabytes: int) -> Anchor:
    """The same in every process."""
    layout = layout_for(megabytes)
    return initial_anchor(layout, np.random.default_rng(0).standard_normal(layout.elements, np.float32))


@dataclass
class Session:
    """What a download needs of `node.network.session.NetworkSession`."""

    own: LocalPeer
    transport: GrpcTransport
    dispatcher: Dispatcher


def make_peer(*others: Contact) -> tuple[Session, Contact]:
    """A peer that knows these others and has no state yet; the contact lacks its address."""
    identity, clock, dispatcher = Identity.generate(), SystemClock(), dispatcher_of_one_module()
    credentials = make_credentials(identity, RUN)
    settings = TransportSettings()
    transport = GrpcTransport(credentials, Book(*others), dispatcher, clock, settings, own_record=lambda: b"")
    own = LocalPeer(RUN, identity.peer, credentials.certificate_der, clock)
    return Session(own, transport, dispatcher), Contact(identity.peer, (), credentials.certificate_der)


def donor_process(pipe: Connection, megabytes: int) -> None:
    """Answers each message with the bytes it has sent so far."""

    async def main() -> None:
        session, contact = make_peer()
        transport = session.transport
        async with AsyncExitStack() as stack:
            averaging = stack.enter_context(ComputeThread(name="averaging"))
            store = AnchorStore(make_anchor(megabytes))
            donor = Donor(MODULE, store, SystemClock(), CODECS, averaging, transport)
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
    """Until cancelled; the longest time in which the event loop did not turn."""
    longest = 0.0
    try:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            longest = max(longest, time.perf_counter() - before - BEAT_S)
    except asyncio.CancelledError:
        return longest


async def fetch(contacts: list[Contact], wanted: AnchorVersion, megabytes: int) -> tuple[float, float]:
    """MB/s of one download by a joiner that has just come, and the longest pause in ms."""
    session, _ = make_peer(*contacts)
    downloads = StateDownloads(cast(NetworkSession, session), MODULE, FreshSpace(layout_for(megabytes)), CODECS)
    async with session.transport:
        beating = asyncio.create_task(longest_pause_s())
        started = time.perf_counter()
        await downloads.catch_up(wanted, [contact.peer for contact in contacts])
        rate = megabytes / (time.perf_counter() - started)
        beating.cancel()
        return rate, 1e3 * await beating


def downloads(donors: int, wanted: AnchorVersion, options: Any) -> dict[str, float]:
    with ExitStack() as stack:
        pipes = [stack.enter_context(process(donor_process, options.megabytes)) for _ in range(donors)]
        contacts = [hear(pipe) for pipe in pipes]
        results = [uvloop.run(fetch(contacts, wanted, options.megabytes)) for _ in range(options.rounds)]
        for pipe in pipes:
            pipe.send("how much")
        served = [hear(pipe) for pipe in pipes]
    return {
        "donors": donors,
        "mb_per_s": round(statistics.median(rate for rate, _ in results), 1),
        "longest_pause_ms": round(statistics.median(pause for _, pause in results), 1),
        "spread": round(max(served) / statistics.mean(served), 2),
        "sent_over_state": round(sum(served) / (options.rounds * options.megabytes * 1e6), 3),
    }


def measure(options: Any) -> dict[str, Any]:
    wanted = make_anchor(options.megabytes).version
    found = [downloads(donors, wanted, options) for donors in options.donors]
    return {"megabytes": options.megabytes, "downloads": found}


def main() -> None:
    kit.run(__doc__, measure, {"megabytes": 8, "rounds": 1}, megabytes=200, donors=[1, 3], rounds=5)


if __name__ == "__main__":
    main()
