"""Simulated training while peers fail and return, with the speeds and links of a path-planning problem.

Peers notice a failure after NOTICED_AFTER_S and repair paths. Microbatches of a failed data node count as abandoned.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random

from lab.world.arms import PlannerOf
from lab.world.instance import Instance
from lab.world.world import CONTROL_S, Ledger, Peer, World
from swarm.pipeline.custody import LONGEST_LIFETIME_S, SHORTEST_LIFETIME_S, Work
from swarm.pipeline.in_flight import InFlightRules
from swarm.routing.planner import Planner
from swarm.vocabulary.types import PeerId

NOTICED_AFTER_S = 3.0
"""Time from a failure until the peer's links break (a missed keep-alive and a round trip), in seconds."""
AWAY_S = 30.0
"""Time from a failure until the peer returns and serves the same stage, in seconds."""
LIFETIME_IN_PATHS = 20


@dataclass(frozen=True, slots=True)
class Throughput:
    """Counts of microbatches, repairs and failures in a simulated training.

    Args:
        honest: completed microbatches of the data nodes that announce their true visits.
        repaired: hops of completed microbatches that a substitute served.
        alive_share: mean share of the swarm's compute that was alive.
        accumulated: completed microbatches of each stage.
        duplicated: contributions of a microbatch to a stage beyond the first.
        planning_cpu_s: planning time of all data nodes, in seconds.
    """

    launched: int
    completed: int
    honest: int
    abandoned: int
    in_flight: int
    repaired: int
    alive_share: float
    accumulated: dict[int, int]
    duplicated: int
    planning_cpu_s: float


def run_churn(
    instance: Instance,
    seconds: float,
    share_a_minute: float,
    seed: int,
    staleness: int = 1,
    planner_of: PlannerOf = Planner,
    lie: float = 1.0,
) -> Throughput:
    """Simulates training for `seconds` of virtual time while peers fail and return.

    Args:
        share_a_minute: share of the peers that fail per minute.
        staleness: 0: a data node finishes a step before the next one; 1: only its slots limit it.
        planner_of: makes a data node's planner (`lab.world.arms`).
        lie: factor by which the first data node overstates the visits that it announces.
    """
    random = Random(seed)  # noqa: S311 - a repeatable world, not a secret
    world = World(InstanceEnvironment(instance, staleness, random), instance.stages, random, Ledger(), planner_of)
    if lie != 1.0:
        world.overstated[instance.stages[0][0]] = lie
    return _Failures(world, instance, share_a_minute / 60).run(seconds)


class InstanceEnvironment:
    """`Environment` with the speeds and links of a path-planning problem. Every peer announces its true speed."""

    def __init__(self, instance: Instance, staleness: int, random: Random) -> None:
        self._instance, self._costs, self._staleness = instance, instance.costs, staleness
        self._random = random
        self.path_rules = instance.rules
        self.overhead_s = self._costs.task_overhead_s
        backward = self._costs.backward_factor
        self._factors = {
            Work.FORWARD: 1.0,
            Work.LOSS: instance.head_factor,
            Work.BACKWARD: backward,
            Work.REPLAY: 1 + backward,
        }

    def flight_rules(self, data_node: PeerId) -> InFlightRules:
        return InFlightRules(self._instance.microbatches, self._staleness, self._costs.slots[data_node])

    def slots_of(self, peer: PeerId) -> int:
        return self._costs.slots[peer]

    def service_s(self, peer: PeerId) -> float:
        return self._factors[Work.REPLAY] * self._costs.forward_s[peer]

    def compute_s(self, peer: PeerId, work: Work) -> float:
        return self._factors[work] * self._costs.forward_s[peer]

    def message_s(self, here: PeerId, there: PeerId) -> float:
        # A small message never takes longer than a tensor.
        return min(self._random.uniform(CONTROL_S / 2, CONTROL_S), self._costs.message_s[here][there])

    def body_s(self, here: PeerId, there: PeerId) -> float:
        # On average, header and body together take the instance's time.
        return max(0.0, self._costs.message_s[here][there] - CONTROL_S * 3 / 4)

    def silence_s(self) -> float:
        return NOTICED_AFTER_S

    def lifetime_s(self, path_s: float) -> float:
        return min(LONGEST_LIFETIME_S, max(SHORTEST_LIFETIME_S, LIFETIME_IN_PATHS * path_s))


class _Failures:
    """Injector of random failures: every peer fails at the same rate and returns after AWAY_S."""

    def __init__(self, world: World, instance: Instance, rate: float) -> None:
        self._world, self._rate = world, rate
        power = {peer: 1 / max(1e-9, instance.costs.service_s(peer)) for peer in world.peers}
        self._share = {peer: each / sum(power.values()) for peer, each in power.items()}
        self._away_s = 0.0  # Weighted by each peer's share of the compute

    def run(self, seconds: float) -> Throughput:
        for peer in self._world.peers.values():
            self._schedule(peer, seconds)
        self._world.run(seconds)
        return self._report(seconds)

    def _schedule(self, peer: Peer, end: float) -> None:
        if self._rate > 0:
            self._world.time.after(self._world.random.expovariate(self._rate), lambda: self._fail(peer, end))

    def _fail(self, peer: Peer, end: float) -> None:
        self._world.kill(peer)
        self._away_s += min(AWAY_S, end - self._world.time.now) * self._share[peer.id]
        self._world.time.after(AWAY_S, lambda: self._return(peer, end))

    def _return(self, peer: Peer, end: float) -> None:
        self._world.revive(peer)
        self._schedule(self._world.peers[peer.id], end)

    def _report(self, seconds: float) -> Throughput:
        ledger = self._world.ledger
        flying = sum(len(in_flight.entries) for _, in_flight in self._world.data_nodes())
        launched, completed = len(ledger.started), len(ledger.completed)
        per_stage = Counter(hop.module.stage for path in ledger.completed.values() for hop in path.hops)
        return Throughput(
            launched=launched,
            completed=completed,
            honest=sum(microbatch.data_node not in self._world.overstated for microbatch in ledger.completed),
            abandoned=launched - completed - flying,
            in_flight=flying,
            repaired=ledger.repaired_at.total(),
            alive_share=1 - self._away_s / seconds,
            accumulated=dict(sorted(per_stage.items())),
            duplicated=sum(count - 1 for count in ledger.counted.values()),
            planning_cpu_s=ledger.planning_cpu_s,
        )
