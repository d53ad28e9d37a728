"""Training's pace during rounds over its pace between them, in a real swarm of nodes with emulated devices.

    python benchmarks/rounds_live.py [--seconds 150] [--inner-steps 6] [--codec int8] [--forward-ms 200]
                                     [--peers 4] [--parameters 10000000] [--starting-s 600]

Real processes, sockets and TLS on this machine, but every node is `tests/e2e/emulated.py`: a data node, and `--peers`
replicas of one stage of so many parameters (ten million are 40 MB), whose visit takes `--forward-ms` out and twice that
back; each link carries 100 Mbit/s each way. Rounds are real: agreement, snapshot, exchange, outer step, carrying over.
A small one, to see that it runs: `--seconds 8 --inner-steps 8 --forward-ms 20 --peers 2 --parameters 40000`.

A round lasts from the moment the first replica has its snapshot until the last one stands on the new anchor, and a
visit longer, for what came home late because of it. `pace_ratio` is the rate of microbatches that come home to the data
node during rounds over that between rounds, all rounds together after the first; of the one that is under way at a
border, the share of the time since the last. `ratios` is that of each round over the time between it and the next, so
both were measured beside the same other work, and `median_ratio` theirs. `of_the_emulated` is the pace over that of
devices which never wait: where it is far below 1, the machine had no time for so many nodes, and the ratio says little.
`not_of_all` are rounds that went on without a replica that was too slow.

A round sees some 25 microbatches come home, so that one more or less at its borders is 4 % of its ratio, and what is
half done at its end counts for the time after it. `computed_ratio` knows no borders: it is the share of the time that
devices compute during rounds over that between them (`computed`, both). It is the pace as long as nothing is computed
twice or in vain: `computed_of_home` is all of it over what the microbatches took that came home meanwhile.

Nodes get `--starting-s` seconds to come up, and as many again until the first round. Prints one JSON object, or in a
sentence why there is none; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live_swarm import all_serve, tell
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import RoundCommitted
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.types import ModuleId
from tests.e2e.emulated import Network, Spec, read_computed
from tests.e2e.flight_record import HOME, read_flights
from tests.e2e.small_run import write_text

MODULE: Final = ModuleId(1)
BLOCKS: Final = (0, 3)
HEADS: Final = 8
ROW: Final = 32
PER_STEP: Final = 4
WINDOW_OF_EACH: Final = 3
"""Microbatches under way for each replica."""
BYTES_PER_S: Final = 12.5e6
DATA_FORWARD_S: Final = 0.003
BACKWARD_FACTOR: Final = 2.0


class Round(NamedTuple):
    """A round of the stage, by the monotonic clock."""

    begun: float
    ended: float
    members: int
    """Fewer than all where one was too slow."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is emulated."""

    peers: int
    """Replicas of the one stage."""
    parameters: int
    """Of that stage, more or less."""
    inner_steps: int
    codec: str
    forward_s: float

    @property
    def hidden(self) -> int:
        """The width of a stage of so many parameters: a block has 4 matrices of hidden^2, and 3 of three times that."""
        unit = 2 * HEADS
        return max(unit, unit * round((self.parameters / (13 * BLOCKS[1])) ** 0.5 / unit))

    @property
    def visit_s(self) -> float:
        """Out and back."""
        return (1 + BACKWARD_FACTOR) * self.forward_s

    def manifest(self, text: Path) -> Manifest:
        """Microbatches are so short that computing them takes little here."""
        model = {"vocabulary": 257, "hidden": self.hidden, "heads": HEADS, "kv_heads": HEADS, "sequence": ROW}
        return manifest_from_table(
            {
                "protocol": 2,
                "name": "rounds",
                "seed": 11,
                "model": {**model, "feed_forward": 3 * self.hidden},
                "stages": {"blocks": BLOCKS},
                "data": {"source": f"path:{text}", "held_out": 0.1},
                "codecs": {"pseudo_gradients": self.codec},
                "training": {
                    "rows": 1,
                    "inner_tokens": ROW * PER_STEP,
                    "inner_steps": self.inner_steps,
                    "round_seconds": 1e6,
                    "staleness": 4,
                    "inner": {"learning_rate": 1e-4},
                    "schedule": {"kind": "constant", "warmup_steps": 5, "total_steps": 100_000},
                },
            }
        )


class Seen(NamedTuple):
    """What a run did, by the monotonic clock."""

    homes: list[float]
    """When microbatches came home."""
    computed: list[tuple[float, float]]
    """When each computation of a replica began, and its seconds."""
    rounds: list[Round]


