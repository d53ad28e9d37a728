"""What each step of the reachability ladder costs a peer: direct, mapped, reverse, relay.

Network namespaces of this machine (root, `ip` and `nft`; `mapped` also miniupnpd): public hosts on one wire, and a home
behind a router with address translation. Each peer finds its step itself, and another step than the wanted one is an
error. Medians of the rounds: `connect_s`, until a stranger on a public host has a link to the peer; `mb_per_s` of
tensors of 8.39 MB, 4 at a time, from the stranger to the peer; `tokens_per_s` of a small run of three stages with one
node each: the data node on a public host, the peer, and a third one on a public host. For `relay` the third one cannot
be dialled either, and the data node relays between the two. `python -m benchmarks.reach peer JSON` is a peer of the
first two figures; it writes JSON lines and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from benchmarks import kit
from benchmarks.kit import PATIENCE_S, medians, rate, tell
from benchmarks.transport import TensorCounter, confirm_batches, send_batches
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, LocalSwarmOptions
from node.network.reach_status import ReachMode
from node.network.session import NetworkSession, Whereabouts, full_link, present
from node.observability.events import Event, Reach, Step
from node.reachability.monitor import reachable
from protocol.dht.directory import DirectorySettings
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.manifest.join_link import parse_link
from swarm.vocabulary.pipeline_messages import MicrobatchControl, MicrobatchTensor
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId
from tests.e2e.home_network import (
    HomeNetwork,
    WatchedNode,
    environment,
    home_network,
    node_at,
    why_no_home,
    why_no_mapping,
)
from tests.e2e.small_run import Watch, small_run, write_text

RELAYED_BYTES: Final = 10**12  # more than is sent
PUBLIC_HOSTS: Final = 5
BYSTANDER, _, _, STRANGER, DIRECT_PLACE = range(PUBLIC_HOSTS)  # the first three begin the run, a node a stage
BATCHES: Final = 6


# ---- a peer ----------------------------------------------------------------------------------------------------------


class Listener:
    """Keeps the first `Reach` of a node's events."""

    def __init__(self) -> None:
        self.found: asyncio.Future[Reach] = asyncio.get_running_loop().create_future()

    def emit(self, event: Event) -> None:
        if isinstance(event, Reach) and not self.found.done():
            self.found.set_result(event)


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def settled(session: NetworkSession, events: Listener) -> Reach:
    """The peer's reach, once a hidden peer has restarted its DHT as a client, which ends the old one's tunnels."""
    reach = await events.found
    async with asyncio.timeout(PATIENCE_S):
        while reach.step == "reverse":
            if session.directory.process_id is not None and session.directory.restarts > 0:
                break
            await asyncio.sleep(0.1)
    return reach


async def receive(session: NetworkSession, counter: TensorCounter, events: Listener) -> None:
    """Serves, reports its step, and confirms every batch; until cancelled."""
    session.own.take(ModuleId(1))
    session.own.state = PeerState.SERVING
    session.membership_sync.announce()
    say(peer=session.own.peer, link=str(session.link))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(confirm_batches(session.transport, counter))
        reach = await settled(session, events)
        say(step=reach.step, reason=reach.reason)


async def send(session: NetworkSession, counter: TensorCounter, events: Listener, receiver: PeerId, step: str) -> None:
    """Waits until the receiver announces its step, and reports the MB/s of each batch."""
    async with asyncio.timeout(PATIENCE_S):
        if step == "relay":
            # A peer that does not know yet that it cannot be dialled would call the other and wait for it.
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
    return step != "relay" or any(via is not None and via.relay for via in map(session.membership.get, known.via))


async def be_a_peer(
    listen: str, run: str = "", link: str = "", to: str = "", step: str = "", relay_bytes: int = 0
) -> None:
    """Runs until stdin ends. Joins the run of `link`; sends to the peer `to`, which has this step, or receives."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=wait, daemon=True).start()
    joined = await full_link(parse_link(link), 30.0) if link else None
    peers = joined.peers if joined else ()
    settings = DirectorySettings(listen, 0, (), peers, relay_bytes_per_hour=relay_bytes)
    counter, events, where = TensorCounter(), Listener(), Whereabouts(listen=listen)
    own_run = joined.run if joined else RunId(run)
    async with present(Identity.generate(), own_run, where, settings, SystemClock(), events) as session:
        receiving = session.dispatcher.registered(
            tensors={MicrobatchTensor: counter}, messages={MicrobatchControl: counter.received_control}
        )
        with receiving:
            async with reachable(ReachMode.AUTO, None, session, events):
                given = session, counter, events
                work = asyncio.create_task(send(*given, PeerId(to), step) if to else receive(*given))
                ending = asyncio.create_task(over.wait())
                await asyncio.wait((work, ending), return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work


# ---- the ladder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A step of the ladder, and how a peer gets there."""

    step: str
    place: int | str  # of the peer, in the `HomeNetwork`
    surroundings: Callable[[HomeNetwork, Path], AbstractContextManager[None]] = lambda network, folder: nullcontext()
    why_not: Callable[[], str | None] = lambda: None
    found: str = ""  # the step that the peer itself reports, if another
    stranger_is_shut: bool = False  # the stranger cannot be dialled either


