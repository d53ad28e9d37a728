"""The messages about lanes that name peers: lanes share peers, so such a message names each of them once, and its
routes say by their places which of them they visit. All else is as `protocol.frames.codec` derives it.

Whether a message fits the epoch, the lanes and the peers that are alive is checked by those who know them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from google.protobuf.descriptor import Descriptor

from protocol.frames.codec import Around, MessageConverter, converter, field_converter
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.bounds import Distinct, Length
from swarm.vocabulary.routing_messages import MAX_VISITS, Accept, Decline, Offer, Told
from swarm.vocabulary.types import PeerId

MAX_PEERS: Final = 2 * MAX_VISITS
"""In one message: those that the lanes of two data nodes visit."""


def _with_peers(kind: type[Any], message: Descriptor) -> tuple[type[Any], MessageConverter]:
    named = Annotated[tuple[PeerId, ...], Length(0, MAX_PEERS), Distinct()]
    rest, peers = converter(kind, message), field_converter(named, message.fields_by_name["peers"], "peers")
    assert peers.read is not None
    read_peers = peers.read

    def write(value: Any, _: Around) -> dict[str, Any]:
        places: dict[PeerId, int] = {}
        return {**rest.write(value, places), "peers": places}

    return kind, MessageConverter(write, lambda said, _: rest.read(said, read_peers(said.peers, None)))


CONVERTERS: Final = dict(
    (
        _with_peers(Told, wire.LaneTold.DESCRIPTOR),
        _with_peers(Offer, wire.LaneOffer.DESCRIPTOR),
        _with_peers(Accept, wire.LaneAccept.DESCRIPTOR),
        _with_peers(Decline, wire.LaneDecline.DESCRIPTOR),
    )
)
"""By class."""
