"""Random faults for a world of replicas, and what must hold during and after them.

    python -m tests.swarm.averaging.faults 5000 10000

tries those seeds and names the first that fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from random import Random

from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.types import PeerId
from tests.swarm.averaging.round_world import RoundWorld, Shape
from tests.swarm.averaging.virtual_replica import INITIAL

FAULTS_S = 24.0
FAULT_EVERY_S = 2.0
SETTLE_S = 45.0
"""After the last fault all stand on one anchor within so long: announcements, one failed attempt, one round, one
download."""
PROGRESS_S = 60.0
MESSAGES_A_SECOND = 8.0
"""Of each replica to each other, at most and on average; a pulse is two a second."""


@dataclass(frozen=True, slots=True)
class Harm:
    """Which faults a world suffers."""

    crashes: bool = True
    freezes: bool = True
    cuts: bool = True
    partitions: bool = True

    @property
    def forks(self) -> bool:
        """Whether it can split the replicas."""
        return self.crashes or self.freezes or self.cuts or self.partitions


NONE = Harm(False, False, False, False)


def world_of(seed: int) -> RoundWorld:
    """Three to six replicas on a network that is good or bad."""
    random = Random(seed * 7919)
    rules = RoundRules(
        inner_steps=random.choice((4, 5, 6)),
        fragments=random.choice((1, 1, 2)),
        chunks=6,
        longest_s=12.0,
        chunk_bytes=1000,
    )
    shape = Shape(
        replicas=random.choice((2, 3, 3, 4, 4, 5)),
        rules=rules,
        loss=random.choice((0.0, 0.01, 0.05)),
        repeats=random.choice((0.0, 0.05)),
        slowest_s=random.choice((0.02, 0.1, 0.4)),
        bandwidth=random.choice(((20_000.0, 100_000.0), (2_000.0, 20_000.0))),
        prepare_s=random.choice(((0.01, 0.2), (0.05, 3.0))),
    )
    return RoundWorld(seed, shape)


def harm_of(seed: int) -> Harm:
    """Every fifth world suffers only from its network; the others have all faults, or some kinds."""
    return (Harm(), Harm(partitions=False), Harm(crashes=False, partitions=False), Harm(crashes=False), NONE)[seed % 5]


class Faults:
    """Strikes a world at random moments."""

    def __init__(self, world: RoundWorld, harm: Harm) -> None:
        self._world = world
        self._random = world.random
        self._kinds = [
            kind
            for kind, wanted in (
                (self._crash, harm.crashes),
                (self._freeze, harm.freezes),
                (self._cut, harm.cuts),
                (self._partition, harm.partitions),
            )
            if wanted
        ]

    def run(self, seconds: float) -> None:
        end = self._world.time.now + seconds
        while self._world.time.now < end:
            self._world.run(self._random.expovariate(1 / FAULT_EVERY_S))
            if self._kinds:
                self._random.choice(self._kinds)()

    def end(self) -> None:
        """All links stand, all processes run again."""
        self._world.links.heal()
        for peer in self._world.peers:
            self._thaw(peer)
            self._restart(peer)

    def _some(self) -> PeerId:
        return self._random.choice(self._world.peers)

    def _crash(self) -> None:
        peer = self._some()
        if len(self._world.living) > 1:
            self._world.crash(peer)
            self._world.time.after(self._random.uniform(0.5, 8.0), partial(self._restart, peer))

    def _restart(self, peer: PeerId) -> None:
        """From nothing, or from what it saved last."""
        replica = self._world.replicas[peer]
        if not replica.alive:
            self._world.restart(peer, self._random.choice((INITIAL, replica.history[0], replica.history[-1])))

    def _freeze(self) -> None:
        peer = self._some()
        self._world.freeze(peer)
        self._world.time.after(self._random.choice((0.4, 1.0, 3.0, 8.0)), partial(self._thaw, peer))

    def _thaw(self, peer: PeerId) -> None:
        self._world.thaw(peer)

    def _cut(self) -> None:
        one, other = self._random.sample(self._world.peers, 2)
        self._world.cut(one, other)
        self._world.time.after(self._random.uniform(0.2, 6.0), self._world.links.heal)

    def _partition(self) -> None:
        peers = self._world.peers
        self._random.shuffle(peers)
        border = self._random.randint(1, len(peers) - 1)
        self._world.links.partition(peers[:border], peers[border:])
        self._world.time.after(self._random.uniform(1.0, 12.0), self._world.links.heal)


def try_seed(seed: int) -> RoundWorld:
    """Raises AssertionError when something that must hold does not; returns the world for counting."""
    world, harm = world_of(seed), harm_of(seed)
    faults = Faults(world, harm)
    faults.run(FAULTS_S)
    if not harm.forks:
        assert not world.forks(), f"two results for rounds {world.forks()} though nothing was split"
    faults.end()
    assert world.run_until(world.agreed, SETTLE_S), f"no agreement\n{world.explain()}"
    reached = max(version.round for version in world.versions())
    together = partial(_all_took_part, world, reached)
    assert world.run_until(together, PROGRESS_S), f"no round of all after round {reached}\n{world.explain()}"
    pairs = len(world.replicas) * (len(world.replicas) - 1)
    assert world.links.sent < MESSAGES_A_SECOND * pairs * world.time.now, f"{world.links.sent} messages"
    return world


def _all_took_part(world: RoundWorld, reached: int) -> bool:
    """Whether each replica has been in a round since. (Not all in the same: rounds here are hardly longer than a
    download.)"""
    since = [who for version, who in world.commits.items() if version.round > reached]
    return set().union(*since) == set(world.peers)


if __name__ == "__main__":
    first, last = int(sys.argv[1]), int(sys.argv[2])
    for tried in range(first, last):
        try:
            try_seed(tried)
        except AssertionError as failure:
            sys.exit(f"seed {tried}: {failure}")
    print(f"{last - first} seeds hold")
