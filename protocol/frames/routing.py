"""The frames of the data nodes' talk about lanes: `swarm.vocabulary.routing_messages` as link.proto has it.

What one message says by itself is checked here; whether it fits the epoch, the lanes and the peers that are alive is
checked by those who know them. Lanes share peers, so a message names each peer once and its routes say which of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, Final

from protocol.frames.fields import checked_measure, checked_peer
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.routing_messages import (
    EPOCH_BYTES,
    MAX_LANES,
    MAX_OFFER,
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
from swarm.vocabulary.types import MAX_HOPS, MAX_STAGES, PeerId

MAX_PEERS: Final = 2 * MAX_VISITS
"""In one message: those that the lanes of two data nodes visit."""

_Places = dict[PeerId, int]


# ---- writing ------------------------------------------------------------------------------------------------------


def encode_lanes(message: LaneControl) -> wire.Frame:
    """The frame of link.proto for a message about lanes."""
    match message:
        case Told():
            return wire.Frame(lane_told=_wire_told(message))
        case Heard(epoch, version):
            return wire.Frame(lane_heard=wire.LaneHeard(epoch=epoch, version=version))
        case Offer():
            return wire.Frame(lane_offer=_wire_offer(message))
        case Accept(epoch, number, lane):
            places = _places([lane.route])
            accept = wire.LaneAccept(epoch=epoch, peers=places, number=number, lane=_wire_lane(lane, places))
            return wire.Frame(lane_accept=accept)
        case Decline():
            return wire.Frame(lane_decline=_wire_decline(message))
        case Abandon(epoch, number):
            return wire.Frame(lane_abandon=wire.LaneAbandon(epoch=epoch, number=number))


def _wire_told(told: Told) -> wire.LaneTold:
    other = told.other
    places = _places(_routes(told.sender) if other is None else _routes(told.sender) + _routes(other))
    return wire.LaneTold(
        epoch=told.epoch,
        peers=places,
        sender=_wire_standing(told.sender, places),
        other=None if other is None else _wire_standing(other, places),
        number=told.number or 0,
    )


def _wire_offer(offer: Offer) -> wire.LaneOffer:
    places = _places([*_routes(offer.sender), offer.route])
    return wire.LaneOffer(
        epoch=offer.epoch,
        peers=places,
        number=offer.number,
        sender=_wire_standing(offer.sender, places),
        asking_lane=offer.asking_lane,
        route=[places[peer] for peer in offer.route],
        asked_version=offer.asked_version,
        asked_lane=offer.asked_lane,
        stages=sorted(offer.stages),
        need_s=offer.need_s,
    )


def _wire_decline(decline: Decline) -> wire.LaneDecline:
    places = _places(_routes(decline.sender))
    return wire.LaneDecline(
        epoch=decline.epoch,
        peers=places,
        number=decline.number,
        busy=decline.busy,
        sender=_wire_standing(decline.sender, places),
    )


def _wire_standing(standing: Standing, places: _Places) -> wire.LaneStanding:
    lanes = [_wire_lane(lane, places) for lane in standing.lanes]
    return wire.LaneStanding(peer=standing.peer, version=standing.version, lanes=lanes)


def _wire_lane(lane: Lane, places: _Places) -> wire.Lane:
    return wire.Lane(route=[places[peer] for peer in lane.route], stages=sorted(lane.stages), alone_s=lane.alone_s)


def _routes(standing: Standing) -> list[tuple[PeerId, ...]]:
    return [lane.route for lane in standing.lanes]


def _places(routes: Iterable[Sequence[PeerId]]) -> _Places:
    """The peers of all routes, each with its place among them; in order."""
    return {peer: place for place, peer in enumerate(dict.fromkeys(chain.from_iterable(routes)))}


# ---- reading ------------------------------------------------------------------------------------------------------


def _read_told(told: wire.LaneTold) -> Told:
    peers, decided = _read_peers(told.peers), told.HasField("other")
    if decided != (told.number > 0):
        raise ProtocolViolation("lanes: a decision without its offer's number, or a number without a decision")
    return Told(
        _read_epoch(told.epoch),
        _read_standing(told.sender, peers),
        _read_standing(told.other, peers) if decided else None,
        _read_number(told.number) if decided else None,
    )


def _read_heard(heard: wire.LaneHeard) -> Heard:
    return Heard(_read_epoch(heard.epoch), _read_version(heard.version))


def _read_offer(offer: wire.LaneOffer) -> Offer:
    peers = _read_peers(offer.peers)
    return Offer(
        epoch=_read_epoch(offer.epoch),
        number=_read_number(offer.number),
        sender=_read_standing(offer.sender, peers),
        asking_lane=_read_lane_number(offer.asking_lane),
        route=_read_route(offer.route, peers),
        asked_version=_read_version(offer.asked_version),
        asked_lane=_read_lane_number(offer.asked_lane),
        stages=_read_stages(offer.stages),
        need_s=checked_measure(offer.need_s, "lanes: a need"),
    )


def _read_accept(accept: wire.LaneAccept) -> Accept:
    lane = _read_lane(accept.lane, _read_peers(accept.peers))
    return Accept(_read_epoch(accept.epoch), _read_number(accept.number), lane)


def _read_decline(decline: wire.LaneDecline) -> Decline:
    sender = _read_standing(decline.sender, _read_peers(decline.peers))
    return Decline(_read_epoch(decline.epoch), _read_number(decline.number), decline.busy, sender)


def _read_abandon(abandon: wire.LaneAbandon) -> Abandon:
    return Abandon(_read_epoch(abandon.epoch), _read_number(abandon.number))


LANE_READERS: Final[dict[str, Callable[[Any], LaneControl]]] = {
    "lane_told": _read_told,
    "lane_heard": _read_heard,
    "lane_offer": _read_offer,
    "lane_accept": _read_accept,
    "lane_decline": _read_decline,
    "lane_abandon": _read_abandon,
}
"""By the field of link.proto's Frame. Each raises ProtocolViolation for what may not come."""


