"""Lanes are taken in an order that spreads every peer's and every stage's share out."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.stage_balance import ring_stages, spread
from swarm.vocabulary.types import Hop, ModuleId, PeerId


def lane(*stages: int, replica: str = "") -> tuple[Hop, ...]:
    return tuple(Hop(ModuleId(stage), PeerId(f"{stage}{replica}")) for stage in stages)


lanes = st.lists(st.sets(st.integers(1, 6), min_size=1, max_size=3).map(lambda s: lane(*sorted(s))), max_size=24)


@given(lanes)
def test_all_lanes_have_their_turn_once(given_lanes: list[tuple[Hop, ...]]) -> None:
    assert Counter(spread(given_lanes)) == Counter(given_lanes)


def test_heaps_are_taken_apart() -> None:
    heaps = [lane(1, 2)] * 4 + [lane(2, 3)] * 4 + [lane(1, 3)] * 4
    order = spread(heaps)
    for first in range(0, 12, 3):
        visits = Counter(hop.module.stage for taken in order[first : first + 3] for hop in taken)
        assert visits == {1: 2, 2: 2, 3: 2}


def test_a_fast_replica_has_its_larger_share_all_the_time() -> None:
    order = spread([lane(1, replica="slow")] * 2 + [lane(1, replica="fast")] * 6)
    for first in range(0, 8, 4):
        assert Counter(taken[0].peer for taken in order[first : first + 4]) == {"1slow": 1, "1fast": 3}


def test_the_ring_stays_as_even_as_it_is() -> None:
    order = spread([lane(*ring_stages(8, 4, turn)) for turn in range(7)])
    for end in range(1, 8):
        visits = Counter(hop.module.stage for taken in order[:end] for hop in taken)
        assert all(abs(visits[stage] - end * 4 / 7) <= 1.5 for stage in range(1, 8))
