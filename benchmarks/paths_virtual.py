"""The cells of `benchmarks/paths_live.py` in virtual time: the node's own machines, on the same grounds, by the same
rules, without a clock to wait for.

    python benchmarks/paths_virtual.py [--cells A1 A2 B1 B3 C E] [--seeds 12] [--arms ours swarm greedy] [--seconds 120]
    [--problems 24]

A swarm of two minutes takes a second or so, so many grounds can be asked: what a few live swarms say of a cell is as
much about their seeds. Custody, planner, negotiator, membership and measurements are the node's
(`swarm.simulation.pipeline_world`); computing and sending are delays. With `--problems` also the unlike swarms of
`swarm.simulation.problems`, in which data nodes launch as fast as each can and stages are skipped. Prints one JSON
object, by cell the figures by seed and the ratios of arms with their intervals; a table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise, repeat
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live_cells import (
    ABROAD,
    ARMS,
    CELLS,
    DATA_WORK,
    PEERS,
    SLOWED_BY,
    STEP_S,
    TOKENS_PER_S,
    Cell,
    changes_of,
    make_ground,
)
from benchmarks.live_cells import Ground as Machines
from benchmarks.live_report import Run, compared, count_between, recovered_s
from benchmarks.rule_planners import GreedyPlanner, SwarmPlanner
from swarm.pipeline.custody_states import Work
from swarm.pipeline.in_flight import Flight, FlightRules
from swarm.pipeline.ledger import LONGEST_LIFETIME_S, SHORTEST_LIFETIME_S
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.path_rules import PathRules
from swarm.simulation.churn import LIFETIME_IN_PATHS, NOTICED_AFTER_S, InstanceGround
from swarm.simulation.negotiation_world import Network
from swarm.simulation.pipeline_data_node import TOKENS, DataNode
from swarm.simulation.pipeline_peer import Peer
from swarm.simulation.pipeline_world import Ground, Ledger, World
from swarm.simulation.problems import problem
from swarm.vocabulary.pipeline_messages import Receipt
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from swarm.vocabulary.types import Path as HopPath

LEAST_WAY_S: Final = 0.001
"""One way of the smallest message."""
UNEVEN: Final = 0.03
"""Every delay is longer by chance, by such a share at most: no two microbatches come home in step for ever."""
WARM_S: Final = 25.0
BACKWARD: Final = 2.0
FACTORS: Final = {Work.FORWARD: 1.0, Work.BACKWARD: BACKWARD, Work.REPLAY: 1.0 + BACKWARD}
DATA_FACTORS: Final = FACTORS | {Work.LOSS: DATA_WORK - 1.0 - BACKWARD}
HOP_SLOTS: Final = 16
PROBLEM_S: Final = 600.0
RULES: Final = ("ours", "swarm", "greedy")


@dataclass(frozen=True, slots=True)
class Trial:
    """One swarm that is to be measured."""

    cell_name: str
    arm: str
    seed: int
    seconds: float

    @property
    def cell(self) -> Cell:
        return CELLS[self.cell_name]


# ---- the world -------------------------------------------------------------------------------------------------------


class CellGround:
    """The machines and links of a live cell."""

    def __init__(self, trial: Trial, machines: Machines, chance: random.Random) -> None:
        cell, arm = trial.cell, ARMS[trial.arm]
        self._cell, self._chance, self.machines = cell, chance, machines
        self._index = {name: index for index, name in enumerate(peer_names())}
        self._slowed = dict.fromkeys(range(PEERS), 1.0)
        self.path_rules = PathRules(max(machines.stages) + 1, cell.visited(arm), visit_ratio=arm.visit_ratio)
        self.talk = TalkRules(None)
        self.overhead_s = 0.0

    def slow(self, index: int, factor: float) -> None:
        """From now on."""
        self._slowed[index] = factor

    def flight_rules(self, data_node: PeerId) -> FlightRules:
        return FlightRules(self._cell.per_step, self._cell.staleness, self._cell.window)

    def slots_of(self, peer: PeerId) -> int:
        is_data_node = self.machines.stages[self._index[peer]] == 0
        return HOP_SLOTS if is_data_node else self._cell.hop_slots or HOP_SLOTS

    def service_s(self, peer: PeerId) -> float:
        index = self._index[peer]
        return self.machines.visit_s(index) / self.machines.announced[index]

    def compute_s(self, peer: PeerId, work: Work) -> float:
        index = self._index[peer]
        factor = (FACTORS if self.machines.stages[index] else DATA_FACTORS)[work]
        return factor * self.machines.forward_s[index] * self._slowed[index] * self._uneven()

    def message_s(self, here: PeerId, there: PeerId) -> float:
        way_s = self.machines.between(self._index[here], self._index[there])
        return (LEAST_WAY_S + way_s) * self._uneven()

    def body_s(self, here: PeerId, there: PeerId) -> float:
        return LEAST_WAY_S

    def silence_s(self) -> float:
        return NOTICED_AFTER_S

    def lifetime_s(self, path_s: float) -> float:
        return min(LONGEST_LIFETIME_S, max(SHORTEST_LIFETIME_S, LIFETIME_IN_PATHS * path_s))

    def _uneven(self) -> float:
        return 1 + UNEVEN * self._chance.random()


class _DataNode(DataNode):
    """Launches by the arm's rule, and writes down when microbatches come home."""

    def __init__(self, peer: _Peer) -> None:
        super().__init__(peer)
        self.home: list[tuple[float, HopPath]] = []
        self._swarm: SwarmPlanner | None = None
        world = peer.by_rule
        if world.rule == "swarm":
            chance = random.Random(f"{world.seed} {peer.id}")
            self._swarm = SwarmPlanner(self.planner.rules, peer.membership, self._measured, TOKENS, chance)
            self.planner = self._swarm
        elif world.rule == "greedy":
            self.planner = GreedyPlanner(self.planner.rules, peer.membership, self._measured, peer.announcement)

    def started(self, flight: Flight) -> None:
        super().started(flight)
        if self._swarm is not None:
            self._swarm.rule.launched(flight.microbatch, flight.path, self.world.time.now)

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        if self._swarm is not None and receipt.microbatch.data_node == self.peer.id:
            self._swarm.rule.passed(sender, receipt, self.world.time.now)
        super().passed(sender, receipt)

    def completed(self, flight: Flight, path: HopPath) -> None:
        super().completed(flight, path)
        self.home.append((self.world.time.now, path))
        self._ended(flight.microbatch, path)

    def abandoned(self, flight: Flight) -> None:
        super().abandoned(flight)
        self._ended(flight.microbatch, None)

    def _ended(self, microbatch: MicrobatchId, path: HopPath | None) -> None:
        if self._swarm is not None:
            self._swarm.rule.ended(microbatch, path)


