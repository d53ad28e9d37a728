"""What the negotiator speaks of: its settings, the events that befall it and the actions that follow. Plain data.

The messages between data nodes are in `swarm.vocabulary.routing_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.vocabulary.routing_messages import LaneControl
from swarm.vocabulary.types import PeerId

# ---- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TalkRules:
    """What the manifest says, and the limits of patience. Seconds."""

    microbatches: int | None
    """Of each data node in one iteration: the number of lanes follows from it and from the number of data nodes. None
    where data nodes launch whenever they can (`swarm.routing.stage_balance.free_lanes`)."""
    quiet_s: float = 0.05
    """Nothing new was heard for so long before the worst placed data node speaks."""
    patience_s: float = 0.5
    """The next worst waits so much longer each: about the time of an offer, its answer, and the news of the trade."""
    answer_s: float = 1.5
    """An offer without answer is given up after so long; an acceptance without decision is said again."""
    hear_s: float = 3.0
    """News are acknowledged when none have come for so long, all of one sender at once, unless news of one's own have
    said it by then;"""
    longest_hear_s: float = 9.0
    """and after so long at the latest."""
    repeat_s: float = 11.0
    """News that was not acknowledged are told again after so long, then after twice that, up to `longest_repeat_s`."""
    longest_repeat_s: float = 12.0
    trades_each: int = 3
    """Trades that a data node asks for between two changes of the swarm: nobody talks for ever."""
    tasks_each: int = 56_000
    """Tasks that a data node plays between two changes of the swarm in forecasts for the refinement of its routes: a
    bound of its CPU time, some 50 ms."""
    exchanges_each: int = 14
    """Exchanges of a stage of one microbatch that a data node asks others for between two changes of the swarm."""
    turns_each: int = 6
    """Turns in which it spends them: all others are told of each that has found something."""


@dataclass(frozen=True, slots=True)
class Member:
    """A live data node. One that comes back after a crash has another incarnation: what it had agreed to is lost with
    it."""

    peer: PeerId
    incarnation: int = 0


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
    message: LaneControl


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed (`Negotiator.wakes_at`)."""


Event = SwarmChanged | Arrived | Tick

# ---- what is done -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    to: PeerId
    message: LaneControl


@dataclass(frozen=True, slots=True)
class LanesChanged:
    """Microbatches launched from now on take these routes in turn."""

    routes: tuple[PeerRoute, ...]
    why: str


Action = Tell | LanesChanged
