"""Moves of peers between modules: at once to a module without peers, else if the gain is worth the download.

The weaker of the two modules must gain `min_gain`, so moves converge. All peers rank candidates equally, and each
candidate has `turn_s` to move. The last proven replica never leaves a module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.membership.memory_fit import Needs, free_memory_of
from swarm.membership.placement import Host, Workload, allowed_throughput, draw, hosts_of
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, Reasoned, short


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
    """Returns the module of `move_s` that gains most if a peer moves there, with candidates; None if no move pays.

    Data nodes never move.
    """
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


def _if_it_pays(
    standing: SwarmView, target: ModuleId, workload: Workload, rules: MoveRules
) -> Reasoned[ModuleId | None]:
    """Decides whether the swarm trains more tokens within `horizon_s` if this peer moves, with its download counted."""
    hosts = standing.hosts(workload)
    allowed = allowed_throughput(hosts, workload)
    own = next(host for host in hosts if host.peer == standing.own.peer)
    away = allowed[own.module] - own.power / workload.work(own.module)
    before = min(allowed[own.module], allowed[target])
    meanwhile = min(away, allowed[target])
    after = min(away, allowed[target] + own.power / workload.work(target))
    cost_s = standing.move_s[target]
    gained = (after - before) * (rules.horizon_s - cost_s) - (before - meanwhile) * cost_s
    if gained <= 0:
        return Reasoned(None, f"a move to module {target} takes {cost_s:.0f} s and costs more than it gains")
    percent = 100 * (after / before - 1)
    return Reasoned(target, f"module {target} is the weakest; this peer there makes it {percent:.0f} % faster")


def _who_can_be_spared(standing: SwarmView, hosts: tuple[Host, ...], has_no_state: bool) -> frozenset[PeerId]:
    """Returns the peers that may leave their module, because another replica serves it.

    For us it must be a proven one, unless we have no state that could be lost with us.
    """
    serving = Counter(host.module for host in hosts if host.state is PeerState.SERVING)
    own = standing.own.peer
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
