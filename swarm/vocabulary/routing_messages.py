"""The messages among data nodes about their lanes, as plain data (docs/PATHS.md).

`protocol.frames.frames` turns it into bytes. The story they tell is in `swarm.routing.negotiation.negotiator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm.vocabulary.bounds import Distinct, Length, NonNegative, Range
from swarm.vocabulary.types import MAX_HOPS, PeerId, Stage

MAX_LANES = 64
"""Of one data node."""
MAX_VISITS = 512
"""Of all lanes of one data node together, one for each stage that one of them visits. So whatever peers they name, how
two data nodes stand fits into one small frame."""
MAX_PEERS = 2 * MAX_VISITS
"""In one message, which names each once: those that the lanes of two data nodes visit."""
MAX_VERSION = 2**48 - 1
MAX_OFFER = 2**48 - 1
EPOCH_BYTES = 8

Epoch = Annotated[bytes, Length(EPOCH_BYTES, EPOCH_BYTES)]
Version = Annotated[int, Range(0, MAX_VERSION)]
OfferNumber = Annotated[int, Range(1, MAX_OFFER)]
LaneNumber = Annotated[int, Range(0, MAX_LANES - 1)]
Route = Annotated[tuple[PeerId, ...], Length(0, MAX_HOPS), Distinct()]
Stages = Annotated[frozenset[Stage], Length(0, MAX_HOPS)]


@dataclass(frozen=True, slots=True)
class Lane:
    """A standing route: its peers in the order of their visits, without the data node at both ends, and the stages it
    has to visit.

    The route is empty when some stage has nobody.
    """

    route: Route
    stages: Stages
    alone_s: NonNegative
    """Its round trip when nobody waits, by its data node's own measurements."""


@dataclass(frozen=True, slots=True)
class Standing:
    """All lanes of a data node at one of its versions. The version goes up with every change."""

    peer: PeerId
    version: Version
    lanes: Annotated[tuple[Lane, ...], Length(0, MAX_LANES)]

    def fault(self) -> str | None:
        """The reason why no data node may stand so; None when one may."""
        for visits in (sum(len(lane.route) for lane in self.lanes), sum(len(lane.stages) for lane in self.lanes)):
            if visits > MAX_VISITS:
                return f"{visits} visits of one data node are more than {MAX_VISITS}"
        return None


@dataclass(frozen=True, slots=True)
class Told:
    """News of the sender's lanes; after a trade that the sender has decided also how the other side stands from now on.

    To that other side it is the decision. Answered with Heard, or by news of one's own.
    """

    epoch: Epoch
    sender: Standing
    other: Standing | None = None
    number: OfferNumber | None = None
    """Of the offer that was decided; None exactly when `other` is."""
    heard: Version = 0
    """The receiver's version up to which the sender knows, as in Heard; 0 when of none."""

    def fault(self) -> str | None:
        """The reason why nobody may say this; None when one may."""
        if (self.other is None) == (self.number is None):
            return None
        return "a decision without its offer's number, or a number without a decision"


@dataclass(frozen=True, slots=True)
class Heard:
    """The acknowledgement of the receiver's version up to which the sender knows."""

    epoch: Epoch
    version: Version


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer of one lane for one lane: the sender would take `route`, and leave `stages` to the other's lane.

    Holds only if the receiver still stands at `asked_version`.
    """

    epoch: Epoch
    number: OfferNumber
    """Counts the sender's offers, from 1."""
    sender: Standing
    asking_lane: LaneNumber
    route: Route
    asked_version: Version
    asked_lane: LaneNumber
    stages: Stages
    need_s: NonNegative
    """Round trip of the asking lane: of two offers that cross, the larger need goes first."""
    is_single: bool = False
    """Whether the lanes are numbered as the routes of single microbatches, in launch order; need is then the end of all
    of them."""


@dataclass(frozen=True, slots=True)
class Accept:
    """The acceptance of an offer: the sender would take this route for its lane, and is bound until it hears the
    decision.
    """

    epoch: Epoch
    number: OfferNumber
    lane: Lane


@dataclass(frozen=True, slots=True)
class Decline:
    """The refusal of an offer. `busy`: another trade is under way; ask again later. Otherwise the sender sees nothing
    in it, or stands elsewhere by now.
    """

    epoch: Epoch
    number: OfferNumber
    busy: bool
    sender: Standing


@dataclass(frozen=True, slots=True)
class Abandon:
    """The withdrawal of an offer; whoever is bound by it is free."""

    epoch: Epoch
    number: OfferNumber


LaneControl = Told | Heard | Offer | Accept | Decline | Abandon
