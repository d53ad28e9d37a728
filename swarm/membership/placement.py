"""Choice of the module where a new peer helps most, and moves of peers between modules.

Peers move at once to a module without peers, else if the gain is worth the download. The weaker of the two modules must
gain `min_gain`, so moves converge. All peers rank candidates equally, and each candidate has `turn_s` to move. The last
proven replica never leaves a module.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

from swarm.membership.memory_fit import FreeMemory, Needs, free_memory_of
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, Reasoned, short

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
    return int.from_bytes(hashlib.sha256(f"{peer}/{module}".encode()).digest()[:8], "big") / 2**64


NO_NEEDS: Final[Needs] = {}


def choose_module(
    own: PeerId,
    modules: Sequence[ModuleId],
    announcements: Iterable[Announcement],
    workload: Workload,
    needs: Needs = NO_NEEDS,
) -> Reasoned[ModuleId]:
    """Chooses a newcomer's module, so that the swarm's throughput rises most. Ties: lowest throughput, memory, hash."""
    hosts = hosts_of(announcements, workload)
    allowed = allowed_throughput(hosts, workload)
    power = usual_power(host.power for host in hosts)  # the newcomer's speed is unknown

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


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Thresholds for a peer's move to another module. The defaults are for links over the internet."""

    min_gain: float = 0.1  # Relative gain of the weaker of the two modules
    horizon_s: float = 600.0  # Time within which a move must pay off
    min_stay_s: float = 300.0  # Between moves; up to 1.5 times as long, by hash
    steady_s: float = 30.0  # Time for which the gain must persist before a move
    settle_s: float = 15.0  # Before a move to an empty module, so that the membership view is complete
    empty_after_s: float = 3.0  # Grace period of an empty module, because its peer may return
    turn_s: float = 20.0  # Longer than a drain


@dataclass(frozen=True, slots=True)
class SwarmView:
    """The swarm seen by one serving peer. `others`: not suspect; `proven`: with confirmed work or in our rounds."""

    own: Announcement
    others: tuple[Announcement, ...]
    served_s: float
    move_s: Mapping[ModuleId, float]
    proven: frozenset[PeerId] = frozenset()
    needs: Needs = field(default_factory=dict)

    def have_memory(self, module: ModuleId) -> frozenset[PeerId]:
        """Returns the peers whose free memory fits the module, or is unknown."""
        need = self.needs.get(module)
        everybody = (self.own, *self.others)
        return frozenset(a.peer for a in everybody if need is None or free_memory_of(a).lacks(need) is None)

    def hosts(self, workload: Workload) -> tuple[Host, ...]:
        return hosts_of((self.own, *self.others), workload, self.proven | {self.own.peer})


@dataclass(frozen=True, slots=True)
class Vacancy:
    """The module that needs a peer most. `movers`: candidates, best first; `on_the_way`: peers perhaps moving there."""

    target: ModuleId
    is_empty: bool
    movers: tuple[PeerId, ...]
    on_the_way: frozenset[PeerId]


class MoveWatch:
    """Decision over time whether this peer moves to another module, by how long the module has needed a peer."""

    def __init__(self, workload: Workload, rules: MoveRules) -> None:
        self._workload = workload
        self._rules = rules
        self._wanted: tuple[ModuleId, bool] | None = None
        self._wanted_since = 0.0
        self._on_the_way: frozenset[PeerId] = frozenset()
        self._busy_since = 0.0

    def consider(self, standing: SwarmView, now: float) -> Reasoned[ModuleId | None]:
        """Returns the module to which this peer should move now, or None. `now`: monotonic time."""
        vacancy = strongest_vacancy(standing, self._workload, self._rules)
        wanted = None if vacancy is None else (vacancy.target, vacancy.is_empty)
        if wanted != self._wanted:
            self._wanted, self._wanted_since = wanted, now
        on_the_way = frozenset() if vacancy is None else vacancy.on_the_way
        if on_the_way - self._on_the_way:
            self._busy_since = now
        self._on_the_way = on_the_way
        if vacancy is None:
            return Reasoned(None, "no move would help")
        if on_the_way and now - self._busy_since < self._rules.turn_s:
            return Reasoned(None, f"module {vacancy.target} needs a peer; {short(min(on_the_way))} may be moving to it")
        return consider_move(standing, vacancy, now - self._wanted_since, self._workload, self._rules)


