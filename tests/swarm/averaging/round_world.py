"""Replicas of one module in virtual time, what lies between them, what goes wrong, and what must hold whatever does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from swarm.averaging.round_events import (
    Action,
    CatchUp,
    CommitStaged,
    Exchange,
    LinkLost,
    OtherReplica,
    RoundRules,
    Tell,
)
from swarm.simulation.virtual_network import VirtualTime
from swarm.vocabulary.averaging_messages import MAX_ATTEMPTS, Commit, Invitation, Prepared, Roster, RoundId
from swarm.vocabulary.types import AnchorVersion, PeerId
from tests.swarm.averaging.virtual_links import VirtualLinks
from tests.swarm.averaging.virtual_replica import INITIAL, VirtualReplica

ANNOUNCE_S = 1.0
SMALL_ROUNDS = RoundRules(inner_steps=3, fragments=1, chunks=6, longest_s=12.0, chunk_bytes=1000)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a world is, and how bad its network."""

    replicas: int = 4
    rules: RoundRules = SMALL_ROUNDS
    loss: float = 0.0
    repeats: float = 0.0
    slowest_s: float = 0.05
    """Of a small message."""
    step_s: tuple[float, float] = (0.6, 1.2)
    bandwidth: tuple[float, float] = (20_000.0, 100_000.0)
    prepare_s: tuple[float, ...] = (0.01, 0.05, 0.2)


