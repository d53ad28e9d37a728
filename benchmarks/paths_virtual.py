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
from itertools import combinations, repeat
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live_cells import ARMS, CELLS, PEERS, changes_of, make_ground
from benchmarks.live_report import Run, compared, figures, report, table
from benchmarks.live_swarm import Seen, Trial
from benchmarks.rule_planners import RULES, SwarmPlanner, planner_by
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.pipeline.custody_events import Work
from swarm.pipeline.in_flight import Flight, FlightRules
from swarm.routing.negotiation.negotiation_events import TalkRules
from swarm.routing.path_rules import PathRules
from swarm.simulation.churn import NOTICED_AFTER_S, InstanceGround, lifetime_of
from swarm.simulation.negotiation_world import Network
from swarm.simulation.pipeline_data_node import TOKENS, DataNode
from swarm.simulation.pipeline_peer import Peer
from swarm.simulation.pipeline_world import Ground, Ledger, World
from swarm.simulation.problems import problem
from swarm.vocabulary.pipeline_messages import Receipt
from swarm.vocabulary.types import ModuleId, PeerId
from swarm.vocabulary.types import Path as HopPath
from tests.e2e.emulated import Spec
from tests.e2e.small_run import HOME, LAUNCHED, LOST, FlightMark

LEAST_WAY_S: Final = 0.001
"""One way of the smallest message."""
UNEVEN: Final = 0.03
"""Every delay is longer by chance, by such a share at most: no two microbatches come home in step for ever."""
WARM_S: Final = 25.0
PROBLEM_S: Final = 600.0
NOT_HERE: Final = ("share_measured", "machine_load", "swarm_load", "failures", "cold_replicas")
"""Figures of a live swarm that say nothing of a virtual one."""


# ---- the world -------------------------------------------------------------------------------------------------------


class CellGround:
    """The machines and links of a live cell."""

    def __init__(self, trial: Trial, chance: random.Random) -> None:
        cell, arm, machines = trial.cell, ARMS[trial.arm], trial.ground
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
        return DEFAULT_SLOTS if is_data_node else self._cell.hop_slots or DEFAULT_SLOTS

    def service_s(self, peer: PeerId) -> float:
        index = self._index[peer]
        return self.machines.visit_s(index) / self.machines.announced[index]

    def compute_s(self, peer: PeerId, work: Work) -> float:
        index = self._index[peer]
        return Spec(self.machines.forward_s[index], "").compute_s(work) * self._slowed[index] * self._uneven()

    def message_s(self, here: PeerId, there: PeerId) -> float:
        way_s = self.machines.between(self._index[here], self._index[there])
        return (LEAST_WAY_S + way_s) * self._uneven()

    def body_s(self, here: PeerId, there: PeerId) -> float:
        return LEAST_WAY_S

    def silence_s(self) -> float:
        return NOTICED_AFTER_S

    def lifetime_s(self, path_s: float) -> float:
        return lifetime_of(path_s)

    def _uneven(self) -> float:
        return 1 + UNEVEN * self._chance.random()


class _DataNode(DataNode):
    """Launches by the arm's rule, and writes down what becomes of its microbatches."""

    def __init__(self, peer: _Peer) -> None:
        super().__init__(peer)
        self.marks: list[FlightMark] = []
        own, world, rules = peer.announcement, peer.by_rule, self.planner.rules
        planner = planner_by(
            world.rule, rules, peer.membership, self._measured, own=own, tokens=TOKENS, seed=world.seed
        )
        self._swarm = planner.rule if isinstance(planner, SwarmPlanner) else None
        self.planner = planner or self.planner

    def started(self, flight: Flight) -> None:
        super().started(flight)
        self._mark(LAUNCHED, flight.path)
        if self._swarm is not None:
            self._swarm.launched(flight.microbatch, flight.path, self.world.time.now)

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        if self._swarm is not None and receipt.microbatch.data_node == self.peer.id:
            self._swarm.passed(sender, receipt, self.world.time.now)
        super().passed(sender, receipt)

    def completed(self, flight: Flight, path: HopPath) -> None:
        super().completed(flight, path)
        self._mark(HOME, path)
        if self._swarm is not None:
            self._swarm.ended(flight.microbatch, path)

    def abandoned(self, flight: Flight) -> None:
        super().abandoned(flight)
        self._mark(LOST, flight.path)
        if self._swarm is not None:
            self._swarm.ended(flight.microbatch, None)

    def _mark(self, kind: str, path: HopPath) -> None:
        peers = tuple(str(hop.peer) for hop in path.hops)
        self.marks.append(FlightMark(self.world.time.now, kind, peers, measured=0))


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

    def flights(self) -> dict[PeerId, list[FlightMark]]:
        """Of each data node, from its start on."""
        nodes = {peer.id: peer.data_node for peer in self.peers.values()}
        return {peer: node.marks for peer, node in nodes.items() if isinstance(node, _DataNode)}


