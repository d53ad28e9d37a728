"""The data nodes' talk in virtual time: every one has its own negotiator, and messages between them take time, overtake
each other and get lost.

Nothing is shared: a negotiator gets its own costs, and the messages that were sent to it. What it decides is measured
on the CPU, all data nodes together.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.routing.negotiation.negotiation_events import (
    Arrived,
    Event,
    LanesChanged,
    Member,
    SwarmChanged,
    TalkRules,
    Tell,
    Tick,
)
from swarm.routing.negotiation.negotiator import Negotiator
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.routing_messages import Offer, Told
from swarm.vocabulary.types import PeerId

CONTROL_S = 0.3
"""One way for a small message, when not measured: over the longest way round the earth, on a loaded link."""


@dataclass(frozen=True, slots=True)
class Network:
    """What becomes of small messages.

    Args:
        longest_s: one way at most.
        shortest_s: one way at least; between the two every message has its own time, so they overtake each other.
        lost: share that never arrives.
        doubled: share that arrives twice.
    """

    longest_s: float = CONTROL_S
    shortest_s: float = CONTROL_S / 2
    lost: float = 0.0
    doubled: float = 0.0


@dataclass(frozen=True, slots=True)
class TalkSoFar:
    """What was said up to now.

    Args:
        trades: decided by those who asked.
        settled_s: when the last lane changed, from the beginning of the talk.
    """

    messages: int
    offers: int
    trades: int
    settled_s: float


class Talking:
    """The talk of all data nodes.

    Args:
        beliefs: what each data node takes the costs for.
        cpu_clock: seconds of CPU time.
        begins_at: virtual time; iterations begin at 0.
    """

    def __init__(
        self,
        rules: PathRules,
        talk: TalkRules,
        beliefs: dict[PeerId, Costs],
        network: Network,
        rng: random.Random,
        cpu_clock: Callable[[], float],
        begins_at: float = 0.0,
    ) -> None:
        self._network, self._rng, self._cpu_clock = network, rng, cpu_clock
        self._begins_at, self._now = begins_at, begins_at
        self._events: list[tuple[float, int, PeerId, Event]] = []
        self._ticket = 0
        self._wakes: dict[PeerId, float] = {}
        self._said: Counter[type] = Counter()
        self._trades: set[tuple[PeerId, int]] = set()
        self._times: dict[PeerId, list[float]] = {peer: [] for peer in beliefs}
        self._launches: dict[PeerId, list[tuple[PeerRoute, ...]]] = {peer: [] for peer in beliefs}
        self.cpu_each_s: dict[PeerId, float] = dict.fromkeys(beliefs, 0.0)
        """Of each data node, dead ones included."""
        self.machines = {peer: Negotiator(peer, rules, talk) for peer in beliefs}
        members = frozenset(map(Member, beliefs))
        for peer, costs in beliefs.items():
            self._handle(peer, SwarmChanged(members, costs))

    # ---- time ----------------------------------------------------------------------------------------------------

    def run(self, until: float) -> None:
        """All that happens up to then."""
        while self._events and self._events[0][0] <= until:
            self._now, _, peer, event = heapq.heappop(self._events)
            if peer not in self.machines:
                continue
            if isinstance(event, Tick):
                if self._wakes[peer] != self._now:
                    continue  # it has been woken otherwise, and wants to be called at another time now
                self._wakes[peer] = math.inf
            self._handle(peer, event)
        self._now = max(self._now, until)

    @property
    def settled(self) -> bool:
        """Whether nobody has anything more to say, and nothing is under way."""
        under_way = any(not isinstance(event, Tick) and peer in self.machines for _, _, peer, event in self._events)
        return not under_way and all(machine.settled for machine in self.machines.values())

    def die(self, peer: PeerId) -> None:
        """A data node dies now; what it has sent still arrives."""
        del self.machines[peer]

    def tell_of_change(self, members: Iterable[Member], beliefs: dict[PeerId, Costs], within_s: float) -> None:
        """The membership views change, that of each data node at its own time within `within_s` from now."""
        live = frozenset(members)
        for peer, costs in beliefs.items():
            self._push(self._now + self._rng.uniform(0.0, within_s), peer, SwarmChanged(live, costs))

    # ---- looking -------------------------------------------------------------------------------------------------

    def lanes_at(self, peer: PeerId, now: float) -> tuple[PeerRoute, ...]:
        """What a data node launched its microbatches on at that time, up to now."""
        place = bisect_right(self._times[peer], now)
        return self._launches[peer][place - 1] if place else ()

    @property
    def cpu_s(self) -> float:
        """Of all data nodes together."""
        return math.fsum(self.cpu_each_s.values())

    def so_far(self) -> TalkSoFar:
        """How much was said."""
        changes = [time for times in self._times.values() for time in times[1:]]
        settled = max(changes, default=self._begins_at) - self._begins_at
        return TalkSoFar(sum(self._said.values()), self._said[Offer], len(self._trades), settled)

    # ---- work ----------------------------------------------------------------------------------------------------

    def _push(self, when: float, peer: PeerId, event: Event) -> None:
        self._ticket += 1
        heapq.heappush(self._events, (when, self._ticket, peer, event))

    def _handle(self, peer: PeerId, event: Event) -> None:
        machine = self.machines[peer]
        began = self._cpu_clock()
        actions, wakes = machine.handle(event, self._now), machine.wakes_at
        self.cpu_each_s[peer] += self._cpu_clock() - began
        for action in actions:
            if isinstance(action, Tell):
                self._send(peer, action)
            elif isinstance(action, LanesChanged):
                self._times[peer].append(self._now)
                self._launches[peer].append(action.routes)
        at = max(wakes, self._now)
        if at < math.inf and at != self._wakes.get(peer):
            self._push(at, peer, Tick())
        self._wakes[peer] = at

    def _send(self, sender: PeerId, tell: Tell) -> None:
        network, message = self._network, tell.message
        self._said[type(message)] += 1
        if isinstance(message, Told) and message.number is not None:
            self._trades.add((sender, message.number))
        if self._rng.random() < network.lost:
            return
        for _ in range(1 + (self._rng.random() < network.doubled)):
            way_s = self._rng.uniform(network.shortest_s, network.longest_s)
            self._push(self._now + way_s, tell.to, Arrived(sender, message))