class _Peer(Peer):
    @property
    def by_rule(self) -> RuleWorld:
        assert isinstance(self.world, RuleWorld)
        return self.world

    def new_data_node(self) -> DataNode:
        return _DataNode(self)


class RuleWorld(World):
    """A swarm whose data nodes go by one rule."""

    def __init__(
        self, rule: str, seed: int, ground: Ground, stages: Sequence[Sequence[PeerId]], chance: random.Random
    ) -> None:
        self.rule, self.seed = rule, seed
        super().__init__(ground, stages, chance, Ledger())

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        return _Peer(self, own, module, incarnation)

    def homecomings(self) -> dict[PeerId, list[tuple[float, HopPath]]]:
        """Of each data node, in order."""
        nodes = {peer.id: peer.data_node for peer in self.peers.values()}
        return {peer: node.home for peer, node in nodes.items() if isinstance(node, _DataNode)}


def peer_names() -> list[PeerId]:
    return [PeerId(f"peer-{index:02}") for index in range(PEERS)]


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured(trial: Trial) -> Run:
    """The figures of one swarm."""
    cell, chance = trial.cell, random.Random(f"{trial.cell_name} {trial.seed} {trial.arm}")
    machines = make_ground(trial.seed, cell.links)
    ground = CellGround(trial, machines, chance)
    names = list(zip(peer_names(), machines.stages, strict=True))
    stages = [[name for name, own in names if own == stage] for stage in range(max(machines.stages) + 1)]
    world = RuleWorld(ARMS[trial.arm].rule, trial.seed, ground, stages, chance)
    world.run(WARM_S)
    begun = world.time.now
    changes = changes_of(cell, machines, trial.seed, trial.seconds)
    for change in changes:
        world.run(max(0.0, begun + change.after_s - world.time.now))
        ground.slow(change.index, change.factor)
    world.run(begun + trial.seconds - world.time.now)
    per_path = cell.visited(ARMS[trial.arm])
    own = {peer: [(at, path) for at, path in home if at >= begun] for peer, home in world.homecomings().items()}
    completed = sum(map(len, own.values()))
    per_s, bound = completed / trial.seconds, machines.bound_per_s(per_path)
    run: Run = {
        "cell": trial.cell_name,
        "arm": trial.arm,
        "seed": trial.seed,
        TOKENS_PER_S: round(TOKENS * per_s, 1),
        "share_of_bound": round(per_s / bound, 3),
        "x": round(cell.in_flight / machines.knee(per_path), 3),
        ABROAD: round(_abroad(machines, own), 3),
        "completed": completed,
    }
    if cell.staleness == 0:
        run[STEP_S] = round(_step_s([[at for at, _ in home] for home in own.values()], cell.per_step), 4)
    if cell.changes == "once":
        at, victim = begun + changes[0].after_s, changes[0].index
        left = machines.slowed(victim, SLOWED_BY).bound_per_s(per_path)
        home = sorted(moment for of in own.values() for moment, _ in of)
        run |= {
            "tokens_after_change": TOKENS * count_between(home, at, at + 30.0),
            "recovered_s": recovered_s(home, at, world.time.now, left),
        }
    return run


