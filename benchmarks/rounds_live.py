"""What rounds cost training: the throughput of a real swarm during its rounds over that between them.

A data node and replicas of one stage on emulated devices (`tests/e2e/emulated.py`). A backward pass takes twice the
`--forward-ms`; links carry 100 Mbit/s. A round lasts from the first snapshot until the last replica has the new anchor,
and one visit longer. `pace_ratio`: completed microbatches a second during rounds over that between them, without the
first round; `computed_ratio`: the same of the devices' computing time. `of_the_emulated`: the throughput over that of
devices that never wait. If it is far below 1, this machine was too slow. `not_of_all`: rounds without a slow replica.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import kit
from benchmarks.kit import all_serve, emulated, notes_of, run_of, tell
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.events import RoundCommitted
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import ModuleId
from tests.e2e.emulated import Network, Spec, read_computed
from tests.e2e.small_run import HOME, read_flights, write_text

MODULE: Final = ModuleId(1)
BLOCKS: Final = (0, 3)
HEADS: Final = 8
ROW: Final = 32
PER_STEP: Final = 4
WINDOW_OF_EACH: Final = 3  # in-flight microbatches for each replica
BYTES_PER_S: Final = 12.5e6
DATA_FORWARD_S: Final = 0.003
BACKWARD_FACTOR: Final = 2.0


class Round(NamedTuple):
    """A round of the stage: begin and end in seconds of the monotonic clock, and the smallest number of members."""

    begun: float
    ended: float
    members: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What is emulated: `peers` replicas of one stage of about `parameters` parameters."""

    peers: int
    parameters: int
    inner_steps: int
    codec: str
    forward_s: float

    @property
    def hidden(self) -> int:
        """The width: a block has 4 matrices of hidden^2, and 3 of 3 hidden^2."""
        unit = 2 * HEADS
        return max(unit, unit * round((self.parameters / (13 * BLOCKS[1])) ** 0.5 / unit))

    @property
    def visit_s(self) -> float:
        return (1 + BACKWARD_FACTOR) * self.forward_s

    def manifest(self, text: Path) -> Manifest:
        """Microbatches are so short that computing them takes little here."""
        size = {"hidden": self.hidden, "heads": HEADS, "feed_forward": 3 * self.hidden, "sequence": ROW}
        return run_of(
            "rounds",
            BLOCKS,
            seed=11,
            **size,
            rows=1,
            microbatches=PER_STEP,
            data={"source": f"path:{text}", "held_out": 0.1},
            sections={"codecs": {"pseudo_gradients": self.codec}},
            inner_steps=self.inner_steps,
            round_seconds=1e6,
            staleness=4,
            inner={"learning_rate": 1e-4},
            schedule={"kind": "constant", "warmup_steps": 5, "total_steps": 100_000},
        )


class Seen(NamedTuple):
    """What a swarm did, in seconds of the monotonic clock."""

    completed: list[float]
    computed: list[tuple[float, float]]  # begin and duration of each computation of a replica
    rounds: list[Round]


async def run(folder: Path, setting: Setting, seconds: float, starting_s: float) -> Seen:
    """Runs the swarm. Raises RuntimeError if nodes do not come up or end, or no round is held."""
    network, flights = folder / "network.json", folder / "flights.json"
    computed = [folder / f"computed-{index}" for index in range(1 + setting.peers)]

    def place(index: int) -> Place:
        own: dict[str, Any] = {"computed": str(computed[index])}
        if index == 0:
            own = {"flights": str(flights), "window": WINDOW_OF_EACH * setting.peers}
        forward_s, rest = setting.forward_s if index else DATA_FORWARD_S, {"bytes_per_s": BYTES_PER_S, **own}
        return emulated(Spec(forward_s, str(network), backward_factor=BACKWARD_FACTOR, **rest))

    manifest = setting.manifest(write_text(folder / "text"))
    options = LocalSwarmOptions(peers=1 + setting.peers, threads=1)
    async with LocalSwarm(manifest, options, places=place) as swarm:
        Network(dict.fromkeys((str(peer.peer) for peer in swarm.peers), "here"), {"here": {"here": 0.0}}).write(network)
        await all_serve(swarm, starting_s)
        tell(f"{1 + setting.peers} nodes serve")
        rounds = await _rounds(swarm, setting.peers, seconds, starting_s)
    completed = sorted(mark.at for mark in read_flights(flights) if mark.kind == HOME)
    return Seen(completed, sorted(itertools.chain.from_iterable(map(read_computed, computed))), rounds)


async def _rounds(swarm: LocalSwarm, replicas: int, seconds: float, first_within_s: float) -> list[Round]:
    """The first round with all replicas, and those of the `seconds` after it."""
    found: dict[int, Round] = {}
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(first_within_s) as limit:
            async for event in swarm.events():
                if swarm.ends:
                    raise RuntimeError(f"a node has ended: {notes_of(swarm)}")
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
            raise RuntimeError(f"no round was held within {first_within_s:.0f} s: {notes_of(swarm)}") from None
    return [found[number] for number in sorted(found)]


def compare(seen: Seen, setting: Setting) -> dict[str, Any]:
    """The figures without the first round. Raises RuntimeError if too few rounds have time after them."""
    rounds, numbers = seen.rounds, range(1, len(seen.completed) + 1)

    def count(begin: float, end: float) -> float:
        before, after = np.interp((begin, end), seen.completed, numbers)
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


def measure(options: Any) -> dict[str, Any]:
    forward_s = options.forward_ms / 1e3
    setting = Setting(options.peers, options.parameters, options.inner_steps, options.codec, forward_s)
    with tempfile.TemporaryDirectory() as name:
        seen = asyncio.run(run(Path(name), setting, options.seconds, options.starting_s))
    return {"live": {**asdict(setting), **compare(seen, setting)}}


if __name__ == "__main__":
    usual = {"seconds": 150.0, "inner_steps": 6, "codec": "int8", "forward_ms": 200.0, "peers": 4}
    quick = {"seconds": 12.0, "inner_steps": 8, "forward_ms": 20.0, "peers": 2, "parameters": 40_000}
    kit.run(__doc__, measure, quick, **usual, parameters=10_000_000, starting_s=600.0)
