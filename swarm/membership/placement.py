"""Throughput that each module's replicas allow, and the choice of the module where a new peer helps most."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

from swarm.membership.memory_fit import FreeMemory, Needs
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, Reasoned

COUNTED = (PeerState.SERVING, PeerState.JOINING)  # Joining peers count, so that newcomers do not all choose one module
MOST_BELIEVED = 4.0  # Largest accepted speed of a peer without proven work, in medians
ABOUT_EQUAL = 0.1  # Relative difference up to which figures count as equal


@dataclass(frozen=True, slots=True)
class Workload:
    """A run's compute work. `cost`: of a visit, by stage; `per_path`: stages that a path visits after stage 0."""

    modules: tuple[ModuleId, ...]
    cost: tuple[float, ...]
    per_path: int
    _work: dict[ModuleId, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        experts = Counter(module.stage for module in self.modules)
        visited = self.per_path / max(1, len(self.cost) - 1)  # Share of paths that visit a stage after stage 0
        demand = {m: visited / experts[m.stage] if m.stage else 1.0 for m in self.modules}
        object.__setattr__(self, "_work", {m: self.cost[m.stage] * share for m, share in demand.items()})

    def __contains__(self, module: ModuleId) -> bool:
        return module in self._work

    def work(self, module: ModuleId) -> float:
        """Returns the mean compute work of the module per training token, in units of `cost`."""
        return self._work[module]


@dataclass(frozen=True, slots=True)
class Host:
    """An announced replica. `power`: its speed as far as we believe it, in units of `Workload.cost` per second."""

    peer: PeerId
    module: ModuleId
    state: PeerState
    power: float


def hosts_of(
    announcements: Iterable[Announcement], workload: Workload, proven: frozenset[PeerId] = frozenset()
) -> tuple[Host, ...]:
    """Returns peers that host modules. Unknown speeds count as the median; speeds of peers not `proven` are capped."""
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
    """Returns the median of the known powers (greater than 0), or 1 if all are unknown."""
    known = [power for power in powers if power > 0]
    return median(known) if known else 1.0


def allowed_throughput(hosts: Iterable[Host], workload: Workload) -> dict[ModuleId, float]:
    """Returns the training throughput that each module allows, in tokens per second; 0 for a module without peers."""
    allowed = dict.fromkeys(workload.modules, 0.0)
    for host in hosts:
        if host.state in COUNTED:
            allowed[host.module] += host.power / workload.work(host.module)
    return allowed


def draw(peer: PeerId, module: ModuleId) -> float:
    """Returns a hash of peer and module as a number from 0 to 1, to break ties equally at all peers."""
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
    """Chooses the module that a newcomer should host so that the swarm's throughput rises most.

    Ties go to the lowest throughput, then memory need, then hash. `power`: newcomer's speed; 0 counts as the median.
    """
    hosts = hosts_of(announcements, workload)
    allowed = allowed_throughput(hosts, workload)
    power = power or usual_power(host.power for host in hosts)

    weakest = min(allowed, key=allowed.__getitem__)
    next_weakest = min((value for module, value in allowed.items() if module != weakest), default=inf)
    with_us = {}  # Swarm's throughput if the newcomer takes the module
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
    larger = ", and needs the most memory of several" if len(largest) < len(shortest) else ""
    if allowed[chosen] == 0:
        return Reasoned(chosen, f"it has no peer{larger}")
    return Reasoned(chosen, f"it has the least compute for its share of visits{larger}")


def modules_that_fit(modules: Iterable[ModuleId], free: FreeMemory, needs: Needs) -> list[ModuleId]:
    return [module for module in modules if free.lacks(needs[module]) is None]