WAYS = (
    Way("direct", DIRECT_PLACE),
    Way("mapped", "home", lambda network, folder: network.mapping_router(folder, upnp=False), why_no_mapping),
    Way("reverse", "home"),
    Way("relay", "home", found="reverse", stranger_is_shut=True),
)
"""The others are compared with the first."""


@contextmanager
def peer_at(network: HomeNetwork, where: int | str, **words: object) -> Iterator[Callable[[], dict[str, Any]]]:
    """Runs a peer somewhere in the network; a function that returns its next JSON line."""
    listen = "0.0.0.0" if isinstance(where, str) else network.deployment(where).host
    own = json.dumps({"listen": listen, **words})
    command = (*network.inside(where), sys.executable, str(Path(__file__)), "peer", own)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), **pipes)

    def hear() -> dict[str, Any]:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise SystemExit(f"a peer of the benchmark ended with exit code {process.wait()}")
        return dict(json.loads(line))

    try:
        yield hear
    finally:
        process.communicate()


def measure_link(network: HomeNetwork, way: Way) -> tuple[float, float]:
    """Seconds to connect, and MB/s, from a stranger."""
    relayed = RELAYED_BYTES if way.stranger_is_shut else 0
    with peer_at(network, BYSTANDER, run=secrets.token_hex(32), relay_bytes=relayed) as bystander:
        link = str(bystander()["link"])
        with peer_at(network, way.place, link=link) as receiver:
            peer, found = str(receiver()["peer"]), receiver()
            if found["step"] != (way.found or way.step):
                raise SystemExit(f"wanted the step {way.step}, found {found['step']}: {found['reason']}")
            with peer_at(network, STRANGER, link=link, to=peer, step=way.step) as stranger:
                return float(stranger()["connected_s"]), statistics.median(stranger()["mb_per_s"])


async def measure_training(network: HomeNetwork, way: Way, folder: Path, steps: int) -> float:
    """Tokens per second over some steps of a run that needs the peer."""
    manifest = small_run(write_text(folder / "text"), blocks=(0, 1, 1))
    options = LocalSwarmOptions(peers=3, threads=1)

    def deployment(index: int) -> Deployment:
        return network.relaying_deployment(index) if index == BYSTANDER else network.deployment(index)

    async with LocalSwarm(manifest, options, deployments=deployment) as swarm:
        watch = Watch(swarm)
        await watch.step(1)
        link = str(swarm.link)
        async with (
            node_at(network, way.place, folder, link) as peer,
            node_at(network, STRANGER, folder, link, stage=2) as stranger,
        ):
            await _serving_at(peer, way.found or way.step)
            await _serving_at(stranger, "reverse" if way.stranger_is_shut else "direct")
            for index in (1, 2):
                swarm.terminate(index)
                while index not in swarm.ends:
                    await watch.until(lambda event: True)
            times = []
            for number in (swarm.progress.step + 2, swarm.progress.step + 2 + steps):
                event = await watch.step(number)
                assert isinstance(event, Step)
                times.append((time.perf_counter(), event.tokens))
            swarm.request_stop()
            await watch.to_the_end(swarm)
    return rate(times)


async def _serving_at(node: WatchedNode, step: str) -> None:
    """Waits until the node serves. Raises SystemExit if it is reached in another way."""
    reached = await node.reached()
    if reached.step != step:
        raise SystemExit(f"wanted the step {step}, found {reached.step}: {reached.reason}")
    await node.serving()


def measure_way(way: Way, training_steps: int) -> dict[str, float]:
    """Measures one step of the ladder in a network of its own."""
    with kit.folder(None, "reach") as folder, home_network(PUBLIC_HOSTS) as network:
        if way.stranger_is_shut:
            network.shut(STRANGER)
        with way.surroundings(network, folder):
            connect_s, mb_per_s = measure_link(network, way)
            tokens_per_s = asyncio.run(measure_training(network, way, folder, training_steps))
    return {"connect_s": connect_s, "mb_per_s": mb_per_s, "tokens_per_s": tokens_per_s}


def measure(options: Any) -> dict[str, Any]:
    wanted = [way for way in WAYS if way.step in options.steps]
    lacks = {way.step: why_no_home() or way.why_not() for way in wanted}
    found: dict[str, list[dict[str, float]]] = {}
    for number, way in itertools.product(range(options.rounds), wanted):
        if lacks[way.step] is not None:
            continue
        try:
            found.setdefault(way.step, []).append(measure_way(way, options.training_steps))
            tell(f"round {number + 1}, {way.step}: {found[way.step][-1]}")
        except SystemExit as failure:
            lacks[way.step] = f"it failed: {failure}"
    results = {step: {"skipped": lack} if lack else medians(found[step]) for step, lack in lacks.items()}
    direct = results.get(WAYS[0].step, {})
    for own in results.values():
        for share, figure in (("mb_share", "mb_per_s"), ("tokens_share", "tokens_per_s")):
            if figure in own and figure in direct:
                own[share] = round(own[figure] / direct[figure], 3)
    return {"rounds": options.rounds, "steps": results}


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        uvloop.run(be_a_peer(**json.loads(sys.argv[2])))
        sys.exit()
    quick = {"rounds": 1, "training_steps": 3, "steps": ["direct"]}
    kit.run(__doc__, measure, quick, steps=tuple(way.step for way in WAYS), rounds=3, training_steps=40)
