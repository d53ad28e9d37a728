"""Training under churn in virtual time: peers die and come back while microbatches are under way.

Peers are the node's own machines (`lab.world.world`); computers and links are as an instance says.
Data nodes launch as fast as each can, or wait for their steps. A death is noticed after `NOTICED_AFTER_S`;
from then on whoever holds a microbatch that was at the dead peer, or on its way there, repairs its path as nodes do. A
data node that dies takes its microbatches with it; they are abandoned, and count nowhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from lab.world.arms import PlannerOf
from lab.world.instance import Instance
from lab.world.world import CONTROL_S, Ledger, Peer, World
from swarm.pipeline.custody import LONGEST_LIFETIME_S, SHORTEST_LIFETIME_S
from swarm.pipeline.custody_events import Work
from swarm.pipeline.in_flight import InFlightRules
from swarm.routing.planner import Planner
from swarm.vocabulary.types import PeerId

NOTICED_AFTER_S = 3.0
"""From a death to the moment when its links break: a missed keep-alive and a round trip."""
AWAY_S = 30.0
"""How long a peer is away; then it, or another like it, serves the same stage."""
LIFETIME_IN_PATHS = 20


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was done.

    Args:
        alive_share: mean share of the swarm's compute that was alive.
        repaired: hops of completed microbatches at which another peer stood in.
        accumulated: for each stage, how many completed microbatches it was part of.
        duplicated: contributions beyond one of a microbatch to a stage.
        planning_cpu_s: of all data nodes together.
    """

    launched: int
    completed: int
    abandoned: int
    under_way: int
    repaired: int
    alive_share: float
    accumulated: dict[int, int]
    duplicated: int
    planning_cpu_s: float


def lifetime_of(path_s: float) -> float:
    """Seconds that a microbatch may be without news, by what its path should take with empty queues."""
    return min(LONGEST_LIFETIME_S, max(SHORTEST_LIFETIME_S, LIFETIME_IN_PATHS * path_s))


def share_of_ideal(churned: Throughput, calm: Throughput) -> float:
    """Completed microbatches as a share of what the compute that was alive would have done without churn."""
    return churned.completed / max(1e-9, calm.completed * churned.alive_share)


def run_churn(
    instance: Instance,
    seconds: float,
    share_a_minute: float,
    seed: int,
    staleness: int = 1,
    planner_of: PlannerOf = Planner,
) -> Throughput:
    """Trains for so many virtual seconds while that share of the peers dies every minute.

    Args:
        share_a_minute: 0 for none; 0.5 for half of the peers a minute.
        staleness: with 0 a data node's steps, of as many microbatches as the instance says, wait for each other; with 1
            only its slots hold it back.
        planner_of: see `lab.world.arms`.
    """
    random = Random(seed)  # noqa: S311 - a repeatable world, not a secret
    ground = InstanceGround(instance, staleness, random)
    world = World(ground, instance.costs.stages, random, Ledger(), planner_of)
    return _Deaths(world, instance, share_a_minute / 60).run(seconds)


class InstanceGround:
    """Machines and links as an instance says, everybody known to be as fast as it is."""

    def __init__(self, instance: Instance, staleness: int, random: Random) -> None:
        self._instance, self._costs, self._staleness = instance, instance.costs, staleness
        self._random = random
        self.path_rules = instance.rules
        self.overhead_s = self._costs.task_overhead_s
        backward = self._costs.backward_factor
        self._factors = {
            Work.FORWARD: 1.0,
            Work.LOSS: self._costs.head_factor,
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
        """None takes longer than a tensor does on the same way."""
        return min(self._random.uniform(CONTROL_S / 2, CONTROL_S), self._costs.message_s[here][there])

    def body_s(self, here: PeerId, there: PeerId) -> float:
        """So that header and body together take what the instance says, on average."""
        return max(0.0, self._costs.message_s[here][there] - CONTROL_S * 3 / 4)

    def silence_s(self) -> float:
        return NOTICED_AFTER_S

    def lifetime_s(self, path_s: float) -> float:
        return lifetime_of(path_s)


class _Deaths:
    """Peers die by chance, each at the same rate, and come back."""

    def __init__(self, world: World, instance: Instance, rate: float) -> None:
        self._world, self._rate = world, rate
        power = {peer: 1 / max(1e-9, instance.costs.service_s(peer)) for peer in world.peers}
        self._share = {peer: each / sum(power.values()) for peer, each in power.items()}
        self._away_s = 0.0
        """Seconds that peers were away, each weighed by its share of the compute."""

    def run(self, seconds: float) -> Throughput:
        """Until then; what is under way at the end stays under way."""
        for peer in self._world.peers.values():
            self._schedule(peer, seconds)
        self._world.run(seconds)
        return self._report(seconds)

    def _schedule(self, peer: Peer, end: float) -> None:
        if self._rate > 0:
            self._world.time.after(self._world.random.expovariate(self._rate), lambda: self._die(peer, end))

    def _die(self, peer: Peer, end: float) -> None:
        self._world.kill(peer)
        self._away_s += min(AWAY_S, end - self._world.time.now) * self._share[peer.id]
        self._world.time.after(AWAY_S, lambda: self._come_back(peer, end))

    def _come_back(self, peer: Peer, end: float) -> None:
        self._world.revive(peer)
        self._schedule(self._world.peers[peer.id], end)

    def _report(self, seconds: float) -> Throughput:
        ledger = self._world.ledger
        under_way = sum(len(in_flight.entries) for _, in_flight in self._world.data_nodes())
        launched, completed = len(ledger.started), len(ledger.completed)
        per_stage = Counter(hop.module.stage for path in ledger.completed.values() for hop in path.hops)
        return Throughput(
            launched=launched,
            completed=completed,
            abandoned=launched - completed - under_way,
            under_way=under_way,
            repaired=ledger.repaired_at.total(),
            alive_share=1 - self._away_s / seconds,
            accumulated=dict(sorted(per_stage.items())),
            duplicated=sum(count - 1 for count in ledger.counted.values()),
            planning_cpu_s=ledger.planning_cpu_s,
        )
