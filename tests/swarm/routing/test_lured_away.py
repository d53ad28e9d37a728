"""Announcements are believed only so far: nobody leaves a module to somebody who has only said that it serves there."""

from dataclasses import replace

import pytest

from swarm.membership import placement
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState
from tests.swarm.membership.announcements import announcement

MODULES = tuple(ModuleId(stage) for stage in range(4))
WORK = placement.Workload(MODULES, (1.0, 2.0, 2.0, 2.0), 3)
OWN = replace(announcement("honest1", 1), steps=7)
HONEST = (announcement("data", 0, speed=0.0), announcement("honest2", 2), announcement("honest3", 3))
LIAR = announcement("liar", 1, speed=1e6)
MANY_LIARS = tuple(announcement(f"liar{n}", 1, speed=1e6) for n in range(50))


def moves(others: tuple[Announcement, ...], *proven: str, own: Announcement = OWN) -> ModuleId | None:
    """Where the peer goes within twenty minutes, looking every two seconds."""
    watch, known = placement.MoveWatch(WORK, placement.MoveRules()), frozenset(PeerId(name) for name in proven)
    move_s = {module: 30.0 for module in MODULES[1:] if module != own.module}
    for second in range(0, 1200, 2):
        goal = watch.consider(placement.SwarmView(own, others, float(second), move_s, known), float(second)).value
        if goal is not None:
            return goal
    return None


@pytest.mark.parametrize("liars", [(LIAR,), MANY_LIARS])
@pytest.mark.parametrize("lost", [(), (3,)])
def test_the_only_honest_replica_of_a_module_stays(liars: tuple[Announcement, ...], lost: tuple[int, ...]) -> None:
    """Not even to fill a module that is empty: the liar would be alone with what this one knows."""
    others = tuple(a for a in HONEST if a.module is None or a.module.stage not in lost)
    assert moves((*others, *liars)) is None
    assert moves((*others, *liars), "honest2", "honest3", "data") is None


def test_who_leaves_a_proven_replica_behind_goes() -> None:
    second = announcement("honest4", 1)
    assert moves((*HONEST[:2], second), "honest4") == ModuleId(3)
    assert moves((*HONEST[:2], second)) is None
    assert moves((*HONEST[:2], replace(second, state=PeerState.DRAINING)), "honest4") is None


def test_of_two_newcomers_that_took_the_same_module_one_fills_the_empty_one() -> None:
    """No microbatch can prove either of them, because every path needs the empty module."""
    seen = [announcement(name, 1) for name in ("a", "b")]
    goals = [moves((*HONEST[:2], other), own=own) for own, other in (seen, seen[::-1])]
    assert set(goals) == {ModuleId(3)}, "the second one if the first one does not go"
    trained = replace(seen[0], steps=1)
    assert moves((*HONEST[:2], seen[1]), own=trained) is None, "it may be the last one that knows what was learned"
    assert moves((*HONEST, seen[1]), own=seen[0]) is None, "no module is empty"


def test_what_a_peer_announces_counts_up_to_four_times_the_median() -> None:
    unknown = placement.allowed_throughput(placement.hosts_of((OWN, *HONEST, LIAR), WORK), WORK)[ModuleId(1)]
    proven = placement.hosts_of((OWN, *HONEST, LIAR), WORK, frozenset({LIAR.peer}))
    known = placement.allowed_throughput(proven, WORK)[ModuleId(1)]
    assert unknown == 1000.0 + placement.MOST_BELIEVED * 1000.0
    assert known == 1000.0 + 1e6
