"""Capacity of a swarm, and placement of a newcomer where it raises the throughput most, empty modules first."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

from swarm.membership.room import Needs, Room
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, Reasoned

COUNTED = (PeerState.SERVING, PeerState.JOINING)  # Joining peers count, else all newcomers would choose the same module
MOST_BELIEVED = 4.0  # Largest believed speed of unproven peers, in medians of all
ABOUT_EQUAL = 0.1  # Relative difference within which figures are equal


@dataclass(frozen=True, slots=True)
class Workload:
    """A run's work: `cost` of a visit to each stage, and visited stages after 0 `per_path`."""

    modules: tuple[ModuleId, ...]
    cost: tuple[float, ...]
    per_path: int
    _work: dict[ModuleId, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        experts = Counter(module.stage for module in self.modules)
        work = {
            module: self.cost[module.stage] * self._demand(module.stage, experts[module.stage])
            for module in self.modules
        }
        object.__setattr__(self, "_work", work)

    def __contains__(self, module: ModuleId) -> bool:
        return module in self._work

    def work(self, module: ModuleId) -> float:
        """The work that one token of training asks of the module on average, in units of cost."""
        return self._work[module]

    def _demand(self, stage: int, experts: int) -> float:
        """The share of all paths that visit one module of the stage."""
        return self.per_path / (len(self.cost) - 1) / experts if stage else 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """A replica as its announcement tells of it. `power` is in units of cost per second, as far as it is believed."""

    peer: PeerId
    module: ModuleId
    state: PeerState
    power: float


def hosts_of(
    announcements: Iterable[Announcement], workload: Workload, proven: frozenset[PeerId] = frozenset()
) -> tuple[Host, ...]:
    """The hosts of the run's modules. Peers without a speed count as average; only `proven` ones are believed fully."""
    hosting = [(a, a.module) for a in announcements if a.module is not None and a.module in workload]
    powers = [a.tokens_per_second * workload.cost[module.stage] for a, module in hosting]
    usual = usual_power(powers)

    def believed(peer: PeerId, power: float) -> float:
        return power if peer in proven else min(power, MOST_BELIEVED * usual)

    return tuple(
        Host(a.peer, module, a.state, believed(a.peer, power) if power > 0 else usual)
        for (a, module), power in zip(hosting, powers, strict=True)
    )


def usual_power(powers: Iterable[float]) -> float:
    """The median power of those known (greater than 0); 1 when none is, which makes everybody equal."""
    known = [power for power in powers if power > 0]
    return median(known) if known else 1.0


def allowed_throughput(hosts: Iterable[Host], workload: Workload) -> dict[ModuleId, float]:
    """Tokens per second of training that each module allows the swarm; 0 for a module without peers."""
    allowed = dict.fromkeys(workload.modules, 0.0)
    for host in hosts:
        if host.state in COUNTED:
            allowed[host.module] += host.power / workload.work(host.module)
    return allowed


def draw(peer: PeerId, module: ModuleId) -> float:
    """A pseudo-random number from 0 to 1 that everybody computes alike, for ties and for spreading."""
    digest = hashlib.sha256(f"{peer}/{module}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


NO_NEEDS: Final[Needs] = {}


def choose_module(
    own: PeerId,
    modules: Sequence[ModuleId],
    announcements: Iterable[Announcement],
    workload: Workload,
    power: float = 0.0,
    needs: Needs = NO_NEEDS,
) -> Reasoned[ModuleId]:
    """The module where the newcomer raises the throughput most; ties: fewest peers, largest need, hash. `power` 0:
    average."""
    hosts = hosts_of(announcements, workload)
    allowed = allowed_throughput(hosts, workload)
    power = power or usual_power(host.power for host in hosts)

    weakest = min(allowed, key=allowed.__getitem__)
    next_weakest = min((value for module, value in allowed.items() if module != weakest), default=inf)
    with_us = {}  # Throughput if the newcomer takes the module
    for module in modules:
        others = next_weakest if module == weakest else allowed[weakest]
        with_us[module] = min(allowed[module] + power / workload.work(module), others)

    best = max(with_us.values())
    helpful = [module for module in modules if with_us[module] >= best * (1 - ABOUT_EQUAL)]
    least = min(allowed[module] for module in helpful)
    shortest = [module for module in helpful if allowed[module] <= least * (1 + ABOUT_EQUAL)]
    memory = {module: needs[module].all if module in needs else 0 for module in shortest}
    most = max(memory.values())
    largest = [module for module in shortest if memory[module] >= most * (1 - ABOUT_EQUAL)]
    chosen = max(largest, key=lambda module: draw(own, module))
    larger = ", and takes most memory of these" if len(largest) < len(shortest) else ""
    if allowed[chosen] == 0:
        return Reasoned(chosen, f"module {chosen} has no peer{larger}")
    return Reasoned(chosen, f"module {chosen} has the least power for its share of the visits{larger}")


def modules_that_fit(modules: Iterable[ModuleId], room: Room, needs: Needs) -> list[ModuleId]:
    return [module for module in modules if room.lacks(needs[module]) is None]