class RoundWorld:
    """Checks at every action that nothing impossible happens; `commits` has what was agreed."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.rules = self.shape.rules
        self.random = Random(seed)
        self.time = VirtualTime()
        self.links = VirtualLinks(self.time, self.random, self.shape.loss, self.shape.repeats, self.shape.slowest_s)
        self.idle = False
        """Whether there is nothing to train on."""
        self.commits: defaultdict[AnchorVersion, set[PeerId]] = defaultdict(set)
        self.rosters: dict[AnchorVersion, tuple[PeerId, ...]] = {}
        self.conveners: dict[int, PeerId] = {}
        self.attempts: Counter[int] = Counter()
        """Of each round number."""
        self.prepared: defaultdict[AnchorVersion, set[PeerId]] = defaultdict(set)
        """Who has ever had the whole result, and below from which exchange."""
        self.told: defaultdict[AnchorVersion, set[PeerId]] = defaultdict(set)
        self.exchanged: dict[AnchorVersion, Roster] = {}
        self.on_commit: Callable[[VirtualReplica, CommitStaged], None] = lambda replica, commit: None
        self.caught_up: Counter[PeerId] = Counter()
        self.exchanges = 0
        self.on_exchange: Callable[[VirtualReplica, Roster], None] = lambda replica, roster: None
        self.replicas: dict[PeerId, VirtualReplica] = {}
        for number in range(self.shape.replicas):
            peer = PeerId(f"peer{number}")
            self.replicas[peer] = VirtualReplica(self, peer, INITIAL, newcomer=False)
        for replica in self.living:
            for other in self.living:
                if other is not replica:
                    replica.see(self._announcement(other))
            self.time.after(self.random.uniform(0, ANNOUNCE_S), partial(self._announce, replica))

    @property
    def living(self) -> list[VirtualReplica]:
        return [replica for replica in self.replicas.values() if replica.alive]

    @property
    def peers(self) -> list[PeerId]:
        return list(self.replicas)

    # ---- announcements -----------------------------------------------------------------------------------------------

    def _announcement(self, replica: VirtualReplica) -> OtherReplica:
        return OtherReplica(replica.id, replica.version, replica.serving)

    def _announce(self, replica: VirtualReplica) -> None:
        if not replica.alive:
            return
        self.time.after(ANNOUNCE_S, partial(self._announce, replica))
        if replica.frozen:
            return
        replica.refresh_view()
        announced = self._announcement(replica)
        for other in self.living:
            if other is not replica and self.links.up(replica.id, other.id):
                self.time.after(self.random.uniform(0.01, ANNOUNCE_S), partial(other.do, partial(other.see, announced)))

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def observe(self, replica: VirtualReplica, before: AnchorVersion, actions: Iterable[Action]) -> None:
        after = replica.version
        if after != before:
            assert after.round > before.round, f"{replica.id} went from round {before.round} to {after.round}"
        for action in actions:
            match action:
                case CommitStaged(roster, version):
                    self.on_commit(replica, action)
                    self.commits[version].add(replica.id)
                    self.rosters[version] = roster.peers
                    self.conveners[version.round] = roster.round.convener
                case Tell(_, Prepared(_, version)):
                    self.told[version].add(replica.id)
                case Tell(_, Commit(attempt, version)):
                    self._check_majority(attempt, version)
                case CatchUp():
                    self.caught_up[replica.id] += 1
                case Tell(_, Invitation(attempt)):
                    assert attempt.attempt < MAX_ATTEMPTS
                    assert attempt.convener == replica.id
                    self.attempts[attempt.number] = max(self.attempts[attempt.number], attempt.attempt + 1)
                case Exchange(roster):
                    self.exchanges += 1
                    if roster.round.convener == replica.id:
                        self._check_nothing_thrown_away(roster)
                    self.on_exchange(replica, roster)
                case _:
                    pass

    def staged(self, replica: VirtualReplica, roster: Roster, version: AnchorVersion) -> None:
        self.prepared[version].add(replica.id)
        self.exchanged[version] = roster

    def _check_majority(self, attempt: RoundId, version: AnchorVersion) -> None:
        """Of this exchange's own result; one that was found later may have been a majority's that is gone."""
        roster = self.exchanged[version]
        if roster.round == attempt:
            assert 2 * len(self.prepared[version]) > len(roster.members), "a commit without a majority"

    def _check_nothing_thrown_away(self, roster: Roster) -> None:
        """A result that somebody has committed, and that a member has told of, is not replaced by another one."""
        for version in self.commits:
            if version.round > roster.base.round and self.exchanged[version].base == roster.base:
                holders = set(roster.peers) & self.told[version]
                still = {peer for peer in holders if version in self.replicas[peer].staged}
                assert not still, f"{still} have the committed round {version.round}, and it is done again"

    def versions(self) -> set[AnchorVersion]:
        return {replica.version for replica in self.living}

    def forks(self) -> list[int]:
        """Round numbers for which there is more than one result."""
        digests: defaultdict[int, set[bytes]] = defaultdict(set)
        for version in self.commits:
            digests[version.round].add(version.digest)
        return sorted(number for number, found in digests.items() if len(found) > 1)

    def explain(self) -> str:
        return "\n".join(f"{replica.id}: {replica.machine.describe()}" for replica in self.living)

    # ---- time --------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self.time.run_until(self.time.now + seconds)

    def run_until(self, enough: Callable[[], bool], within_s: float) -> bool:
        self.time.run_until(self.time.now + within_s, enough)
        return enough()

    def agreed(self) -> bool:
        """Whether all that live stand on one version that they have in common."""
        return len(self.versions()) == 1

    # ---- what goes wrong ---------------------------------------------------------------------------------------------

    def cut(self, one: PeerId, other: PeerId) -> None:
        """The link breaks and stays so; both ends notice."""
        self.links.cut(one, other)
        for peer, lost in ((one, other), (other, one)):
            replica = self.replicas[peer]
            replica.do(partial(replica.feed, LinkLost(lost)))

    def crash(self, peer: PeerId) -> None:
        self.replicas[peer].alive = False

    def restart(self, peer: PeerId, version: AnchorVersion) -> None:
        assert not self.replicas[peer].alive
        replica = self.replicas[peer] = VirtualReplica(self, peer, version, newcomer=True)
        self._announce(replica)
        for other in self.living:
            if other is not replica and self.links.up(peer, other.id):
                replica.see(self._announcement(other))
        replica.refresh_view()

    def freeze(self, peer: PeerId) -> None:
        self.replicas[peer].frozen = True

    def thaw(self, peer: PeerId) -> None:
        self.replicas[peer].thaw()
