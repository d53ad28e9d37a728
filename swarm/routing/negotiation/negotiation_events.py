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
    quiet_s: float = 0.6
    """Nothing new was heard for so long before a data node looks for a better plan: news of one change come in
    heaps."""
    turn_s: float = 0.6
    """The next one waits so much longer: about the time of an offer."""
    patience_s: float = 2.0
    """An offer that met another, or that somebody did not answer, is made again after so long at most."""
    answer_s: float = 1.5
    """An offer without answer is made again after so long; an acceptance without decision is said again."""
    asked: int = 6
    """How often, before an offer is given up."""
    hear_s: float = 3.0
    """News are acknowledged when none have come for so long, all of one sender at once, unless news of one's own have
    said it by then;"""
    longest_hear_s: float = 9.0
    """and after so long at the latest."""
    repeat_s: float = 11.0
    """News that was not acknowledged are told again after so long, then after twice that, up to `longest_repeat_s`."""
    longest_repeat_s: float = 12.0
    offers: int = 5
    """Plans that are agreed on between two changes of the swarm: each takes three messages a data node."""
    judged: int = 64
    """Judgements of all data nodes of a group together, about: large ones agree on fewer plans."""
    tasks_each: int = 40_000
    """Tasks that a data node plays between two changes of the swarm in forecasts for better plans: a bound of its CPU
    time, some 40 ms."""


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
