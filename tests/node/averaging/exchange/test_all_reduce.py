"""The exchange among members in one process: what comes out, who is told what, and what a bad member can do."""

from collections.abc import Callable

import numpy as np
import pytest

from node.averaging.anchor.anchor import hash_all
from node.averaging.exchange.pieces import ExchangeProgress, Plan
from protocol.codecs import encoded_bytes
from swarm.averaging.round_events import Event, Owing, PieceArrived, PieceRejected
from swarm.compression.round_codecs import codec_levels, result_codec
from swarm.vocabulary.averaging_messages import Contribution, Reduced, RoundId
from swarm.vocabulary.types import Codec, PeerId
from tests.kit.waiting import until
from tests.node.averaging.small_rounds import (
    Room,
    base_anchor,
    equal_weights,
    outer_reference,
    room,
    roster_of,
    small_layout,
    vector,
)

NAMES = ("a", "b", "c", "d")
BASE = base_anchor(small_layout())


def snapshots_of(base, count):  # type: ignore[no-untyped-def]
    return {name: base.parameters - vector(base.layout.elements, 10 + i, 0.01) for i, name in enumerate(NAMES[:count])}


EVERY = (Codec.NONE, Codec.BF16, *codec_levels(Codec.INT2))


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.BF16, Codec.INT8])
@pytest.mark.parametrize(("count", "shares"), [(1, None), (2, [3, 1]), (4, None), (4, [5, 0, 1, 2])])
async def test_all_members_make_the_same_anchor(codec: Codec, count: int, shares: list[int] | None) -> None:
    async with room(BASE, snapshots_of(BASE, count), codec) as here:
        parties = list(here.parties.values())
        weights = [0.4, 0.3, 0.2, 0.1][:count]
        members = [(p.peer, w / sum(weights), p.norm) for p, w in zip(parties, weights, strict=True)]
        anchors = await here.exchange(roster_of(BASE, members, shares=shares))
        assert len({anchor.version.digest for anchor in anchors}) == 1
        first = anchors[0]
        for other in anchors[1:]:
            np.testing.assert_array_equal(first.parameters, other.parameters)
            np.testing.assert_array_equal(first.momentum, other.momentum)
        assert first.hashes == hash_all(first.layout, first.parameters, first.momentum)
        mean = sum(c * p.gradient.astype(np.float64) for p, (_, c, _) in zip(parties, members, strict=True))
        parameters, momentum = outer_reference(BASE, mean.astype(np.float32), slice(None))
        tolerance = 1e-6 if codec is Codec.NONE else 1e-3
        np.testing.assert_allclose(first.parameters, parameters, rtol=0, atol=tolerance)
        np.testing.assert_allclose(first.momentum, momentum, rtol=0, atol=tolerance)
        assert (first.version.round, first.version.steps, first.version.tokens) == (1, 10, 1000)


@pytest.mark.parametrize("codec", EVERY, ids=lambda codec: codec.name)
async def test_bytes_are_those_of_the_best_all_reduce(codec: Codec) -> None:
    async with room(BASE, snapshots_of(BASE, 4), codec) as here:
        await here.exchange(roster_of(BASE, equal_weights(list(here.parties.values()))))
        sent = sum(party.exchange.sent_bytes for party in here.parties.values())
        both_ways = sum(encoded_bytes(each, BASE.layout.elements) for each in (codec, result_codec(codec)))
        assert sent <= 1.05 * 3 / 4 * both_ways * 4


async def test_who_has_nothing_to_contribute_gets_the_result() -> None:
    async with room(BASE, snapshots_of(BASE, 3)) as here:
        a, b, c = here.parties.values()
        members = [(a.peer, 0.5, a.norm), (b.peer, 0.5, b.norm), (c.peer, 0.0, 0.0)]
        anchors = await here.exchange(roster_of(BASE, members))
        assert len({anchor.version.digest for anchor in anchors}) == 1
        np.testing.assert_allclose(anchors[2].momentum, (a.gradient + b.gradient) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.INT8, Codec.INT4, Codec.INT2])
async def test_pieces_may_come_before_the_roster(codec: Codec) -> None:
    async with room(BASE, snapshots_of(BASE, 3), codec) as here:
        here.codecs = EVERY
        here.prepare(roster_of(BASE, equal_weights(list(here.parties.values()))))
        here.start(PeerId("a"), PeerId("b"))
        await until(lambda: here["c"].arrivals.received_bytes > 0 and here.sent >= 6)
        assert here["c"].anchor is None
        here.start(PeerId("c"))
        await until(lambda: all(party.anchor is not None for party in here.parties.values()))
        assert len({party.anchor.version.digest for party in here.parties.values() if party.anchor}) == 1
        assert not here["c"].refusals


