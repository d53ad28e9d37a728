"""The messages among data nodes about their lanes (docs/PATHS.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm.vocabulary.bounds import Distinct, Length, NonNegative, Range
from swarm.vocabulary.types import MAX_HOPS, PeerId, Stage

MAX_LANES = 64  # Of one data node
MAX_VISITS = 512  # Of all lanes of one data node: its position fits into one small frame
MAX_PEERS = 2 * MAX_VISITS  # In one message
MAX_TALKING = 32  # Data nodes that talk with each other
MAX_OFFERED_LANES = 512
MAX_OFFERED_VISITS = 2048  # Of all data nodes, in one offer
MAX_VERSION = 2**48 - 1
MAX_OFFER = 2**48 - 1
EPOCH_BYTES = 8

Epoch = Annotated[bytes, Length(EPOCH_BYTES, EPOCH_BYTES)]
Version = Annotated[int, Range(0, MAX_VERSION)]
OfferNumber = Annotated[int, Range(1, MAX_OFFER)]
Route = Annotated[tuple[PeerId, ...], Length(0, MAX_HOPS), Distinct()]
Stages = Annotated[frozenset[Stage], Length(0, MAX_HOPS)]


@dataclass(frozen=True, slots=True)
class Lane:
    """A standing route: peers in visiting order, and the stages to visit. Empty if a stage has no peer."""

    route: Route
    stages: Stages
    alone_s: NonNegative  # Round trip without waiting


@dataclass(frozen=True, slots=True)
class Standing:
    """All lanes of a data node at one of its versions. The version goes up with every change."""

    peer: PeerId
    version: Version
    lanes: Annotated[tuple[Lane, ...], Length(0, MAX_LANES)]

    def fault(self) -> str | None:
        for visits in (sum(len(lane.route) for lane in self.lanes), sum(len(lane.stages) for lane in self.lanes)):
            if visits > MAX_VISITS:
                return f"{visits} visits of one data node are more than {MAX_VISITS}"
        return None


@dataclass(frozen=True, slots=True)
class Told:
    """The sender's lanes. For peers that accepted its offer this is the decision. Answered with Heard."""

    epoch: Epoch
    sender: Standing
    number: OfferNumber | None = None  # The sender's last decided offer
    heard: Version = 0  # The receiver's version that the sender has heard


@dataclass(frozen=True, slots=True)
class Heard:
    """The acknowledgement of the receiver's version up to which the sender knows."""

    epoch: Epoch
    version: Version


@dataclass(frozen=True, slots=True)
class Offer:
    """Other lanes for all data nodes. Holds only if all still are at the version before."""

    epoch: Epoch
    number: OfferNumber  # From 1
    standings: Annotated[tuple[Standing, ...], Length(1, MAX_TALKING)]

    def fault(self) -> str | None:
        lanes = [lane for standing in self.standings for lane in standing.lanes]
        if len(lanes) > MAX_OFFERED_LANES:
            return f"{len(lanes)} lanes of all data nodes are more than {MAX_OFFERED_LANES}"
        for visits in (sum(len(lane.route) for lane in lanes), sum(len(lane.stages) for lane in lanes)):
            if visits > MAX_OFFERED_VISITS:
                return f"{visits} visits of all data nodes are more than {MAX_OFFERED_VISITS}"
        return None


@dataclass(frozen=True, slots=True)
class Accept:
    """The acceptance of an offer: the sender will stand as offered, and is bound until it hears the decision."""

    epoch: Epoch
    number: OfferNumber


@dataclass(frozen=True, slots=True)
class Decline:
    """The refusal of an offer. `busy`: another offer is open; ask again later."""

    epoch: Epoch
    number: OfferNumber
    busy: bool
    sender: Standing


@dataclass(frozen=True, slots=True)
class Abandon:
    epoch: Epoch
    number: OfferNumber


LaneControl = Told | Heard | Offer | Accept | Decline | Abandon
