"""What each step of the reachability ladder costs: bytes and training to a peer, against one that is dialled directly.

Everything runs in network namespaces of this machine (root, `ip` and `nft`; `mapped` also miniupnpd): public hosts on
one wire, and a home behind a router with address translation. Each peer finds its step itself, and another step than
the wanted one is an error. Medians of the rounds: `connect_s`, until a stranger on a public host has a link to the
peer; `mb_per_s` of tensors of 8.39 MB, 4 at a time, from the stranger to the peer; `tokens_per_s` of a small run of
three stages with one node each: the data node on a public host, the peer, and a third one on a public host. For `relay`
the third one cannot be dialled either, and the data node relays between the two.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import medians, tell
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import NodeStatus, Step
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

RELAYED_BYTES = 10**12
"""More than is sent."""
PUBLIC_HOSTS = 5
BYSTANDER, _, _, STRANGER, DIRECT_PLACE = range(PUBLIC_HOSTS)
"""The first three are where a run begins, with one node for each of its stages."""


@dataclass(frozen=True, slots=True)
class Way:
    """A step of the ladder, and the surroundings in which a peer finds it."""

    step: str
    place: int | str
    """Of the peer that is reached, in the `HomeNetwork`."""
    surroundings: Callable[[HomeNetwork, Path], AbstractContextManager[None]] = lambda network, folder: nullcontext()
    why_not: Callable[[], str | None] = lambda: None
    """What this machine lacks for it, besides `why_no_home`."""
    found: str = ""
    """What the peer says of itself, if not the step."""
    stranger_is_shut: bool = False
    """The stranger cannot be dialled either."""


WAYS = (
    Way("direct", DIRECT_PLACE),
    Way("mapped", "home", lambda network, folder: network.mapping_router(folder, upnp=False), why_no_mapping),
    Way("reverse", "home"),
    Way("relay", "home", found="reverse", stranger_is_shut=True),
)
"""In this order, the first is what the others are compared with."""


@contextmanager
def peer_at(network: HomeNetwork, where: int | str, *arguments: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """Runs `benchmarks/reach_peer.py` somewhere in the network; gives a function that hears the next thing it says."""
    listen = "0.0.0.0" if isinstance(where, str) else network.place(where).host
    script = str(Path(__file__).parent / "reach_peer.py")
    command = (*network.inside(where), sys.executable, script, "--listen", listen, *arguments)
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
    relaying = ("--relay-bytes", str(RELAYED_BYTES)) if way.stranger_is_shut else ()
    with peer_at(network, BYSTANDER, "--run", secrets.token_hex(32), *relaying) as bystander:
        link = str(bystander()["link"])
        with peer_at(network, way.place, "--link", link) as receiver:
            peer, found = str(receiver()["peer"]), receiver()
            if found["step"] != (way.found or way.step):
                raise SystemExit(f"wanted the step {way.step}, found {found['step']}: {found['reason']}")
            with peer_at(network, STRANGER, "--link", link, "--to", peer, "--step", way.step) as stranger:
                return float(stranger()["connected_s"]), statistics.median(stranger()["mb_per_s"])


async def measure_training(network: HomeNetwork, way: Way, folder: Path, steps: int) -> float:
    """Tokens per second of so many steps of a run that the peer is needed for."""
    manifest = small_run(write_text(folder / "text"), blocks=(0, 1, 1))
    options = LocalSwarmOptions(peers=3, threads=1)
    async with LocalSwarm(manifest, options, places=lambda index: _place(network, index)) as swarm:
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
            first = await _step(watch, swarm.progress.step + 2)
            began, before = time.perf_counter(), first.tokens
            last = await _step(watch, first.step + steps)
            rate = (last.tokens - before) / (time.perf_counter() - began)
            swarm.request_stop()
            await watch.to_the_end(swarm)
    return rate


def _place(network: HomeNetwork, index: int) -> Place:
    return network.relaying_place(index) if index == BYSTANDER else network.place(index)


async def _serving_at(node: WatchedNode, step: str) -> None:
    """Until the node serves, and stands where it should."""
    reached = await node.reached()
    if reached.step != step:
        raise SystemExit(f"wanted the step {step}, found {reached.step}: {reached.reason}")
    await node.until(NodeStatus, lambda event: event.state == "serving")


async def _step(watch: Watch, number: int) -> Step:
    event = await watch.step(number)
    assert isinstance(event, Step)
    return event


def measure_way(way: Way, training_steps: int) -> dict[str, float]:
    """In a network of its own, made and removed."""
    with tempfile.TemporaryDirectory() as name, home_network(PUBLIC_HOSTS) as network:
        folder = Path(name)
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
    for number in range(options.rounds):
        for way in wanted:
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


def main() -> None:
    quick = {"rounds": 1, "training_steps": 3, "steps": ["direct"]}
    kit.run(__doc__, measure, quick, steps=tuple(way.step for way in WAYS), rounds=3, training_steps=40)


if __name__ == "__main__":
    main()
