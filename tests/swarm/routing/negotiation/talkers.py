"""A rough network for negotiators: messages are late, overtake each other, get lost and come twice, data nodes die.
Shares no code with the simulation.

Whatever crosses it is copied, so that nobody can hold what another holds.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.negotiation_events import Arrived, Event, Member, SwarmChanged, TalkRules, Tell, Tick
from swarm.routing.negotiation.negotiator import Negotiator
from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import fair_sets, free_lanes, lanes_for, visits
from swarm.vocabulary.routing_messages import Heard, LaneControl, Offer, Standing, Told
from swarm.vocabulary.types import PeerId

PARTS = math.lcm(*range(1, 33))


@dataclass(frozen=True)
class Weather:
    lost: float = 0.0
    doubled: float = 0.0
    slowest_s: float = 0.3


class Party:
    """Data nodes and what lies between them."""

    def __init__(
        self,
        costs: Costs,
        rules: PathRules,
        microbatches: int | None,
        weather: Weather,
        seed: int,
        talk: TalkRules | None = None,
    ) -> None:
        self.rng, self.weather = random.Random(seed), weather
        self.costs, self.rules, self.talk = costs, rules, talk or TalkRules(microbatches)
        self.now, self.steps, self.said = 0.0, 0, Counter[str]()
        self.agenda: list[tuple[float, int, PeerId, Event]] = []
        self.incarnations = dict.fromkeys(costs.data_nodes, 0)
        self.machines: dict[PeerId, Negotiator] = {}
        self.histories: dict[tuple[bytes, PeerId, int], Standing] = {}
        self.offers: dict[tuple[bytes, PeerId, int], Offer] = {}
        self.decided: dict[tuple[bytes, PeerId, int], Offer] = {}
        for peer in costs.data_nodes:
            self.machines[peer] = Negotiator(peer, copy.deepcopy(rules), copy.deepcopy(self.talk))
        self.announce_members()

    def members(self) -> frozenset[Member]:
        return frozenset(Member(peer, self.incarnations[peer]) for peer in self.machines)

    def announce_members(self, within_s: float = 0.0, costs: Costs | None = None) -> None:
        """Everyone gets a membership view, each at its own time."""
        members = self.members()
        for peer in self.machines:
            believed = copy.deepcopy(self.costs if costs is None else costs)
            self.push(self.now + self.rng.uniform(0, within_s), peer, SwarmChanged(members, believed))

    def push(self, when: float, peer: PeerId, event: Event) -> None:
        heapq.heappush(self.agenda, (when, self.rng.getrandbits(40), peer, event))

    def step(self) -> bool:
        """The next thing that happens; False when nothing ever will."""
        if not self.agenda:
            return False
        self.now, _, peer, event = heapq.heappop(self.agenda)
        self.steps += 1
        machine = self.machines.get(peer)
        if machine is None or (isinstance(event, Tick) and machine.wakes_at > self.now):
            return True
        before = machine.wakes_at
        for action in machine.handle(event, self.now):
            if isinstance(action, Tell):
                self.post(peer, action.to, action.message)
        if machine.wakes_at < math.inf and (machine.wakes_at != before or isinstance(event, Tick)):
            self.push(max(machine.wakes_at, self.now), peer, Tick())
        return True

    def post(self, sender: PeerId, to: PeerId, message: LaneControl) -> None:
        self.said[type(message).__name__] += 1
        self.remember(sender, message)
        for _ in range(1 + (self.rng.random() < self.weather.doubled)):
            if self.rng.random() >= self.weather.lost:
                way_s = self.rng.uniform(0.02, self.weather.slowest_s)
                self.push(self.now + way_s, to, Arrived(sender, copy.deepcopy(message)))

    def run(self, seconds: float) -> None:
        """Until nothing more happens, or so long."""
        until = self.now + seconds
        while self.agenda and self.agenda[0][0] <= until:
            self.step()

    def die(self, peer: PeerId) -> None:
        del self.machines[peer]

    def restart(self, peer: PeerId) -> None:
        """It comes up again with nothing in mind."""
        self.incarnations[peer] += 1
        self.machines[peer] = Negotiator(peer, self.rules, self.talk)

    # ---- what must hold ------------------------------------------------------------------------------------------

    def remember(self, sender: PeerId, message: LaneControl) -> None:
        """At one version a data node stands in one way only, whoever tells of it."""
        standings = [message.sender] if not isinstance(message, Heard) and hasattr(message, "sender") else []
        if isinstance(message, Offer):
            self.offers[message.epoch, sender, message.number] = message
        if isinstance(message, Told) and message.number is not None:
            decided = message.epoch, sender, message.number
            self.decided[decided] = self.offers[decided]
            standings += self.offers[decided].standings
        for standing in standings:
            known = self.histories.setdefault((message.epoch, standing.peer, standing.version), standing)
            assert known == standing

    def assert_offers_keep_the_sum(self) -> None:
        """Every decided offer leaves all visits as they were, and begins where the last one ended."""
        ends: dict[tuple[bytes, PeerId, int], Counter[int]] = {}
        for (epoch, _, _), offer in self.decided.items():
            for standing in offer.standings:
                key = epoch, standing.peer, standing.version
                assert key not in ends, "two offers were decided at one version"
                ends[key] = shares([lane.stages for lane in standing.lanes])
        for (epoch, _, _), offer in self.decided.items():
            after, before = Counter[int](), Counter[int]()
            for standing in offer.standings:
                after.update(shares([lane.stages for lane in standing.lanes]))
                held = self.histories.get((epoch, standing.peer, standing.version - 1))
                if held is not None:
                    before.update(shares([lane.stages for lane in held.lanes]))
                else:
                    before.update(self.dealt_to(standing.peer, [one.peer for one in offer.standings]))
            assert before == after

    def dealt_to(self, peer: PeerId, among: Sequence[PeerId]) -> Counter[int]:
        """What the ring deals to a data node."""
        count, rank = len(among), sorted(among).index(peer)
        each = self.talk.microbatches
        lanes = free_lanes(self.rules) if each is None else lanes_for(self.rules, count, each)
        return shares(fair_sets(self.rules, count * lanes)[rank::count])

    def assert_settled(self) -> None:
        assert all(machine.settled for machine in self.machines.values())
        assert not any(isinstance(event, Arrived) for _, _, peer, event in self.agenda if peer in self.machines)

    def assert_equal_visits(self) -> None:
        """The lanes of all live data nodes visit what the ring deals to as many."""
        count = len(self.machines)
        assert self.talk.microbatches is not None
        lanes = lanes_for(self.rules, count, self.talk.microbatches)
        dealt = shares(fair_sets(self.rules, count * lanes))
        stage_of = self.costs.stage_of()
        driven = Counter[int]()
        for machine in self.machines.values():
            orders = [[stage_of[peer] for peer in route] for route in machine.launches]
            assert all(self.rules.fault(order) is None for order in orders)
            driven.update(shares(orders))
        assert driven == Counter({stage: count * share for stage, share in dealt.items()})


def shares(orders: Sequence[Iterable[int]]) -> Counter[int]:
    """Of a data node's microbatches that visit each stage, in parts of PARTS: lanes and routes of single microbatches
    are more or fewer of the same."""
    assert PARTS % max(1, len(orders)) == 0
    return Counter({stage: PARTS // len(orders) * n for stage, n in visits(orders).items()})