Spoil = Callable[[np.ndarray], object]


def times(factor: float) -> Spoil:
    return lambda values: np.multiply(values, np.float32(factor), out=values)


async def name_the_liar(here: Room, liar: str, kind: type[Contribution | Reduced], spoil: Spoil, judges: str) -> None:
    """What the liar sends is spoilt: all judges name it and nobody else, and make no anchor."""

    def tamper(sender: PeerId, to: PeerId, message: Contribution | Reduced, data: bytearray) -> None:
        if sender == liar and isinstance(message, kind):
            with np.errstate(all="ignore"):
                spoil(np.frombuffer(data, np.float32 if here.codec is Codec.NONE else np.uint8))

    here.tamper = tamper
    here.prepare(roster_of(here.base, equal_weights(list(here.parties.values()))))
    here.start()
    await until(lambda: all(any(isinstance(e, PieceRejected) for e in here[name].events) for name in judges))
    for name in judges:
        assert {e.sender for e in here[name].events if isinstance(e, PieceRejected)} == {liar}
        assert here[name].anchor is None


@pytest.mark.parametrize("spoil", [lambda values: values.put(17, np.nan), times(1e6), times(1e30), times(np.inf)])
async def test_a_contribution_that_cannot_be_used_is_named_and_left_out(spoil: Spoil) -> None:
    async with room(BASE, snapshots_of(BASE, 3)) as here:
        await name_the_liar(here, "b", Contribution, spoil, "ac")
        # The next attempt goes on without it.
        await here.stop()
        del here.parties[PeerId("b")]
        anchors = await here.exchange(roster_of(BASE, equal_weights(list(here.parties.values()))))
        assert anchors[0].version == anchors[1].version
        assert np.isfinite(anchors[0].parameters).all()


async def test_garbage_as_int8_is_named() -> None:
    async with room(BASE, snapshots_of(BASE, 2), Codec.INT8) as here:
        await name_the_liar(here, "b", Contribution, lambda octets: octets.fill(255), "a")


def alike(base, count):  # type: ignore[no-untyped-def]
    """Replicas that have learnt something in common, as real ones have."""
    elements = base.layout.elements
    common = vector(elements, 9, 0.01)
    return {name: base.parameters - common - vector(elements, 10 + i, 0.01) for i, name in enumerate(NAMES[:count])}


