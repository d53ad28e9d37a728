"""What the negotiator speaks of: messages between data nodes, events that befall it and actions that follow. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.paths.costs import Costs, Route
from swarm.vocabulary import PeerId

# ---- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TalkRules:
    """What the manifest says, and the limits of patience. Seconds."""

    microbatches: int | None
    """Of each data node in one iteration: the number of lanes follows from it and from the number of data nodes. None where data nodes launch
    whenever they can (`swarm.paths.balance.free_lanes`)."""
    quiet_s: float = 0.05
    """Nothing new was heard for so long before the worst placed data node speaks."""
    patience_s: float = 1.0
    """The next worst waits so much longer each: about the time of an offer, its answer, and the news of the trade."""
    answer_s: float = 2.0
    """An offer without answer is given up after so long; an acceptance without decision is said again."""
    repeat_s: float = 1.5
    """News that was not acknowledged are told again after so long, then after twice that, up to `longest_repeat_s`."""
    longest_repeat_s: float = 12.0
    trades_each: int = 8
    """Trades that a data node asks for between two changes of the swarm, and two for each of its lanes: nobody talks for ever."""


@dataclass(frozen=True, slots=True)
class Member:
    """A live data node. One that comes back after a crash has another incarnation: what it had agreed to is lost with it."""

    peer: PeerId
    incarnation: int = 0


# ---- messages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lane:
    """A standing route, the stages it visits, and its round trip when nobody waits, by its data node's own measurements."""

    route: Route
    stages: frozenset[int]
    alone_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """All lanes of a data node at one of its versions. The version goes up with every change."""

    peer: PeerId
    version: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """News: how the sender stands; after a trade that the sender has decided also how the other side stands from now on.

    To that other side it is the decision. Answered with Heard.
    """

    epoch: bytes
    sender: Standing
    other: Standing | None = None
    number: int | None = None
    """Of the offer that was decided."""


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
    """Counts the sender's offers."""
    sender: Standing
    asking_lane: int
    route: Route
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
    """No. `busy`: another trade is under way; ask again later. Otherwise the sender sees nothing in it, or stands elsewhere by now."""

    epoch: bytes
    number: int
    busy: bool
    sender: Standing


@dataclass(frozen=True, slots=True)
class Abandon:
    """The offer does not hold; whoever is bound by it is free."""

    epoch: bytes
    number: int


Message = Told | Heard | Offer | Accept | Decline | Abandon

# ---- what happens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SwarmChanged:
    """The membership view or the estimates changed.

    Args:
        members: live data nodes, ourselves among them.
        costs: has figures for every member and every live peer of the other stages.
    """

    members: frozenset[Member]
    costs: Costs


@dataclass(frozen=True, slots=True)
class Arrived:
    sender: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed (`Negotiator.wakes_at`)."""


Event = SwarmChanged | Arrived | Tick

# ---- what is done -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class LanesChanged:
    """Microbatches launched from now on take these routes in turn."""

    routes: tuple[Route, ...]
    why: str


Action = Tell | LanesChanged