def peer_names() -> list[PeerId]:
    return [PeerId(f"peer-{index:02}") for index in range(PEERS)]


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured(cell_name: str, arm: str, seed: int, seconds: float) -> Run:
    """The figures of one swarm, as `benchmarks.live_report` makes them of a live one."""
    cell, chance = CELLS[cell_name], random.Random(f"{cell_name} {seed} {arm}")
    machines = make_ground(seed, cell.links)
    trial = Trial(cell_name, cell, arm, seed, machines, Path())
    ground, indices = CellGround(trial, chance), {str(name): index for index, name in enumerate(peer_names())}
    stages = [[peer_names()[index] for index in machines.replicas(stage)] for stage in range(max(machines.stages) + 1)]
    world = RuleWorld(ARMS[arm].rule, seed, ground, stages, chance)
    world.run(WARM_S)
    begun, changed_at = world.time.now, list[float]()
    for change in changes_of(cell, machines, seed, seconds):
        world.run(max(0.0, begun + change.after_s - world.time.now))
        ground.slow(change.index, change.factor)
        changed_at.append(world.time.now)
    world.run(begun + seconds - world.time.now)
    flights = {indices[peer]: marks for peer, marks in world.flights().items()}
    seen = Seen(begun, world.time.now, WARM_S, (), flights, indices, tuple(changed_at), None, None, 0)
    return {key: figure for key, figure in figures(trial, seen, TOKENS).items() if key not in NOT_HERE}


def completed_of(problem_seed: int, rule: str, seconds: float) -> int:
    """Microbatches of an unlike swarm that launches as fast as it can."""
    instance, chance = problem(problem_seed), random.Random(f"{problem_seed} {rule}")
    ground = InstanceGround(instance, Network(), TalkRules(None), 1, chance)
    world = RuleWorld(rule, problem_seed, ground, instance.costs.stages, chance)
    world.run(seconds)
    return len(world.ledger.completed)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=tuple(CELLS), default=["A1", "A2", "B1", "B3", "C", "E"])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), help="those of each cell when absent")
    parser.add_argument("--seeds", type=int, default=12, help="grounds: 1 to so many")
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual ones, that each swarm is measured")
    parser.add_argument("--problems", type=int, default=0, help="unlike swarms: 1 to so many")
    options = parser.parse_args()
    trials = [
        (name, arm, seed, options.seconds)
        for name in options.cells
        for seed in range(1, options.seeds + 1)
        for arm in options.arms or CELLS[name].arms
    ]
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(measured, *zip(*trials, strict=True)))
        problems = range(1, options.problems + 1)
        completed = {
            rule: list(pool.map(completed_of, problems, repeat(rule), repeat(PROBLEM_S)))
            for rule in (RULES if problems else ())
        }
    cells, of_problems = report(runs), report_of_problems(completed)
    print(table(cells), file=sys.stderr)
    for pair, ratio in of_problems["ratios"].items():
        print(f"problems {pair}: {ratio.get('geometric_mean')} {ratio.get('interval')}", file=sys.stderr)
    settings = {"benchmark": "paths_virtual", "seconds": options.seconds}
    print(json.dumps(settings | {"cells": cells, "problems": of_problems, "runs": runs}))


if __name__ == "__main__":
    main()