def _read_standing(standing: wire.LaneStanding, peers: Sequence[PeerId]) -> Standing:
    if len(standing.lanes) > MAX_LANES:
        raise ProtocolViolation(f"lanes: {len(standing.lanes)} of one data node are more than {MAX_LANES}")
    for visits in (sum(len(lane.route) for lane in standing.lanes), sum(len(lane.stages) for lane in standing.lanes)):
        if visits > MAX_VISITS:
            raise ProtocolViolation(f"lanes: {visits} visits of one data node are more than {MAX_VISITS}")
    lanes = tuple(_read_lane(lane, peers) for lane in standing.lanes)
    return Standing(checked_peer(standing.peer), _read_version(standing.version), lanes)


def _read_lane(lane: wire.Lane, peers: Sequence[PeerId]) -> Lane:
    alone_s = checked_measure(lane.alone_s, "lanes: a round trip")
    return Lane(_read_route(lane.route, peers), _read_stages(lane.stages), alone_s)


def _read_peers(peers: Sequence[str]) -> tuple[PeerId, ...]:
    if len(peers) > MAX_PEERS:
        raise ProtocolViolation(f"lanes: {len(peers)} peers are more than {MAX_PEERS}")
    if len(set(peers)) < len(peers):
        raise ProtocolViolation("lanes: a peer is listed twice")
    return tuple(checked_peer(peer) for peer in peers)


def _read_route(places: Sequence[int], peers: Sequence[PeerId]) -> tuple[PeerId, ...]:
    if len(places) > MAX_HOPS:
        raise ProtocolViolation(f"lanes: a route of {len(places)} peers is longer than {MAX_HOPS}")
    if len(set(places)) < len(places):
        raise ProtocolViolation("lanes: a route visits a peer twice")
    if max(places, default=-1) >= len(peers):
        raise ProtocolViolation(f"lanes: a route visits peer {max(places)} of {len(peers)}")
    return tuple(peers[place] for place in places)


def _read_stages(stages: Sequence[int]) -> frozenset[int]:
    """In rising order, so that none comes twice."""
    if len(stages) > MAX_HOPS:
        raise ProtocolViolation(f"lanes: {len(stages)} stages of one lane are more than {MAX_HOPS}")
    if any(later <= earlier for earlier, later in pairwise((0, *stages, MAX_STAGES))):
        raise ProtocolViolation(f"lanes: stages do not rise from at least 1 to at most {MAX_STAGES - 1}")
    return frozenset(stages)


def _read_epoch(epoch: bytes) -> bytes:
    if len(epoch) != EPOCH_BYTES:
        raise ProtocolViolation(f"lanes: an epoch has {EPOCH_BYTES} bytes, not {len(epoch)}")
    return epoch


def _read_version(version: int) -> int:
    if version > MAX_VERSION:
        raise ProtocolViolation(f"lanes: version {version} is beyond {MAX_VERSION}")
    return version


def _read_number(number: int) -> int:
    if not 1 <= number <= MAX_OFFER:
        raise ProtocolViolation(f"lanes: offer {number} is out of range; 1 to {MAX_OFFER} are allowed")
    return number


def _read_lane_number(lane: int) -> int:
    if lane >= MAX_LANES:
        raise ProtocolViolation(f"lanes: lane {lane} is not below {MAX_LANES}")
    return lane
