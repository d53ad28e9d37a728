"""The capacity of a swarm: how much each module's replicas can do for its share of the visits.

A path is as fast as the slowest module it goes through, so the swarm's throughput is the least of what its modules
allow: the power of a module's replicas together, divided by the work that a token of training asks of that module on
average.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState

COUNTED = (PeerState.SERVING, PeerState.JOINING)
"""Peers that join count as if they served already: else everybody would go where somebody is going."""
MOST_BELIEVED = 4.0
"""Times the median of what the run's peers announce: what a peer says beyond that counts only when somebody has worked
with it."""
ABOUT_EQUAL = 0.1
"""Figures that differ by less are taken for equal: measured speeds always differ a little."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work that a run asks of its modules.

    Args:
        modules: all of the run.
        cost: of each stage, the work of one visit, in any unit (blocks, say), greater than 0.
        per_path: how many of the stages after 0 a path visits; each is visited equally often.
    """

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
    """The hosts of the run's modules. Who announces no speed is taken to be as powerful as the middle of the others.

    Args:
        proven: peers that are believed whatever they announce; others up to MOST_BELIEVED.
    """
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
    """A pseudo-random number from 0 to 1 that everybody computes alike: settles ties, and spreads out what should not
    happen at once.
    """
    digest = hashlib.sha256(f"{peer}/{module}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
