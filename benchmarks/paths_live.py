"""Path choice in a real swarm: partial against full paths, and our planner against SWARM's rule, with emulated machines
and links.

    python benchmarks/paths_live.py [--rounds 2] [--seconds 60] [--seed 1] [--window 8] [--arms full partial swarm
    swarm-partial] [--keep DIR]

Real processes, sockets and TLS on this machine, but every node is `tests/e2e/emulated.py`: computations and links take
the time that they would take on machines that are up to four times slower than others, in three regions. So what is
measured is the choice of paths, and not the cores. Every arm has a swarm of its own twice in each round, the arms in
turn: once each step waits for the one before (`iteration_s`), once the nodes run freely (`tokens_per_s`).
`bound_tokens_per_s` is what the stage that can do least could do if all its replicas were always busy. Prints one JSON
object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place, assign_stages
from node.observability.event_json import event_from_json
from node.observability.events import Abandoned, Completed, Step
from protocol.manifest.manifest import Manifest
from tests.e2e.emulated import OURS, SWARM, Network, Spec
from tests.e2e.small_run import small_run, write_text

PEERS: Final = 12
BLOCKS: Final = (1, 1, 1, 1, 1)
"""With twelve peers: three data nodes, three replicas of stage 1 and two of each other stage."""
PER_STEP: Final = 4
"""Microbatches of one step of a data node. As many as stages after stage 0, so that partial paths visit all equally
often in a step."""
WINDOW: Final = 8
"""More than a step, so it only bounds those that run freely. All data nodes together then have about as much under way
as keeps every replica busy."""
FREE_STALENESS: Final = 2
DATA_FORWARD_S: Final = 0.005
SLOWEST: Final = 4.0
REGIONS: Final = ("a", "b", "c")
INSIDE_S: Final = 0.002
ACROSS_S: Final = (0.040, 0.150)
"""One way between continents."""
START_S: Final = 240.0
LOOK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to choose paths."""

    per_path: int
    """Stages after stage 0 that a path visits."""
    rule: str


ARMS: Final = {
    "full": Arm(4, OURS),
    "partial": Arm(3, OURS),
    "swarm": Arm(4, SWARM),
    "swarm-partial": Arm(3, SWARM),
}
RATIOS: Final = {
    "partial_over_full": ("partial", "full"),
    "full_over_swarm": ("full", "swarm"),
    "partial_over_swarm_partial": ("partial", "swarm-partial"),
    "partial_over_swarm": ("partial", "swarm"),
}


@dataclass(frozen=True, slots=True)
class Ground:
    """The machines, by index, and how far apart their regions are."""

    stages: tuple[int, ...]
    forward_s: tuple[float, ...]
    regions: tuple[str, ...]
    one_way_s: dict[str, dict[str, float]]

    def visits_per_s(self, stage: int) -> float:
        """What the stage's replicas can do together if none is ever idle."""
        return sum(1 / self.spec(index).visit_s for index, own in enumerate(self.stages) if own == stage)

    def bound_tokens_per_s(self, per_path: int, tokens: int) -> float:
        """All data nodes together, with equal visits to every stage: what the weakest stage lets through."""
        skippable = range(1, max(self.stages) + 1)
        return tokens * min(self.visits_per_s(stage) for stage in skippable) * len(skippable) / per_path

    def spec(self, index: int, rule: str = OURS, network: Path = Path(), window: int = WINDOW) -> Spec:
        return Spec(self.forward_s[index], str(network), rule=rule, window=window, seed=index)

    def table(self) -> list[dict[str, Any]]:
        rows = zip(self.stages, self.regions, self.forward_s, strict=True)
        return [{"stage": stage, "region": region, "forward_s": seconds} for stage, region, seconds in rows]


def make_ground(seed: int, fastest_s: float) -> Ground:
    """Speeds by chance, evenly on a logarithmic scale; the replicas of each stage in different regions."""
    rng = random.Random(seed)
    stages = tuple(assign_stages(PEERS, BLOCKS))
    forward = [DATA_FORWARD_S if stage == 0 else round(fastest_s * SLOWEST ** rng.random(), 4) for stage in stages]
    decks = {stage: itertools.cycle(rng.sample(REGIONS, len(REGIONS))) for stage in set(stages)}
    one_way = {region: {region: INSIDE_S} for region in REGIONS}
    for one, other in itertools.combinations(REGIONS, 2):
        one_way[one][other] = one_way[other][one] = round(rng.uniform(*ACROSS_S), 4)
    return Ground(stages, tuple(forward), tuple(next(decks[stage]) for stage in stages), one_way)