def completed_of(problem_seed: int, rule: str, seconds: float) -> int:
    """Microbatches of an unlike swarm that launches as fast as it can."""
    instance, chance = problem(problem_seed), random.Random(f"{problem_seed} {rule}")
    ground = InstanceGround(instance, Network(), TalkRules(None), 1, chance)
    world = RuleWorld(rule, problem_seed, ground, instance.costs.stages, chance)
    world.run(seconds)
    return len(world.ledger.completed)


def _step_s(homecomings: Sequence[Sequence[float]], per_step: int) -> float:
    """Mean over the data nodes."""
    means = []
    for home in homecomings:
        ends = home[per_step - 1 :: per_step]
        means.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return sum(means) / len(means)


def _abroad(machines: Machines, home: dict[PeerId, list[tuple[float, HopPath]]]) -> float:
    index = {name: at for at, name in enumerate(peer_names())}
    abroad = ways = 0
    for data_node, paths in home.items():
        for _, path in paths:
            stops = [index[peer] for peer in (data_node, *(hop.peer for hop in path.hops), data_node)]
            ways += len(stops) - 1
            abroad += sum(machines.regions[a] != machines.regions[b] for a, b in pairwise(stops))
    return abroad / max(1, ways)


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """By cell: the ratios of arms by seed, and the means of what they had of the bound."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(run["cell"] for run in runs):
        own = [run for run in runs if run["cell"] == name]
        arms = list(dict.fromkeys(run["arm"] for run in own))
        figure = CELLS[name].figure
        found[name] = {
            "figure": figure,
            "share_of_bound": {a: _mean(own, a, "share_of_bound") for a in arms},
            ABROAD: {a: _mean(own, a, ABROAD) for a in arms},
            "ratios": {f"{one} / {other}": compared(own, figure, one, other) for one, other in combinations(arms, 2)},
        }
        if any("recovered_s" in run for run in own):
            found[name]["recovered_s"] = {a: median(r["recovered_s"] for r in own if r["arm"] == a) for a in arms}
    return found


def report_of_problems(completed: dict[str, list[int]]) -> dict[str, Any]:
    """Ratios of rules, as `compared` has them."""
    runs = [
        {"arm": rule, "seed": seed, "completed": count}
        for rule, counts in completed.items()
        for seed, count in enumerate(counts, start=1)
    ]
    pairs = combinations(completed, 2)
    ratios = {f"{one} / {other}": compared(runs, "completed", one, other) for one, other in pairs}
    return {"completed": completed, "ratios": ratios}


def _mean(runs: Sequence[Run], arm: str, figure: str) -> float:
    return round(fmean(run[figure] for run in runs if run["arm"] == arm), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=tuple(CELLS), default=["A1", "A2", "B1", "B3", "C", "E"])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), help="those of each cell when absent")
    parser.add_argument("--seeds", type=int, default=12, help="grounds: 1 to so many")
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual ones, that each swarm is measured")
    parser.add_argument("--problems", type=int, default=0, help="unlike swarms: 1 to so many")
    options = parser.parse_args()
    trials = [
        Trial(name, arm, seed, options.seconds)
        for name in options.cells
        for seed in range(1, options.seeds + 1)
        for arm in options.arms or CELLS[name].arms
    ]
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(measured, trials))
        problems = range(1, options.problems + 1)
        completed = {
            rule: list(pool.map(completed_of, problems, repeat(rule), repeat(PROBLEM_S)))
            for rule in (RULES if problems else ())
        }
    cells, of_problems = report(runs), report_of_problems(completed)
    for name, cell in cells.items():
        print(f"{name}: of the bound {cell['share_of_bound']}, abroad {cell[ABROAD]}", file=sys.stderr)
        for pair, ratio in cell["ratios"].items():
            print(f"  {cell['figure']} {pair}: {ratio.get('geometric_mean')} {ratio.get('interval')}", file=sys.stderr)
    for pair, ratio in of_problems["ratios"].items():
        print(f"problems {pair}: {ratio.get('geometric_mean')} {ratio.get('interval')}", file=sys.stderr)
    settings = {"benchmark": "paths_virtual", "seconds": options.seconds}
    print(json.dumps(settings | {"cells": cells, "problems": of_problems, "runs": runs}))


if __name__ == "__main__":
    main()