def strongest_vacancy(standing: SwarmView, workload: Workload, rules: MoveRules) -> Vacancy | None:
    """Returns the module that gains most if a peer, no data node, moves there, with candidates; None if none pays."""
    hosts = standing.hosts(workload)
    allowed = allowed_throughput(hosts, workload)
    goals = [module for module in workload.modules if module in standing.move_s or module == standing.own.module]
    if not goals:
        return None
    target = min(goals, key=lambda module: (allowed[module], module))
    # Before the first inner step there is no state to lose, and while a module is empty no work can prove a replica.
    has_no_state = allowed[target] == 0 and standing.own.steps == 0
    able = _who_can_be_spared(standing, hosts, has_no_state) & standing.have_memory(target)
    values = {
        host.peer: _value(host, target, allowed, workload, rules)
        for host in hosts
        if host.module != target and host.module.stage > 0 and host.peer in able
    }
    worth = {peer: value for peer, value in values.items() if value is not None}
    on_the_way = frozenset(host.peer for host in hosts if host.peer in worth and host.state is PeerState.DRAINING)
    movers = sorted(worth.keys() - on_the_way, key=lambda peer: (-worth[peer], draw(peer, target)))
    return Vacancy(target, allowed[target] == 0, tuple(movers), on_the_way) if worth else None


def consider_move(
    standing: SwarmView, vacancy: Vacancy, wanted_s: float, workload: Workload, rules: MoveRules
) -> Reasoned[ModuleId | None]:
    """Decides whether this peer moves to a module that has needed a peer for `wanted_s` seconds."""
    own, target = standing.own.peer, vacancy.target
    if own not in vacancy.movers or target not in standing.move_s:
        return Reasoned(None, f"module {target} needs a peer, but not this one")
    rank = vacancy.movers.index(own)
    first_turn = rules.empty_after_s if vacancy.is_empty else rules.steady_s
    if wanted_s < first_turn + rank * rules.turn_s:
        return Reasoned(None, f"module {target} needs a peer; {short(vacancy.movers[0])} goes first")
    assert standing.own.module is not None
    stay = rules.settle_s if vacancy.is_empty else rules.min_stay_s * (1 + draw(own, standing.own.module) / 2)
    if standing.served_s < stay:
        return Reasoned(None, f"module {target} needs a peer, but this one has just joined its module")
    if vacancy.is_empty:
        return Reasoned(target, f"module {target} has no peer, and module {standing.own.module} can spare this one")
    return _if_it_pays(standing, target, workload, rules)


def _if_it_pays(view: SwarmView, target: ModuleId, workload: Workload, rules: MoveRules) -> Reasoned[ModuleId | None]:
    """Decides whether the swarm trains more tokens within `horizon_s` if this peer moves, with its download counted."""
    hosts = view.hosts(workload)
    allowed = allowed_throughput(hosts, workload)
    own = next(host for host in hosts if host.peer == view.own.peer)
    away = allowed[own.module] - own.power / workload.work(own.module)
    before = min(allowed[own.module], allowed[target])
    meanwhile = min(away, allowed[target])
    after = min(away, allowed[target] + own.power / workload.work(target))
    cost_s = view.move_s[target]
    gained = (after - before) * (rules.horizon_s - cost_s) - (before - meanwhile) * cost_s
    if gained <= 0:
        return Reasoned(None, f"a move to module {target} takes {cost_s:.0f} s and costs more than it gains")
    percent = 100 * (after / before - 1)
    return Reasoned(target, f"module {target} is the weakest; this peer there makes it {percent:.0f} % faster")


def _who_can_be_spared(standing: SwarmView, hosts: tuple[Host, ...], has_no_state: bool) -> frozenset[PeerId]:
    """Returns the peers that may leave their module, because another replica serves it."""
    serving = Counter(host.module for host in hosts if host.state is PeerState.SERVING)
    own = standing.own.peer
    # For us it must be a proven one, unless we have no state that could be lost with us.
    proven_there = any(
        host.module == standing.own.module and host.state is PeerState.SERVING and host.peer in standing.proven - {own}
        for host in hosts
    )
    return frozenset(
        host.peer
        for host in hosts
        if host.state in (PeerState.SERVING, PeerState.DRAINING)
        and serving[host.module] > (host.state is PeerState.SERVING)
        and (host.peer != own or proven_there or has_no_state)
    )


def _value(
    host: Host, target: ModuleId, allowed: Mapping[ModuleId, float], workload: Workload, rules: MoveRules
) -> float | None:
    """Returns the weaker module's throughput after a move of `host` to `target`; None if `target` gains too little."""
    # An empty module takes the peer whose own module keeps the most throughput.
    leaves = 0.0 if host.state is PeerState.DRAINING else host.power / workload.work(host.module)
    left = allowed[host.module] - leaves
    if allowed[target] == 0:
        return left
    after = min(left, allowed[target] + host.power / workload.work(target))
    return after if after >= allowed[target] * (1 + rules.min_gain) else None
