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
    MAX_PEERS,
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
places = st.integers(0, MAX_LANES - 1)
measures = st.floats(0, allow_nan=False, allow_infinity=False)
routes = st.lists(st.sampled_from(PEERS), unique=True).map(tuple)
stages = st.frozensets(st.integers(1, MAX_STAGES - 1), max_size=8)
lanes = st.builds(Lane, routes, stages, measures)
standings = st.builds(Standing, st.sampled_from(PEERS), versions, st.lists(lanes, max_size=8).map(tuple))

messages = st.one_of(
    st.builds(Told, epochs, standings),
    st.builds(Told, epochs, standings, standings, numbers),
    st.builds(Heard, epochs, versions),
    st.builds(Offer, epochs, numbers, standings, places, routes, versions, places, stages, measures),
    st.builds(Accept, epochs, numbers, lanes),
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
    ours, theirs = largest(0, lengths), largest(MAX_VISITS, lengths)
    route = tuple(map(peer, range(MAX_VISITS, MAX_VISITS + MAX_HOPS)))
    wide = frozenset(range(MAX_STAGES - MAX_HOPS, MAX_STAGES))
    for message in (
        Told(EPOCH, ours, theirs, MAX_OFFER),
        Offer(EPOCH, MAX_OFFER, ours, MAX_LANES - 1, route, MAX_VERSION, MAX_LANES - 1, wide, 1 / 3),
        Accept(EPOCH, MAX_OFFER, Lane(route, wide, 1 / 3)),
        Decline(EPOCH, MAX_OFFER, True, ours),
    ):
        frame = encode(message)
        assert len(frame) <= MAX_SMALL_FRAME_BYTES * 7 // 8
        assert decode(frame) == message


def test_a_peer_that_many_lanes_visit_is_named_once() -> None:
    lane = Lane((PEERS[0], PEERS[1]), frozenset({1, 2}), 1.0)
    frame = encode(Told(EPOCH, Standing(PEERS[2], 1, (lane,) * MAX_LANES), Standing(PEERS[3], 1, (lane,)), 1))
    assert frame.count(PEERS[0].encode()) == frame.count(PEERS[1].encode()) == 1


def test_a_lane_whose_stages_nobody_serves_can_be_told() -> None:
    message = Told(EPOCH, Standing(PEERS[0], 0, (Lane((), frozenset({1, 2}), 0.0),)))
    assert decode(encode(message)) == message


def test_the_epochs_that_groups_have_can_be_told() -> None:
    epoch = group_of(PEERS[0], frozenset(map(Member, PEERS))).epoch
    assert decode(encode(Heard(epoch, 1))) == Heard(epoch, 1)


# ---- golden bytes ---------------------------------------------------------------------------------------------------


def test_the_bytes_of_an_acceptance_written_out() -> None:
    """Worked out by hand from link.proto: another number of a field, or another type, makes other bytes."""
    names = b"\x12\x34" + PEERS[3].encode() + b"\x12\x34" + PEERS[1].encode()
    lane = bytes.fromhex("0a02 0001 1203 02ac02 19 000000000000f83f")
    accept = b"\x0a\x08" + EPOCH + names + b"\x18\x07" + b"\x22" + bytes([len(lane)]) + lane
    lane_told = Lane((PEERS[3], PEERS[1]), frozenset({300, 2}), 1.5)
    assert encode(Accept(EPOCH, 7, lane_told)) == b"\xaa\x02\x8c\x01" + accept


# ---- lies -----------------------------------------------------------------------------------------------------------


def lane(**changes: object) -> wire.Lane:
    return wire.Lane(**{"route": [1, 0], "stages": [1, 2], "alone_s": 1.0, **changes})  # type: ignore[arg-type]


def standing(**changes: object) -> wire.LaneStanding:
    return wire.LaneStanding(**{"peer": PEERS[0], "version": 1, "lanes": [lane()], **changes})  # type: ignore[arg-type]


def told(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "sender": standing(), "other": standing(peer=PEERS[1]), "number": 1}
    return wire.Frame(lane_told=wire.LaneTold(**{**honest, **changes}))  # type: ignore[arg-type]


def offer(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "number": 1, "sender": standing(), "asking_lane": 0, "route": [0, 1]}
    more = {"asked_version": 1, "asked_lane": 0, "stages": [2, 3], "need_s": 1.0}
    return wire.Frame(lane_offer=wire.LaneOffer(**{**honest, **more, **changes}))  # type: ignore[arg-type]


def accept(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "number": 1, "lane": lane()}
    return wire.Frame(lane_accept=wire.LaneAccept(**{**honest, **changes}))  # type: ignore[arg-type]


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
    "decision without a number": told(number=0),
    "number without a decision": told(other=None),
    "nobody stands": told(sender=None),
    "odd data node": sender(peer="12D3Koo"),
    "other's data node": told(other=standing(peer="")),
    "other's version": told(other=standing(version=MAX_VERSION + 1)),
    "decliner's version": decline(sender=standing(version=2**48)),
    "too many lanes": sender(lanes=[lane(route=[], stages=[])] * (MAX_LANES + 1)),
    "too many visits": told(peers=MANY[:HALF], sender=standing(lanes=[*FULL, lane(route=[0], stages=[])])),
    "too many stages together": told(peers=MANY[:HALF], sender=standing(lanes=[*FULL, lane(route=[], stages=[1])])),
    "too many peers": told(peers=MANY),
    "a peer listed twice": told(peers=PEERS[:1] * 2),
    "odd peer": accept(peers=[PEERS[0], "x"]),
    "no such peer": first_lane(route=[2]),
    "no such peer at all": first_lane(route=[2**32 - 1]),
    "nobody listed": accept(peers=[]),
    "a peer visited twice": first_lane(route=[1, 1]),
    "long route": accept(peers=MANY[:MAX_PEERS], lane=lane(route=range(MAX_HOPS + 1))),
    "many stages": accept(lane=lane(stages=range(1, MAX_HOPS + 2))),
    "stage 0": first_lane(stages=[0, 1]),
    "stage beyond": first_lane(stages=[MAX_STAGES]),
    "stages fall": first_lane(stages=[2, 1]),
    "a stage twice": first_lane(stages=[2, 2]),
    "round trip is NaN": first_lane(alone_s=math.nan),
    "round trip is infinite": first_lane(alone_s=math.inf),
    "round trip is negative": accept(lane=lane(alone_s=-1e-9)),
    "asking lane beyond": offer(asking_lane=MAX_LANES),
    "asked lane beyond": offer(asked_lane=MAX_LANES),
    "asked version beyond": offer(asked_version=MAX_VERSION + 1),
    "asked for nobody": offer(route=[2]),
    "asked for somebody twice": offer(route=[0, 0]),
    "asked for too many": offer(peers=MANY[:MAX_PEERS], route=range(MAX_HOPS + 1)),
    "left in no order": offer(stages=[3, 2]),
    "left stage 0": offer(stages=[0]),
    "need is NaN": offer(need_s=math.nan),
    "need is infinite": offer(need_s=math.inf),
    "need is negative": offer(need_s=-1.0),
}


@pytest.mark.parametrize("frame", LIES.values(), ids=LIES.keys())
def test_what_is_out_of_bounds_is_refused(frame: wire.Frame) -> None:
    with pytest.raises(ProtocolViolation, match=r"lanes:|peer id"):
        decode(frame.SerializeToString())


@pytest.mark.parametrize(
    "frame",
    [
        told(),
        told(other=None, number=0),
        told(peers=MANY[:MAX_PEERS], sender=standing(lanes=FULL)),
        offer(),
        accept(),
        accept(peers=MANY[:MAX_HOPS], lane=lane(route=range(MAX_HOPS), stages=range(1, MAX_HOPS + 1))),
        decline(),
        heard(),
        abandon(),
        sender(lanes=[lane(route=[], stages=[])] * MAX_LANES),
    ],
)
def test_the_honest_frames_of_the_lies_above_are_accepted(frame: wire.Frame) -> None:
    decode(frame.SerializeToString())
