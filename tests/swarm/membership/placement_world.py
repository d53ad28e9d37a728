"""Peers that come, die and move by the real rules, in virtual time, from a seed."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from random import Random

from swarm.membership.placement import (
    MoveRules,
    MoveWatch,
    SwarmView,
    Workload,
    allowed_throughput,
    choose_module,
    hosts_of,
)
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState
from tests.swarm.membership.announcements import announcement

TICK_S = 5.0
CHECK_TICKS = 6
JOIN_TICKS = 2
DRAIN_TICKS = 2
MODULES = tuple(ModuleId(stage) for stage in range(4))
RULES = MoveRules()


@dataclass(slots=True)
class Member:
    peer: PeerId
    power: float
    module: ModuleId
    watch: MoveWatch
    state: PeerState = PeerState.JOINING
    since: int = 0
    goal: ModuleId | None = None
    phase: int = 0
    delay: int = 0


@dataclass(slots=True)
class Move:
    tick: int
    peer: PeerId
    source: ModuleId
    target: ModuleId
    left_behind: int  # Replicas that really serve the source when the mover lets go
    others_on_the_way: int  # Further movers to the same module at that moment


@dataclass(slots=True)
class World:
    """A data node and peers of further stages, which see each other up to `longest_delay` ticks late."""

    seed: int
    longest_delay: int = 0
    most: int = 7
    modules: tuple[ModuleId, ...] = MODULES
    at_first: int = 4
    tick: int = 0
    moves: list[Move] = field(default_factory=list)
    members: dict[PeerId, Member] = field(default_factory=dict)
    random: Random = field(init=False)
    workload: Workload = field(init=False)
    _history: deque[tuple[Announcement, ...]] = field(init=False)
    _names: itertools.count[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        cost = (1.0, *(self.random.choice((1.0, 1.0, 2.0, 4.0)) for _ in range(self.modules[-1].stage)))
        self.workload = Workload(self.modules, cost, min(self.modules[-1].stage, self.random.choice((2, 3))))
        self._history: deque[tuple[Announcement, ...]] = deque(maxlen=self.longest_delay + 1)
        self._history.append(self._now())
        for _ in range(self.at_first):
            self.join()

    def join(self) -> None:
        peer = PeerId(f"{self.seed}-{next(self._names)}")
        power = self.random.uniform(0.5, 4.0) * 1000.0
        delay = self.random.randint(0, self.longest_delay)
        module = choose_module(peer, self.modules[1:], self._seen(delay, peer), self.workload).value
        watch = MoveWatch(self.workload, RULES)
        phase = self.random.randrange(CHECK_TICKS)
        self.members[peer] = Member(peer, power, module, watch, since=self.tick, phase=phase, delay=delay)

    def kill_one(self) -> None:
        del self.members[self.random.choice(sorted(self.members))]

    def run(self, ticks: int, churn: float = 0.0) -> None:
        """Lets time pass. `churn` is the chance of a death or a join at each tick."""
        for _ in range(ticks):
            self.tick += 1
            if self.random.random() < churn:
                if len(self.members) >= self.most or (len(self.members) > 3 and self.random.random() < 0.5):
                    self.kill_one()
                else:
                    self.join()
            for member in sorted(self.members.values(), key=lambda member: member.peer):
                self._advance(member)
            self._history.append(self._now())

    def throughput(self) -> float:
        return min(self._allowed([(member.power, member.module) for member in self.members.values()]))

    def best_throughput(self) -> float:
        powers = [member.power for member in self.members.values()]
        placements = itertools.product(self.modules[1:], repeat=len(powers))
        return max(min(self._allowed(list(zip(powers, placement, strict=True)))) for placement in placements)

    def _allowed(self, placed: list[tuple[float, ModuleId]]) -> list[float]:
        allowed = dict.fromkeys(self.modules[1:], 0.0)
        for power, module in placed:
            allowed[module] += power / self.workload.work(module)
        return list(allowed.values())

    def _advance(self, member: Member) -> None:
        here = self.tick - member.since
        if member.state is PeerState.JOINING and here >= JOIN_TICKS:
            self._become(member, PeerState.SERVING)
        elif member.state is PeerState.DRAINING and here >= DRAIN_TICKS:
            self._let_go(member)
        elif member.state is PeerState.SERVING:
            self._consider(member, here)

    def _consider(self, member: Member, here: int) -> None:
        others = self._seen(member.delay, member.peer)
        hosts = allowed_throughput(hosts_of((self._announced(member), *others), self.workload), self.workload)
        if all(hosts.values()) and (self.tick + member.phase) % CHECK_TICKS:
            return
        move_s = dict.fromkeys(self.modules[1:], (JOIN_TICKS + DRAIN_TICKS) * TICK_S)
        proven = frozenset(other.peer for other in others)  # everybody here is honest, and has worked
        standing = SwarmView(self._announced(member), others, here * TICK_S, move_s, proven)
        goal = member.watch.consider(standing, self.tick * TICK_S).value
        if goal is not None:
            member.goal = goal
            self._become(member, PeerState.DRAINING)

    def _let_go(self, member: Member) -> None:
        goal, member.goal = member.goal, None
        assert goal is not None
        left = sum(
            other.module == member.module and other.state is PeerState.SERVING and other is not member
            for other in self.members.values()
        )
        if self.longest_delay and not left:
            self._become(member, PeerState.SERVING)
            return
        on_the_way = sum(other.goal == goal for other in self.members.values())
        self.moves.append(Move(self.tick, member.peer, member.module, goal, left, on_the_way))
        member.module = goal
        member.watch = MoveWatch(self.workload, RULES)
        self._become(member, PeerState.JOINING)

    def _become(self, member: Member, state: PeerState) -> None:
        member.state, member.since = state, self.tick

    def _announced(self, member: Member) -> Announcement:
        speed = member.power / self.workload.cost[member.module.stage]
        known = 0.0 if member.state is PeerState.JOINING else speed
        return announcement(member.peer, member.module, speed=known, state=member.state)

    def _now(self) -> tuple[Announcement, ...]:
        return (announcement("data", 0, speed=0.0), *(self._announced(member) for member in self.members.values()))

    def _seen(self, delay: int, own: PeerId) -> tuple[Announcement, ...]:
        """With no delay, what is announced at this very moment."""
        if not self.longest_delay:
            return tuple(a for a in self._now() if a.peer != own)
        at = max(0, len(self._history) - 1 - delay)
        return tuple(a for a in self._history[at] if a.peer != own)
