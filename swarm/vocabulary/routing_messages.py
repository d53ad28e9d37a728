"""What the data nodes say to each other about their lanes, as plain data (docs/PATHS.md).

`protocol.frames.frames` turns it into bytes. The story they tell is in `swarm.routing.negotiation.negotiator`.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.vocabulary.types import PeerId

MAX_LANES = 64
"""Of one data node."""
MAX_VISITS = 512
"""Of all lanes of one data node together, one for each stage that one of them visits. So whatever peers they name, how
two data nodes stand fits into one small frame."""
MAX_VERSION = 2**48 - 1
MAX_OFFER = 2**48 - 1
EPOCH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Lane:
    """A standing route: its peers in the order of their visits, without the data node at both ends, and the stages it
    has to visit.

    The route is empty when some stage has nobody.
    """

    route: tuple[PeerId, ...]
    stages: frozenset[int]
    alone_s: float
    """Its round trip when nobody waits, by its data node's own measurements."""


@dataclass(frozen=True, slots=True)
class Standing:
    """All lanes of a data node at one of its versions. The version goes up with every change."""

    peer: PeerId
    version: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """News: how the sender stands; after a trade that the sender has decided also how the other side stands from now
    on.

    To that other side it is the decision. Answered with Heard.
    """

    epoch: bytes
    sender: Standing
    other: Standing | None = None
    number: int | None = None
    """Of the offer that was decided; None exactly when `other` is."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The receiver's version up to which the sender knows."""

    epoch: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Offer:
    """One lane for one lane: the sender would take `route`, and leave `stages` to the other's lane.

    Holds only if the receiver still stands at `asked_version`.
    """

    epoch: bytes
    number: int
    """Counts the sender's offers, from 1."""
    sender: Standing
    asking_lane: int
    route: tuple[PeerId, ...]
    asked_version: int
    asked_lane: int
    stages: frozenset[int]
    need_s: float
    """Round trip of the asking lane: of two offers that cross, the larger need goes first."""


@dataclass(frozen=True, slots=True)
class Accept:
    """The sender would take this route for its lane, and is bound until it hears the decision."""

    epoch: bytes
    number: int
    lane: Lane


@dataclass(frozen=True, slots=True)
class Decline:
    """No. `busy`: another trade is under way; ask again later. Otherwise the sender sees nothing in it, or stands
    elsewhere by now."""

    epoch: bytes
    number: int
    busy: bool
    sender: Standing


@dataclass(frozen=True, slots=True)
class Abandon:
    """The offer does not hold; whoever is bound by it is free."""

    epoch: bytes
    number: int


LaneControl = Told | Heard | Offer | Accept | Decline | Abandon
