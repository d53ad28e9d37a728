"""One peer of `benchmarks/reach.py`: finds out how it is reached, and receives or sends tensors.

Writes JSON, a line each, and ends when its stdin does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from benchmarks.transport import TensorCounter, confirm_batches, send_batches
from node.network.reach_status import ReachMode
from node.network.session import NetworkSession, Whereabouts, present
from node.observability.events import Event, Reach
from node.reachability.monitor import reachable
from protocol.dht.directory import DirectorySettings
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.manifest.join_link import parse_link
from swarm.vocabulary.pipeline_messages import MicrobatchControl, MicrobatchTensor
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId

BATCHES = 6
PATIENCE_S = 120.0
RELAY = "relay"


class Listener:
    """Takes a node's events and keeps how it is reached."""

    def __init__(self) -> None:
        self.found: asyncio.Future[Reach] = asyncio.get_running_loop().create_future()

    def emit(self, event: Event) -> None:
        if isinstance(event, Reach) and not self.found.done():
            self.found.set_result(event)


class SessionCounter(TensorCounter):
    """Counts tensors that a node's session receives."""

    def receive(self, sender: PeerId, message: MicrobatchControl) -> None:
        self.whole.set()


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def settled(session: NetworkSession, events: Listener) -> Reach:
    """How it is reached, when all that follows from that is done: a hidden node starts its DHT again, as a client, and
    tunnels end with the old one."""
    reach = await events.found
    async with asyncio.timeout(PATIENCE_S):
        while reach.step == "reverse" and not _runs_again(session):  # noqa: ASYNC110 - the directory tells nobody
            await asyncio.sleep(0.1)
    return reach


def _runs_again(session: NetworkSession) -> bool:
    figures = session.directory.statistics
    return figures.running and figures.restarts > 0


async def receive(session: NetworkSession, counter: SessionCounter, events: Listener) -> None:
    """Serves, says how it is reached, and confirms every batch; until cancelled."""
    session.own.take(ModuleId(1))
    session.own.state = PeerState.SERVING
    session.membership_sync.announce()
    say(peer=session.own.peer, link=str(session.link))

    async def tell_step() -> None:
        reach = await settled(session, events)
        say(step=reach.step, reason=reach.reason)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tell_step())
        await confirm_batches(session.transport, counter)


async def send(session: NetworkSession, counter: SessionCounter, events: Listener, receiver: PeerId, step: str) -> None:
    """Waits until the receiver announces what goes with its step, and says the rate of each batch, in MB/s."""
    async with asyncio.timeout(PATIENCE_S):
        if step == RELAY:
            # Before it knows that it cannot be dialled it would call the other and wait for it.
            await settled(session, events)
        while not _is_announced(session, receiver, step):
            session.membership_sync.changed.clear()
            await session.membership_sync.changed.wait()
    began = time.perf_counter()
    await session.transport.connect(receiver)
    say(connected_s=round(time.perf_counter() - began, 4))
    say(mb_per_s=await send_batches(session.transport, counter, session.own.peer, receiver, BATCHES))


def _is_announced(session: NetworkSession, receiver: PeerId, step: str) -> bool:
    known = session.membership.get(receiver)
    if known is None or not known.is_reachable or bool(known.via) != (step not in ("direct", "mapped")):
        return False
    return step != RELAY or any(via is not None and via.relay for via in map(session.membership.get, known.via))


async def main(arguments: argparse.Namespace, over: asyncio.Event) -> None:
    link = None if arguments.link is None else parse_link(arguments.link)
    run = RunId(arguments.run) if link is None else link.run
    where = Whereabouts(listen=arguments.listen)
    peers = () if link is None else link.peers
    settings = DirectorySettings(arguments.listen, 0, (), peers, relay_bytes_per_hour=arguments.relay_bytes)
    counter, events = SessionCounter(), Listener()
    async with present(Identity.generate(), run, where, settings, SystemClock(), events) as session:
        receiving = session.dispatcher.registered(
            tensors={MicrobatchTensor: counter}, messages={MicrobatchControl: counter.receive}
        )
        with receiving:
            async with reachable(ReachMode.AUTO, None, session, events):
                work = asyncio.create_task(
                    receive(session, counter, events)
                    if arguments.to is None
                    else send(session, counter, events, PeerId(arguments.to), arguments.step)
                )
                ending = asyncio.create_task(over.wait())
                await asyncio.wait((work, ending), return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                if not work.done():
                    work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work


def run_until_stdin_ends(arguments: argparse.Namespace) -> None:
    async def run() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            sys.stdin.buffer.read()
            loop.call_soon_threadsafe(over.set)

        threading.Thread(target=wait, daemon=True).start()
        await main(arguments, over)

    uvloop.run(run())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--run", help="of the first peer")
    parser.add_argument("--link", help="of the others")
    parser.add_argument("--to", help="peer to send to; none: receive")
    parser.add_argument("--step", default="", help="of the receiver")
    parser.add_argument("--relay-bytes", type=int, default=0, help="per hour, that it relays")
    run_until_stdin_ends(parser.parse_args())
