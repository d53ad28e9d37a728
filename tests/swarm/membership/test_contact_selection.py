"""Whom a peer that cannot be dialled holds on to."""

from __future__ import annotations

from dataclasses import replace

from swarm.membership.membership import by_worth
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState
from tests.swarm.membership.announcements import announcement

OWN = PeerId("own")


def dialable(peer: str, stage: int | None = 1, state: PeerState = PeerState.SERVING) -> Announcement:
    return replace(announcement(peer, stage, state=state), addresses=("25.0.0.1:4000",))


def test_neighbours_and_replicas_come_before_others() -> None:
    everybody = [dialable(f"{stage}", stage) for stage in range(6)]
    assert set(by_worth(OWN, ModuleId(2), everybody, ())[:3]) == {"1", "2", "3"}
    assert set(by_worth(OWN, ModuleId(5), everybody, ())[:3]) == {"4", "5", "0"}, (
        "the data node gets the last stage's output"
    )
    assert set(by_worth(OWN, ModuleId(0), everybody, ())[:3]) == {"5", "0", "1"}
    assert len(by_worth(OWN, None, everybody, ())) == 6, "a visitor takes anybody"


def test_another_expert_of_the_stage_is_no_replica() -> None:
    other = replace(dialable("other", 2), module=ModuleId(2, 1))
    assert by_worth(OWN, ModuleId(2), [other, dialable("far", 4), dialable("next", 3)], ())[0] == "next"


def test_the_own_stage_may_be_the_last_one_though_nobody_else_serves_it() -> None:
    assert by_worth(OWN, ModuleId(3), [dialable("a", 1), dialable("d", 0)], ()) == ["d", "a"]


def test_who_is_held_on_to_stays_before_its_equals_and_gives_way_to_a_neighbour() -> None:
    equals = [dialable(f"p{n}", 5) for n in range(9)]
    last = by_worth(OWN, ModuleId(1), equals, ())[-1]
    assert by_worth(OWN, ModuleId(1), equals, (last,))[0] == last
    assert by_worth(OWN, ModuleId(1), [*equals, dialable("near", 2)], (last,))[:2] == ["near", last]


def test_only_who_can_be_dialled_and_stays_is_of_use() -> None:
    useless = [
        announcement("no-address", 1),
        replace(announcement("called", 1), via=(PeerId("p"),)),
        dialable("leaves", 1, PeerState.DRAINING),
        dialable("visits", None, PeerState.VISITING),
        dialable(OWN, 1),
    ]
    assert by_worth(OWN, ModuleId(1), useless, ()) == []
    assert by_worth(OWN, ModuleId(1), [dialable("joins", 1, PeerState.JOINING)], ()) == ["joins"]


def test_many_peers_spread_over_those_they_are_called_through() -> None:
    equals = [dialable(f"p{n}", 1) for n in range(10)]
    firsts = {by_worth(PeerId(f"own{n}"), ModuleId(1), equals, ())[0] for n in range(60)}
    assert len(firsts) > 5
