"""The network at a moment: delays and rates add up over both links, faults and partitions stop what they should."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.emulation.emulation import (
    BURST_S,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    PROFILES,
    REGIONS,
    Emulation,
    Fault,
    LinkShape,
    Shaper,
    Site,
    profile_of,
    region_bytes_per_s,
    region_delay_s,
)
from swarm.vocabulary.errors import ConfigError

SLOW = LinkShape(latency_s=0.01, up_bytes_per_s=1000.0, down_bytes_per_s=4000.0)
FAR = LinkShape(latency_s=0.05, up_bytes_per_s=8000.0, down_bytes_per_s=2000.0)


def emulation(*shapes: LinkShape) -> Emulation:
    made = Emulation(seed=1)
    for member, shape in enumerate(shapes):
        made.place(member, Site(shape))
    return made


def test_both_links_delay_and_limit() -> None:
    network = emulation(SLOW, FAR)
    assert network.one_way_s((0, 1), random.Random(0)) == pytest.approx(0.06)
    left_at = network.leave((0, 1), 1000, 0.0)
    assert left_at == pytest.approx(1.0 - BURST_S)
    assert network.arrive((0, 1), 1000, left_at) == pytest.approx(left_at + 0.5 - BURST_S)
    assert network.passed() == {(0, 1): 1000}


def test_all_connections_of_a_peer_share_its_way_up() -> None:
    network = emulation(SLOW, FAR, FAR)
    network.leave((0, 1), 1000, 0.0)
    assert network.leave((0, 2), 1000, 0.0) == pytest.approx(2.0 - BURST_S)


def test_who_is_no_member_has_an_ideal_link() -> None:
    network = emulation(FAR)
    assert network.one_way_s((None, 0), random.Random(0)) == 0.05
    assert network.leave((None, 0), 10**9, 7.0) == 7.0


def test_jitter_is_drawn_anew_for_each_connection_and_the_same_with_the_same_seed() -> None:
    shapes = LinkShape(jitter_s=0.02), LinkShape(jitter_s=0.02)

    def draws(network: Emulation) -> list[float]:
        return [network.one_way_s((0, 1), network.randomness((0, 1))) for _ in range(3)]

    drawn = draws(emulation(*shapes))
    assert draws(emulation(*shapes)) == drawn
    assert len(set(drawn)) == 3
    assert all(0 <= delay <= 0.04 for delay in drawn)


@pytest.mark.parametrize(
    ("fault", "out", "back"),
    [
        (Fault.NONE, True, True),
        (Fault.HALF_OPEN, True, False),
        (Fault.BLACK_HOLE, False, False),
        (Fault.RESET, False, False),
    ],
)
def test_what_a_faulty_link_carries(fault: Fault, out: bool, back: bool) -> None:
    network = emulation(LinkShape(fault=fault), LinkShape())
    assert (network.passes((0, 1)), network.passes((1, 0))) == (out, back)
    assert network.is_reset(0) == (fault is Fault.RESET)
    assert not network.is_reset(None)


def test_a_partition_parts_its_sides_and_nobody_else() -> None:
    network = emulation(*(LinkShape() for _ in range(4)))
    network.partition(((0, 1), (2,)))
    passing = {(one, other) for one in range(4) for other in range(4) if one < other and network.passes((one, other))}
    assert passing == {(0, 1), (0, 3), (1, 3), (2, 3)}
    network.heal()
    assert network.passes((0, 2))


async def test_who_waits_for_a_way_goes_on_when_it_is_open() -> None:
    network = emulation(LinkShape(fault=Fault.BLACK_HOLE), LinkShape())
    waiting = asyncio.create_task(network.passable((0, 1)))
    network.reshape(0, LinkShape(latency_s=1.0, fault=Fault.HALF_OPEN))
    await waiting
    network.reshape(0, LinkShape(fault=Fault.BLACK_HOLE))
    waiting = asyncio.create_task(network.passable((0, 1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    network.clear()
    await waiting


def test_pieces_are_small_on_narrow_links() -> None:
    assert emulation(SLOW, FAR).chunk_bytes((0, 1)) == MIN_CHUNK_BYTES
    assert emulation(LinkShape(), LinkShape()).chunk_bytes((0, 1)) == MAX_CHUNK_BYTES


def test_regions_add_their_delay_and_their_rate() -> None:
    network = Emulation(seed=1)
    network.place(0, profile_of("gcp-london").site)
    network.place(1, profile_of("gcp-oregon").site)
    network.place(2, Site())
    assert network.one_way_s((0, 1), random.Random(0)) == pytest.approx(0.064)
    assert network.one_way_s((0, 2), random.Random(0)) == 0.0
    size_bytes = 10 * 2**20
    assert network.leave((0, 1), size_bytes, 0.0) == pytest.approx(size_bytes / (21.75 * 2**20) - BURST_S)
    assert network.leave((0, 2), size_bytes, 0.0) == 0.0


def test_the_tables_of_regions_are_symmetric_and_whole() -> None:
    for one in REGIONS:
        for other in REGIONS:
            assert region_delay_s(one, other) == region_delay_s(other, one) > 0
            assert region_bytes_per_s(one, other) == region_bytes_per_s(other, one) > 2**20
    assert region_delay_s("belgium", "nl") == 0.003
    assert region_bytes_per_s("iowa", "oregon") == 92.5 * 2**20


def test_profiles_have_names() -> None:
    assert {"none", "home-adsl", "home-fibre", "mobile", "transatlantic", "gcp-london"} <= PROFILES.keys()
    with pytest.raises(ConfigError, match="is not a profile"):
        profile_of("modem")


def test_a_way_can_be_blocked_alone() -> None:
    network = emulation(SLOW, FAR, FAR)
    network.block([(0, 1)])
    assert not network.passes((0, 1))
    assert network.passes((1, 0))
    assert network.passes((0, 2))
    network.clear()
    assert network.passes((0, 1))


def test_a_connection_breaks_behind_every_so_many_bytes() -> None:
    network = emulation(SLOW, FAR, FAR)
    network.break_every(1, 100)
    assert network.before_break((0, 2), 1000) is None
    assert network.before_break((0, 1), 60) is None
    assert network.before_break((2, 1), 50) == 40, "all connections to the peer count together"
    assert network.before_break((0, 1), 99) is None, "counted anew"
    assert network.before_break((0, 1), 1) == 1
    network.break_every(1, None)
    assert network.before_break((0, 1), 1000) is None


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 100_000)), min_size=1, max_size=50), st.floats(100, 1e6))
def test_no_more_passes_than_the_rate_and_one_burst(sends: list[tuple[float, int]], rate: float) -> None:
    shaper = Shaper(rate)
    now, left_at, passed = 0.0, 0.0, 0
    for pause_s, size_bytes in sends:
        now = max(now + pause_s, left_at)
        granted = shaper.grant(size_bytes, now)
        assert granted >= max(now, left_at)
        left_at, passed = granted, passed + size_bytes
    assert passed <= (left_at + BURST_S) * rate * (1 + 1e-9) + 1


def test_a_new_rate_holds_for_what_comes_after_it_and_a_pause_saves_nothing_up() -> None:
    shaper = Shaper(1000.0)
    assert shaper.grant(1000, 0.0) == pytest.approx(1.0 - BURST_S)
    shaper.bytes_per_s = 100.0
    assert shaper.grant(100, 0.0) == pytest.approx(2.0 - BURST_S)
    assert shaper.grant(100, 5.0) == pytest.approx(6.0 - BURST_S)
