"""Frames of the talk about lanes: there and back, at their bounds, beyond them, and damaged."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames.frames import MAX_SMALL_FRAME_BYTES, decode, encode
from protocol.generated import link_pb2 as wire
from swarm.routing.negotiation.groups import group_of
from swarm.routing.negotiation.negotiation_events import Member
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.routing_messages import (
    EPOCH_BYTES,
    MAX_LANES,
    MAX_OFFER,
    MAX_OFFERED_LANES,
    MAX_OFFERED_VISITS,
    MAX_PEERS,
    MAX_TALKING,
    MAX_VERSION,
    MAX_VISITS,
    Abandon,
    Accept,
    Decline,
    Heard,
    Lane,
    LaneControl,
    Offer,
    Standing,
    Told,
)
from swarm.vocabulary.types import MAX_HOPS, MAX_STAGES
from tests.protocol.codecs.damage import assert_refused_or_another_valid_frame
from tests.protocol.frames.frame_examples import peer

PEERS = [peer(number) for number in range(8)]
EPOCH = b"\x01\x00epoch\xff"

epochs = st.binary(min_size=EPOCH_BYTES, max_size=EPOCH_BYTES)
versions = st.integers(0, MAX_VERSION)
numbers = st.integers(1, MAX_OFFER)
measures = st.floats(0, allow_nan=False, allow_infinity=False)
routes = st.lists(st.sampled_from(PEERS), unique=True).map(tuple)
stages = st.frozensets(st.integers(1, MAX_STAGES - 1), max_size=8)
lanes = st.builds(Lane, routes, stages, measures)
standings = st.builds(Standing, st.sampled_from(PEERS), versions, st.lists(lanes, max_size=8).map(tuple))

messages = st.one_of(
    st.builds(Told, epochs, standings),
    st.builds(Told, epochs, standings, numbers, versions),
    st.builds(Heard, epochs, versions),
    st.builds(Offer, epochs, numbers, st.lists(standings, min_size=1, max_size=8).map(tuple)),
    st.builds(Accept, epochs, numbers),
    st.builds(Decline, epochs, numbers, st.booleans(), standings),
    st.builds(Abandon, epochs, numbers),
)


@given(messages)
def test_what_is_encoded_is_decoded_to_the_same(message: LaneControl) -> None:
    assert decode(encode(message)) == message


@given(messages, st.data())
def test_a_damaged_frame_is_a_violation_or_another_valid_frame(message: LaneControl, data: st.DataObject) -> None:
    assert_refused_or_another_valid_frame(encode(message), data)


def largest(first: int, lengths: list[int]) -> Standing:
    """Lanes of these lengths that share no peer, by the longest numbers there are."""
    found = []
    for length in lengths:
        route, first = tuple(map(peer, range(first, first + length))), first + length
        found.append(Lane(route, frozenset(range(MAX_STAGES - length, MAX_STAGES)), 1 / 3))
    return Standing(peer(0), MAX_VERSION, tuple(found))


@pytest.mark.parametrize("count", [MAX_VISITS // MAX_HOPS, MAX_LANES])
def test_the_longest_messages_are_small_frames(count: int) -> None:
    lengths = [MAX_VISITS // count] * count
    ours = largest(0, lengths)
    for message in (Told(EPOCH, ours, MAX_OFFER), Decline(EPOCH, MAX_OFFER, True, ours)):
        assert_is_a_small_frame(message)


@pytest.mark.parametrize("count", [MAX_OFFERED_VISITS // MAX_HOPS, MAX_OFFERED_LANES])
def test_the_longest_offers_are_small_frames(count: int) -> None:
    """As many peers as can be named, by the longest numbers there are, in lanes that have nothing in common."""
    length, standings = MAX_OFFERED_VISITS // count, []
    peers = [peer(number) for number in range(MAX_PEERS - MAX_TALKING)]
    for rank in range(MAX_TALKING):
        places = range(rank * count // MAX_TALKING, (rank + 1) * count // MAX_TALKING)
        lanes = [
            Lane(tuple(peers[(place * length + k) % len(peers)] for k in range(length)), WIDE[length], 1 / 3)
            for place in places
        ]
        standings.append(Standing(peer(2000 + rank), MAX_VERSION, tuple(lanes)))
    assert_is_a_small_frame(Offer(EPOCH, MAX_OFFER, tuple(standings)))


WIDE = {n: frozenset(range(MAX_STAGES - n, MAX_STAGES)) for n in (4, MAX_HOPS)}


def assert_is_a_small_frame(message: LaneControl) -> None:
    frame = encode(message)
    assert len(frame) <= MAX_SMALL_FRAME_BYTES * 31 // 32
    assert decode(frame) == message


def test_a_peer_that_many_lanes_visit_is_named_once() -> None:
    lane = Lane((PEERS[0], PEERS[1]), frozenset({1, 2}), 1.0)
    frame = encode(Offer(EPOCH, 1, (Standing(PEERS[2], 1, (lane,) * MAX_LANES), Standing(PEERS[3], 1, (lane,)))))
    assert frame.count(PEERS[0].encode()) == frame.count(PEERS[1].encode()) == 1


def test_a_lane_whose_stages_nobody_serves_can_be_told() -> None:
    message = Told(EPOCH, Standing(PEERS[0], 0, (Lane((), frozenset({1, 2}), 0.0),)))
    assert decode(encode(message)) == message


def test_the_epochs_that_groups_have_can_be_told() -> None:
    epoch = group_of(PEERS[0], frozenset(map(Member, PEERS))).epoch
    assert decode(encode(Heard(epoch, 1))) == Heard(epoch, 1)


# ---- golden bytes ---------------------------------------------------------------------------------------------------


def test_the_bytes_of_an_offer_written_out() -> None:
    """Worked out by hand from link.proto: another number of a field, or another type, makes other bytes."""
    names = b"\x12\x34" + PEERS[3].encode() + b"\x12\x34" + PEERS[1].encode()
    lane = bytes.fromhex("0a02 0001 1203 02ac02 19 000000000000f83f")
    stands = b"\x0a\x34" + PEERS[0].encode() + b"\x10\x09" + b"\x1a" + bytes([len(lane)]) + lane
    offered = b"\x0a\x08" + EPOCH + names + b"\x18\x07" + b"\x62" + bytes([len(stands)]) + stands
    lanes = (Lane((PEERS[3], PEERS[1]), frozenset({300, 2}), 1.5),)
    assert encode(Offer(EPOCH, 7, (Standing(PEERS[0], 9, lanes),))) == b"\xa2\x02\xc6\x01" + offered


# ---- lies -----------------------------------------------------------------------------------------------------------


def lane(**changes: object) -> wire.Lane:
    return wire.Lane(**{"route": [1, 0], "stages": [1, 2], "alone_s": 1.0, **changes})  # type: ignore[arg-type]


def standing(**changes: object) -> wire.LaneStanding:
    return wire.LaneStanding(**{"peer": PEERS[0], "version": 1, "lanes": [lane()], **changes})  # type: ignore[arg-type]


def told(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "sender": standing(), "number": 1}
    return wire.Frame(lane_told=wire.LaneTold(**{**honest, **changes}))  # type: ignore[arg-type]


def offer(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "number": 1, "standings": [standing(), standing(peer=PEERS[1])]}
    return wire.Frame(lane_offer=wire.LaneOffer(**{**honest, **changes}))  # type: ignore[arg-type]


def accept(**changes: object) -> wire.Frame:
    return wire.Frame(lane_accept=wire.LaneAccept(**{"epoch": EPOCH, "number": 1, **changes}))  # type: ignore[arg-type]


def decline(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "number": 1, "busy": True, "sender": standing()}
    return wire.Frame(lane_decline=wire.LaneDecline(**{**honest, **changes}))  # type: ignore[arg-type]


def heard(**changes: object) -> wire.Frame:
    return wire.Frame(lane_heard=wire.LaneHeard(**{"epoch": EPOCH, "version": 1, **changes}))  # type: ignore[arg-type]


def abandon(**changes: object) -> wire.Frame:
    return wire.Frame(lane_abandon=wire.LaneAbandon(**{"epoch": EPOCH, "number": 1, **changes}))  # type: ignore[arg-type]


def sender(**changes: object) -> wire.Frame:
    return told(sender=standing(**changes))


def first_lane(**changes: object) -> wire.Frame:
    return sender(lanes=[lane(**changes)])


MANY = [peer(number) for number in range(MAX_PEERS + 1)]
HALF = MAX_HOPS // 2
FULL = [lane(route=range(HALF), stages=range(1, HALF + 1))] * (MAX_VISITS // HALF)
LONGEST = lane(route=range(MAX_HOPS), stages=range(1, MAX_HOPS + 1))

LIES: dict[str, wire.Frame] = {
    "no epoch": heard(epoch=b""),
    "short epoch": abandon(epoch=bytes(EPOCH_BYTES - 1)),
    "long epoch": told(epoch=bytes(EPOCH_BYTES + 1)),
    "offer's epoch": offer(epoch=b""),
    "acceptance's epoch": accept(epoch=b"x" * 32),
    "refusal's epoch": decline(epoch=b"x"),
    "version beyond": heard(version=MAX_VERSION + 1),
    "offer 0": abandon(number=0),
    "offer beyond": abandon(number=MAX_OFFER + 1),
    "offered as 0": offer(number=0),
    "accepted beyond": accept(number=2**64 - 1),
    "declined as 0": decline(number=0),
    "decided beyond": told(number=MAX_OFFER + 1),
    "nobody stands": told(sender=None),
    "odd data node": sender(peer="12D3Koo"),
    "decliner's version": decline(sender=standing(version=2**48)),
    "too many lanes": sender(lanes=[lane(route=[], stages=[])] * (MAX_LANES + 1)),
    "too many visits": told(peers=MANY[:HALF], sender=standing(lanes=[*FULL, lane(route=[0], stages=[])])),
    "too many stages together": told(peers=MANY[:HALF], sender=standing(lanes=[*FULL, lane(route=[], stages=[1])])),
    "too many peers": told(peers=MANY),
    "a peer listed twice": told(peers=PEERS[:1] * 2),
    "odd peer": told(peers=[PEERS[0], "x"]),
    "no such peer": first_lane(route=[2]),
    "no such peer at all": first_lane(route=[2**32 - 1]),
    "nobody listed": told(peers=[]),
    "a peer visited twice": first_lane(route=[1, 1]),
    "long route": told(peers=MANY[:MAX_PEERS], sender=standing(lanes=[lane(route=range(MAX_HOPS + 1))])),
    "many stages": first_lane(stages=range(1, MAX_HOPS + 2)),
    "stage 0": first_lane(stages=[0, 1]),
    "stage beyond": first_lane(stages=[MAX_STAGES]),
    "stages fall": first_lane(stages=[2, 1]),
    "a stage twice": first_lane(stages=[2, 2]),
    "round trip is NaN": first_lane(alone_s=math.nan),
    "round trip is infinite": first_lane(alone_s=math.inf),
    "offered to nobody": offer(standings=[]),
    "offered to too many": offer(standings=[standing(lanes=[])] * (MAX_TALKING + 1)),
    "offered standing's data node": offer(standings=[standing(), standing(peer="")]),
    "offered version beyond": offer(standings=[standing(version=MAX_VERSION + 1)]),
    "too many lanes of all": offer(standings=[standing(lanes=[lane()] * MAX_LANES)] * 8 + [standing()]),
    "too many visits of all": offer(peers=MANY[:HALF], standings=[standing(lanes=FULL)] * 4 + [standing()]),
    "no such peer offered": offer(standings=[standing(lanes=[lane(route=[2])])]),
    "round trip is negative": first_lane(alone_s=-1e-9),
}


@pytest.mark.parametrize("frame", LIES.values(), ids=LIES.keys())
def test_what_is_out_of_bounds_is_refused(frame: wire.Frame) -> None:
    with pytest.raises(ProtocolViolation, match=r"lanes:|peer id"):
        decode(frame.SerializeToString())


@pytest.mark.parametrize(
    "frame",
    [
        told(),
        told(number=0),
        told(peers=MANY[:MAX_PEERS], sender=standing(lanes=FULL)),
        offer(),
        accept(),
        told(peers=MANY[:MAX_HOPS], sender=standing(lanes=[LONGEST])),
        offer(peers=MANY[:HALF], standings=[standing(lanes=FULL)] * 4),
        offer(standings=[standing(lanes=[lane()] * MAX_LANES)] * 8),
        decline(),
        heard(),
        abandon(),
        sender(lanes=[lane(route=[], stages=[])] * MAX_LANES),
    ],
)
def test_the_honest_frames_of_the_lies_above_are_accepted(frame: wire.Frame) -> None:
    decode(frame.SerializeToString())
