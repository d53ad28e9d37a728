"""The messages about lanes that name peers: lanes share peers, so such a message names each of them once, and its
routes say by their places which of them they visit. All else is as `protocol.frames.codec` derives it.

Whether a message fits the epoch, the lanes and the peers that are alive is checked by those who know them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from protocol.frames.codec import Around, Converter, MessageType, converter, field_converter
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.bounds import Distinct, Length
from swarm.vocabulary.routing_messages import MAX_VISITS, Accept, Decline, Offer, Told
from swarm.vocabulary.types import PeerId

MAX_PEERS: Final = 2 * MAX_VISITS
"""In one message: those that the lanes of two data nodes visit."""


def _with_peers(kind: type, message: MessageType) -> Converter:
    named = Annotated[tuple[PeerId, ...], Length(0, MAX_PEERS), Distinct()]
    rest, peers = converter(kind, message), field_converter(named, message.fields_by_name["peers"], "peers")

    def write(value: Any, _: Around) -> dict[str, Any]:
        places: dict[PeerId, int] = {}
        return {**rest.write(value, places), "peers": places}

    return Converter(write, lambda said, _: rest.read(said, peers.read(said.peers, None)))


CONVERTERS: Final[dict[type, Converter]] = {
    Told: _with_peers(Told, wire.LaneTold.DESCRIPTOR),
    Offer: _with_peers(Offer, wire.LaneOffer.DESCRIPTOR),
    Accept: _with_peers(Accept, wire.LaneAccept.DESCRIPTOR),
    Decline: _with_peers(Decline, wire.LaneDecline.DESCRIPTOR),
}
"""By class."""