async def run(folder: Path, setting: Setting, seconds: float, starting_s: float) -> Seen:
    """Runs the swarm.

    Raises:
        RuntimeError: nodes do not come up or end, or no round is held; says so in a sentence.
    """
    network, flights = folder / "network.json", folder / "flights.json"
    computed = [folder / f"computed-{index}" for index in range(1 + setting.peers)]

    def place(index: int) -> Place:
        own: dict[str, Any] = {"computed": str(computed[index])}
        if index == 0:
            own = {"flights": str(flights), "window": WINDOW_OF_EACH * setting.peers}
        spec = Spec(
            setting.forward_s if index else DATA_FORWARD_S,
            str(network),
            backward_factor=BACKWARD_FACTOR,
            bytes_per_s=BYTES_PER_S,
            **own,
        )
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    manifest = setting.manifest(write_text(folder / "text"))
    options = LocalSwarmOptions(peers=1 + setting.peers, threads=1)
    async with LocalSwarm(manifest, options, places=place) as swarm:
        names = {peer.peer: "here" for peer in swarm.peers}
        Network({str(peer): name for peer, name in names.items()}, {"here": {"here": 0.0}}).write(network)
        await all_serve(swarm, starting_s)
        tell(f"{1 + setting.peers} nodes serve")
        rounds = await _rounds(swarm, setting.peers, seconds, starting_s)
    homes = sorted(mark.at for mark in read_flights(flights) if mark.kind == HOME)
    return Seen(homes, sorted(itertools.chain.from_iterable(map(read_computed, computed))), rounds)


async def _rounds(swarm: LocalSwarm, replicas: int, seconds: float, first_within_s: float) -> list[Round]:
    """The first of all replicas, and those of so many seconds after it."""
    found: dict[int, Round] = {}
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(first_within_s) as limit:
            async for event in swarm.events():
                if swarm.ends:
                    raise RuntimeError(f"a node has ended: {_notes(swarm)}")
                if not isinstance(event, RoundCommitted) or event.module != str(MODULE):
                    continue
                now, members = time.monotonic(), len(event.members)
                tell(f"round {event.round} of {members}: {event.seconds:.2f} s, {event.sent_bytes} bytes")
                if not found and members < replicas:
                    continue  # the others are not there yet
                if not found:
                    limit.reschedule(loop.time() + seconds)
                begun, _, fewest = found.get(event.round, (now, now, replicas))
                found[event.round] = Round(min(begun, now - event.seconds), now, min(fewest, members))
    except TimeoutError:
        if not found:
            raise RuntimeError(f"no round was held within {first_within_s:.0f} s: {_notes(swarm)}") from None
    return [found[number] for number in sorted(found)]


def _notes(swarm: LocalSwarm) -> str:
    said = "; ".join(note.message for note in swarm.progress.notes) or "nothing"
    return f"the nodes say: {said}"


def compare(seen: Seen, setting: Setting) -> dict[str, Any]:
    """The paces. The first round is left out: until then the swarm has not found its pace.

    Raises:
        RuntimeError: there are too few rounds, or none with time after it.
    """
    homes, rounds, numbers = seen.homes, seen.rounds, range(1, len(seen.homes) + 1)

    def count(begin: float, end: float) -> float:
        before, after = np.interp((begin, end), homes, numbers)
        return float(after - before)

    def computed(begin: float, end: float) -> float:
        return sum(max(0.0, min(end, at + lasts) - max(begin, at)) for at, lasts in seen.computed)

    pairs = []
    for this, following in itertools.pairwise(rounds[1:]):
        late = this.ended + setting.visit_s
        if following.begun > late and count(late, following.begun):
            spans = (this.begun, late), (late, following.begun)
            pairs.append([figure for span in spans for figure in (count(*span), computed(*span), span[1] - span[0])])
    if not pairs:
        raise RuntimeError("fewer than three rounds, or no time between them: give it more --seconds or --inner-steps")
    inside, busy_inside, inside_s, between, busy_between, between_s = map(sum, zip(*pairs, strict=True))
    ratios = [round((a / a_s) / (b / b_s), 3) for a, _, a_s, b, _, b_s in pairs]
    full = setting.peers / setting.visit_s
    shares = busy_inside / inside_s / setting.peers, busy_between / between_s / setting.peers
    return {
        "pace_ratio": round((inside / inside_s) / (between / between_s), 4),
        "median_ratio": round(statistics.median(ratios), 3),
        "computed_ratio": round(shares[0] / shares[1], 4),
        "ratios": ratios,
        "rounds": len(pairs),
        "not_of_all": sum(each.members < setting.peers for each in rounds),
        "median_round_s": round(statistics.median(each.ended - each.begun for each in rounds), 2),
        "share_in_rounds": round(inside_s / (inside_s + between_s), 3),
        "of_the_emulated": [round(inside / inside_s / full, 3), round(between / between_s / full, 3)],
        "computed": [round(share, 4) for share in shares],
        "computed_of_home": round((busy_inside + busy_between) / ((inside + between) * setting.visit_s), 3),
        "microbatches": [round(inside, 1), round(between, 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--inner-steps", type=int, default=6)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--forward-ms", type=float, default=200.0)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--starting-s", type=float, default=600.0)
    chosen = parser.parse_args()
    setting = Setting(chosen.peers, chosen.parameters, chosen.inner_steps, chosen.codec, chosen.forward_ms / 1e3)
    with tempfile.TemporaryDirectory() as name:
        try:
            figures = compare(asyncio.run(run(Path(name), setting, chosen.seconds, chosen.starting_s)), setting)
        except RuntimeError as error:
            raise SystemExit(f"no figures: {error}") from None
    print(json.dumps({**figures, "codec": chosen.codec, "forward_ms": chosen.forward_ms, "peers": chosen.peers}))


if __name__ == "__main__":
    main()