LIES: dict[str, Spoil] = {
    "longer than the members declared": times(100.0),
    "zeros": lambda values: values.fill(0.0),
    "something else": lambda values: np.copyto(values, np.roll(values, 7919) * np.float32(2.5)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_mean_that_cannot_contain_what_we_sent_is_objected_to(lie: Spoil) -> None:
    async with room(BASE, alike(BASE, 3)) as here:
        await name_the_liar(here, "c", Reduced, lie, "ab")


async def test_a_mean_that_points_the_other_way_makes_its_reducer_suspect() -> None:
    """A contributor may have done it as well, so nobody is accused before an audit."""
    async with room(BASE, alike(BASE, 3)) as here:

        def tamper(sender: PeerId, to: PeerId, message: Contribution | Reduced, data: bytearray) -> None:
            if sender == "c" and isinstance(message, Reduced):
                np.negative(np.frombuffer(data, np.float32), out=np.frombuffer(data, np.float32))

        here.tamper = tamper
        await here.exchange(roster_of(BASE, equal_weights(list(here.parties.values()))))
        suspects = {name: here[name].exchange.record(here[name].anchor).suspect for name in "abc"}
        assert suspects == {"a": "c", "b": "c", "c": None}


async def test_a_replica_whose_update_points_the_other_way_accuses_nobody() -> None:
    snapshots = alike(BASE, 3)
    snapshots["c"] = BASE.parameters + (BASE.parameters - snapshots["c"])
    async with room(BASE, snapshots) as here:
        anchors = await here.exchange(roster_of(BASE, equal_weights(list(here.parties.values()))))
        assert len({anchor.version.digest for anchor in anchors}) == 1


@pytest.mark.parametrize("codec", EVERY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize("kind", ["in common", "nothing in common"])
async def test_honest_means_are_not_objected_to(codec: Codec, members: int, kind: str) -> None:
    base = base_anchor(small_layout(40_000))
    for seed in range(3):
        common = vector(base.layout.elements, 100 + seed, 0.01 if kind == "in common" else 0.0)
        snapshots = {
            f"m{i}": base.parameters - common - vector(base.layout.elements, 1000 * seed + i, 0.01 * (1 + i % 3))
            for i in range(members)
        }
        async with room(base, snapshots, codec) as here:
            anchors = await here.exchange(roster_of(base, equal_weights(list(here.parties.values()))))
            assert len({anchor.version.digest for anchor in anchors}) == 1
            assert not any(isinstance(e, PieceRejected) for party in here.parties.values() for e in party.events)


async def test_the_dead_is_the_one_who_owes() -> None:
    base = base_anchor(small_layout(2_000_000))
    async with room(base, snapshots_of(base, 3)) as here:
        roster = roster_of(base, equal_weights(list(here.parties.values())))
        # A quarter of all sendings: before it has all contributions, which is another third, nobody can be done with
        # anybody.
        early = len(Plan(PeerId("a"), base.layout, roster).pieces)

        def tamper(sender, to, message, data):  # type: ignore[no-untyped-def]
            if here.sent >= early:
                here.dead.add(PeerId("c"))

        here.tamper = tamper
        here.prepare(roster)
        here.start()
        await until(lambda: any(party.task and here.sent >= early for party in here.parties.values()))
        for name in "ab":
            await until(lambda name=name: owed_to(here[name].events) == {"c"})
            assert here[name].anchor is None
            assert {event.sender for event in here[name].events if isinstance(event, PieceArrived)} <= {"a", "b", "c"}


def owed_to(events: list[Event]) -> frozenset[PeerId]:
    said = [event.peers for event in events if isinstance(event, Owing)]
    return said[-1] if said else frozenset()


async def test_ended_halfway_it_leaves_no_trace() -> None:
    base = base_anchor(small_layout(2_000_000))
    before = base.parameters.copy()
    async with room(base, snapshots_of(base, 2)) as here:
        roster = roster_of(base, equal_weights(list(here.parties.values())))
        here.prepare(roster)
        here.start()
        await until(lambda: here.sent >= 4)
        await here.stop()
        anchors = await here.exchange(roster)
        assert anchors[0].version == anchors[1].version
        for party in here.parties.values():
            np.testing.assert_array_equal(party.base.parameters, before)


async def test_buffers_are_bounded() -> None:
    """However slow the arithmetic, a reducer holds no more than the windows of the contributors."""
    base = base_anchor(small_layout(2_000_000))
    async with room(base, snapshots_of(base, 2)) as here:
        await here.exchange(roster_of(base, equal_weights(list(here.parties.values()))))
        largest = max(piece.elements for piece in here["a"].exchange.plan.pieces) * 4
        for party in here.parties.values():
            assert sum(len(buffers) * size for size, buffers in party.arrivals._free.items()) <= 2 * 8 * largest


def test_who_is_held_up_by_another_owes_nothing() -> None:
    """All have sent what they may before there are results; what is missing then is missing because of one of them."""
    base = base_anchor(small_layout(12 * 2**18))
    plan = Plan(PeerId("a"), base.layout, roster_of(base, [(PeerId(name), 1 / 3, 1.0) for name in "abc"]))
    progress = ExchangeProgress(plan)
    first, second, *rest = plan.shards[PeerId("a")]
    assert rest, "the shard has to be longer than what is sent ahead here"
    assert progress.owing() == {"b", "c"}
    progress.added(PeerId("b"), first)
    progress.added(PeerId("b"), second)
    assert progress.owing() == {"c"}
    progress.added(PeerId("c"), first)
    assert progress.owing() == {"c"}
    progress.added(PeerId("c"), second)
    assert progress.owing() == {"b", "c"}
    for piece in rest:
        for peer in "bc":
            progress.added(PeerId(peer), piece)
    assert progress.owing() == frozenset(), "a result is owed for what we have contributed"
    progress.contributed(PeerId("b"))
    assert progress.owing() == {"b"}
    progress.applied(plan.shards[PeerId("b")][0])
    assert progress.owing() == frozenset()


def test_another_tenth_of_the_pieces_is_told_once() -> None:
    base = base_anchor(small_layout(12 * 2**18))
    roster = roster_of(base, [(PeerId("a"), 0.5, 1.0), (PeerId("b"), 0.5, 1.0)])
    plan, told = Plan(PeerId("a"), base.layout, roster), list[tuple[RoundId, int, int]]()
    progress = ExchangeProgress(plan, lambda *how_far: told.append(how_far))
    for piece in plan.shards[PeerId("a")]:
        progress.added(PeerId("b"), piece)
    for piece in plan.pieces:
        progress.applied(piece)
    percents = [percent for _, _, percent in told]
    assert percents == sorted(set(percents))
    assert (percents[0], percents[-1]) == (0, 100)
    assert len(told) > 6
    assert {(attempt, chunks) for attempt, chunks, _ in told} == {(roster.round, roster.members[0].end_chunk)}