def run_of(text: Path, arm: Arm, staleness: int) -> Manifest:
    """A model so small that computing it costs nothing next to what is emulated, and no rounds."""
    step = small_run(text).microbatch_tokens * PER_STEP
    aside = {"inner_steps": 1_000_000, "round_seconds": 1e6}
    return small_run(text, blocks=BLOCKS, per_path=arm.per_path, inner_tokens=step, staleness=staleness, **aside)


# ---- one swarm -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What one or more swarms of an arm did while they were measured."""

    steps_s: list[float] = field(default_factory=list)
    """Of single steps of single data nodes."""
    steps_per_s: list[float] = field(default_factory=list)
    """Of all data nodes of one swarm together."""
    visits: Counter[int] = field(default_factory=Counter)
    """By index of the peer."""
    completed: int = 0
    abandoned: int = 0
    failures: int = 0
    """Nodes that ended otherwise than in good order."""

    def add(self, other: Seen) -> None:
        self.steps_s += other.steps_s
        self.steps_per_s += other.steps_per_s
        self.visits += other.visits
        self.completed += other.completed
        self.abandoned += other.abandoned
        self.failures += other.failures


@dataclass(slots=True)
class StepClock:
    """When each data node was first seen to have ended which step, by index."""

    ended: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def look(self, swarm: LocalSwarm) -> None:
        now = time.perf_counter()
        for index, peer in swarm.progress.peers.items():
            if peer.stage == 0 and peer.reported_steps:
                seen = self.ended.setdefault(index, [])
                if not seen or seen[-1][1] < peer.reported_steps:
                    seen.append((now, peer.reported_steps))

    def seconds_a_step(self) -> list[float]:
        pairs = (pair for seen in self.ended.values() for pair in itertools.pairwise(seen[1:]))
        return [(later - before) / (last - first) for (before, first), (later, last) in pairs]

    def steps_per_s(self) -> float:
        """From the first end of a step to the last, each data node by its own."""
        spans = [(seen[1], seen[-1]) for seen in self.ended.values() if len(seen) > 2]
        return sum((last - first) / (later - before) for (before, first), (later, last) in spans)

    def span(self, index: int) -> tuple[int, int]:
        """The last step before the measured ones, and the last measured one."""
        seen = self.ended.get(index, [])
        return (seen[1][1], seen[-1][1]) if len(seen) > 2 else (0, 0)


async def observe(ground: Ground, arm: Arm, manifest: Manifest, folder: Path, options: argparse.Namespace) -> Seen:
    """One swarm, from its start to its end. The first step that a data node ends is left out: it has begun before."""
    network = folder / "network.json"

    def place(index: int) -> Place:
        spec = ground.spec(index, arm.rule, network, options.window)
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    told = LocalSwarmOptions(peers=PEERS, threads=1, log_dir=folder)
    clock = StepClock()
    async with LocalSwarm(manifest, told, places=place) as swarm:
        Network({p.peer: ground.regions[p.index] for p in swarm.peers}, ground.one_way_s).write(network)
        await all_serve(swarm)
        await asyncio.sleep(options.settle)
        until = time.perf_counter() + options.seconds
        while time.perf_counter() < until:
            clock.look(swarm)
            await asyncio.sleep(LOOK_S)
        peers = {peer.peer: peer.index for peer in swarm.peers}
        await swarm.stop()
    seen = Seen(clock.seconds_a_step(), [clock.steps_per_s()])
    seen.failures = sum(end.exit_code != 0 for end in swarm.ends.values())
    for peer, index in peers.items():
        if index in clock.ended:
            count_log(folder, peer, clock.span(index), peers, seen)
    return seen


async def all_serve(swarm: LocalSwarm) -> None:
    """Raises RuntimeError with the swarm's last notes when a node does not come up."""
    until = time.perf_counter() + START_S
    while any(peer.state != "serving" for peer in swarm.progress.peers.values()):
        if time.perf_counter() > until:
            raise RuntimeError(f"not all nodes serve: {swarm.progress.notes}")
        await asyncio.sleep(0.2)


def count_log(folder: Path, peer: str, span: tuple[int, int], indices: dict[str, int], seen: Seen) -> None:
    """Adds what a data node's log says of the measured steps."""
    first, last = span
    step = 0
    for event in events_in(sorted(folder.glob(f"{peer}-*.jsonl"))):
        if isinstance(event, Step):
            step = event.step
        if not first <= step < last:
            continue
        if isinstance(event, Completed):
            seen.completed += 1
            seen.visits.update(indices[hop.partition("@")[2]] for hop in event.hops)
        seen.abandoned += isinstance(event, Abandoned)


