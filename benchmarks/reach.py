"""What each way of being reached costs: bytes and training to a peer at each step of the ladder, against one that is
dialled directly.

    python benchmarks/reach.py [--steps direct mapped reverse] [--rounds N] [--training-steps N]

Everything runs in network namespaces of this machine (root, `ip` and `nft`): public hosts on one wire, and a home
behind a router with address translation; `mapped` also needs miniupnpd. Nothing is told to the peers: each finds its
step itself, and a measurement with another step than the wanted one is an error. Prints one JSON object; a table and
progress go to stderr.

For each step, the median of the rounds:

* `connect_s`: until a stranger on a public host has a link to the peer
* `mb_per_s`: of tensors of 8.39 MB, 4 at a time, from that stranger to the peer (median of 6 batches of 32)
* `tokens_per_s`: of a small run of three stages, each with one node: the data node on a public host, the peer, and a
  third one, also on a public host. For `relay` that third one cannot be dialled either, and the data node relays
  between the two.
"""

from __future__ import annotations

import argparse
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import NodeStatus, Step
from tests.e2e.home_network import HomeNetwork, home_network, why_no_home, why_no_mapping
from tests.e2e.home_node import WatchedNode, environment, node_at
from tests.e2e.small_run import Watch, small_run, write_text

RELAYED_BYTES = 10**12
"""More than is sent: the cap is not what is measured."""
PUBLIC_HOSTS = 5
BYSTANDER, _, _, STRANGER, DIRECT_PLACE = range(PUBLIC_HOSTS)
"""The first three are where a run begins, with one node for each of its stages."""


@dataclass(frozen=True, slots=True)
class Way:
    """A step of the ladder, and what has to be around a peer so that it stands on it."""

    step: str
    place: int | str
    """Of the peer that is reached, in the `HomeNetwork`."""
    surroundings: Callable[[HomeNetwork, Path], AbstractContextManager[None]] = lambda network, folder: nullcontext()
    why_not: Callable[[], str | None] = lambda: None
    """What this machine lacks for it, besides `why_no_home`."""
    found: str = ""
    """What the peer says of itself, if not the step."""
    stranger_is_shut: bool = False
    """Nobody can dial the stranger either."""


WAYS = (
    Way("direct", DIRECT_PLACE),
    Way("mapped", "home", lambda network, folder: network.mapping_router(folder, upnp=False), why_no_mapping),
    Way("reverse", "home"),
    Way("relay", "home", found="reverse", stranger_is_shut=True),
)
"""In this order, the first is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Measured:
    connect_s: float
    mb_per_s: float
    tokens_per_s: float


class PeerProcess:
    """`benchmarks/reach_peer.py` somewhere in the network."""

    def __init__(self, network: HomeNetwork, where: int | str, *arguments: str) -> None:
        listen = "0.0.0.0" if isinstance(where, str) else network.place(where).host
        script = str(Path(__file__).parent / "reach_peer.py")
        command = (*network.inside(where), sys.executable, script, "--listen", listen, *arguments)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def hear(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a peer of the benchmark ended with exit code {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self) -> None:
        self._process.communicate()


@contextmanager
def peer_at(network: HomeNetwork, where: int | str, *arguments: str) -> Iterator[PeerProcess]:
    process = PeerProcess(network, where, *arguments)
    try:
        yield process
    finally:
        process.end()


def measure_link(network: HomeNetwork, way: Way) -> tuple[float, float]:
    """Seconds to connect, and MB/s, from a stranger."""
    relaying = ("--relay-bytes", str(RELAYED_BYTES)) if way.stranger_is_shut else ()
    with peer_at(network, BYSTANDER, "--run", secrets.token_hex(32), *relaying) as bystander:
        link = str(bystander.hear()["link"])
        with peer_at(network, way.place, "--link", link) as receiver:
            peer, found = str(receiver.hear()["peer"]), receiver.hear()
            if found["step"] != (way.found or way.step):
                raise SystemExit(f"wanted the step {way.step}, found {found['step']}: {found['reason']}")
            with peer_at(network, STRANGER, "--link", link, "--to", peer, "--step", way.step) as stranger:
                return float(stranger.hear()["connected_s"]), statistics.median(stranger.hear()["mb_per_s"])


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


def measure(way: Way, training_steps: int) -> Measured:
    """In a network of its own, made and removed."""
    with tempfile.TemporaryDirectory() as name, home_network(PUBLIC_HOSTS) as network:
        folder = Path(name)
        if way.stranger_is_shut:
            network.shut(STRANGER)
        with way.surroundings(network, folder):
            connect_s, mb_per_s = measure_link(network, way)
            tokens_per_s = asyncio.run(measure_training(network, way, folder, training_steps))
    return Measured(connect_s, mb_per_s, tokens_per_s)


def medians(rounds: list[Measured]) -> dict[str, float]:
    """Of what was measured."""
    return {key: round(statistics.median(asdict(one)[key] for one in rounds), 4) for key in asdict(rounds[0])}


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'step':<10}{'connect s':>12}{'MB/s':>10}{'tokens/s':>12}{'of direct':>20}"]
    for result in results:
        if "skipped" in result:
            lines.append(f"{result['step']:<10}skipped: {result['skipped']}")
            continue
        shares = " and ".join(f"{result[key]:.2f}" for key in ("mb_share", "tokens_share") if key in result)
        figures = f"{result['connect_s']:>12.3f}{result['mb_per_s']:>10.0f}{result['tokens_per_s']:>12.0f}"
        lines.append(f"{result['step']:<10}{figures}{shares:>20}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [way.step for way in WAYS]
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of all steps in turn, so that other load meets all of them"
    )
    parser.add_argument("--training-steps", type=int, default=40)
    arguments = parser.parse_args()
    wanted = [way for way in WAYS if way.step in arguments.steps]
    lacks = {way.step: why_no_home() or way.why_not() for way in wanted}
    found: dict[str, list[Measured]] = {}
    for number in range(arguments.rounds):
        for way in wanted:
            if lacks[way.step] is None:
                try:
                    one = measure(way, arguments.training_steps)
                except SystemExit as failure:
                    lacks[way.step] = f"it failed: {failure}"
                    continue
                found.setdefault(way.step, []).append(one)
                print(f"round {number + 1}, {way.step}: {one}", file=sys.stderr)
    results = [results_of(way.step, lacks[way.step], found) for way in wanted]
    print(table(results), file=sys.stderr)
    print(json.dumps({"rounds": arguments.rounds, "steps": results}))


def results_of(step: str, lack: str | None, found: dict[str, list[Measured]]) -> dict[str, Any]:
    if lack is not None:
        return {"step": step, "skipped": lack}
    own = medians(found[step])
    if WAYS[0].step not in found:
        return {"step": step, **own}
    first = medians(found[WAYS[0].step])
    figures = {"mb_share": "mb_per_s", "tokens_share": "tokens_per_s"}
    shares = {share: round(own[figure] / first[figure], 3) for share, figure in figures.items()}
    return {"step": step, **own, **shares}


if __name__ == "__main__":
    main()