def events_in(files: Iterable[Path]) -> Iterator[object]:
    for file in files:
        for line in file.read_bytes().splitlines():
            yield event_from_json(line)


# ---- the report ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """Of one arm: when each step waits for the one before, and when the nodes run freely."""

    waiting: Seen = field(default_factory=Seen)
    free: Seen = field(default_factory=Seen)

    def table(self, ground: Ground, per_path: int, tokens: int) -> dict[str, Any]:
        speeds = [round(steps * PER_STEP * tokens, 1) for steps in self.free.steps_per_s]
        bound = ground.bound_tokens_per_s(per_path, tokens)
        speed = statistics.median(speeds)
        return {
            "iteration_s": round(statistics.median(self.waiting.steps_s), 3),
            "iterations": len(self.waiting.steps_s),
            "waiting_tokens_per_s": round(statistics.median(self.waiting.steps_per_s) * PER_STEP * tokens, 1),
            "tokens_per_s": speed,
            "tokens_per_s_of_rounds": speeds,
            "bound_tokens_per_s": round(bound, 1),
            "share_of_bound": round(speed / bound, 3),
            "visits_per_stage": by_stage(ground, self.free.visits),
            "visits_per_replica": by_replica(ground, self.free.visits),
            "completed": self.waiting.completed + self.free.completed,
            "abandoned": self.waiting.abandoned + self.free.abandoned,
            "failures": self.waiting.failures + self.free.failures,
        }


def by_stage(ground: Ground, visits: Counter[int]) -> dict[int, int]:
    counted: Counter[int] = Counter()
    for index, number in sorted(visits.items()):
        counted[ground.stages[index]] += number
    return dict(sorted(counted.items()))


def by_replica(ground: Ground, visits: Counter[int]) -> dict[int, dict[float, int]]:
    """By stage and the replica's forward time."""
    table: dict[int, dict[float, int]] = {stage: {} for stage in range(1, len(BLOCKS))}
    for index, stage in enumerate(ground.stages):
        if stage:
            table[stage][ground.forward_s[index]] = visits[index]
    return table


def ratios(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the arms that were run."""
    return {
        name: {key: round(arms[one][key] / arms[other][key], 3) for key in ("iteration_s", "tokens_per_s")}
        for name, (one, other) in RATIOS.items()
        if one in arms and other in arms
    }


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All arms in turn, as many rounds as asked for."""
    ground, text = make_ground(options.seed, options.fastest), write_text(folder / "text")
    results = {name: Result() for name in options.arms}
    for number in range(1, options.rounds + 1):
        for name, result in results.items():
            for seen, staleness, kind in ((result.waiting, 0, "waiting"), (result.free, FREE_STALENESS, "free")):
                manifest, logs = run_of(text, ARMS[name], staleness), folder / f"{number}-{name}-{kind}"
                logs.mkdir()
                now = await observe(ground, ARMS[name], manifest, logs, options)
                seen.add(now)
                step_s = statistics.median(now.steps_s)
                tell(
                    f"round {number}, {name}, {kind}: {len(now.steps_s)} steps of {step_s:.2f} s,"
                    f" {now.steps_per_s[0] * PER_STEP * manifest.microbatch_tokens:.0f} tokens/s, "
                    f"{now.abandoned} abandoned"
                )
    tokens = small_run(text).microbatch_tokens
    arms = {name: result.table(ground, ARMS[name].per_path, tokens) for name, result in results.items()}
    swarm = {"seed": options.seed, "machines": ground.table(), "one_way_s": ground.one_way_s, "window": options.window}
    return {
        "benchmark": "paths_live",
        "seconds": options.seconds,
        "rounds": options.rounds,
        "swarm": {**swarm, "microbatches_per_step": PER_STEP, "microbatch_tokens": tokens},
        "arms": arms,
        "ratios": ratios(arms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="that each swarm is measured")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds before that, after all nodes serve")
    parser.add_argument("--seed", type=int, default=1, help="of speeds, regions and delays")
    parser.add_argument(
        "--window", type=int, default=WINDOW, help="microbatches that a data node has under way at most"
    )
    parser.add_argument("--fastest", type=float, default=0.06, help="seconds forward of the fastest machine")
    parser.add_argument("--keep", type=Path, help="new folder for the event logs; a temporary one when absent")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skipstone-paths-") as temporary:
        folder = options.keep or Path(temporary) / "run"
        folder.mkdir(parents=True)
        print(json.dumps(asyncio.run(measure(options, folder))))


if __name__ == "__main__":
    main()
