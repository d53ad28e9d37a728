"""The two sides of an offer of other lanes for all: one of ours under way, and one of another's by which we are bound.

The one that offers decides, once all have accepted. It may give its offer up at any time before it has decided, and
says nothing of it again; so whoever is bound asks, by accepting once more, and the answer is the decision or that there
is none (two-phase commit with presumed abort: Mohan, Lindsay, Obermarck, TODS 1986). A data node is part of one offer
at a time, and its lanes change by nothing else while it is bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swarm.routing.negotiation.lane_view import View
from swarm.routing.plans.route_changes import Plan
from swarm.vocabulary.routing_messages import Lane, Offer, Standing
from swarm.vocabulary.types import PeerId


@dataclass(slots=True)
class Asking:
    """Our offer.

    Args:
        waiting: those that have not answered.
        again_at: when they are asked again.
        tries: how often they have been asked.
    """

    offer: Offer
    waiting: set[PeerId]
    again_at: float
    tries: int = 1


@dataclass(slots=True)
class Bound:
    """Another's offer that we have accepted: it decides, we wait and keep asking."""

    asking: PeerId
    offer: Offer
    repeat_at: float
    wait_s: float


def offer_of(view: View, plan: Plan, number: int) -> Offer:
    """What we say to all others of a plan: how each would stand at its next version."""
    standings = []
    for peer in (view.own, *view.others):
        lanes = tuple(
            Lane(route, view.book.stages(route), view.costs.round_trip_s(peer, route)) for route in plan[peer]
        )
        standings.append(Standing(peer, view.versions[peer] + 1, lanes))
    return Offer(view.epoch, number, tuple(standings))


def is_as_things_stand(view: View, offer: Offer) -> bool:
    """Whether the offer names all data nodes, each at the version after the one at which it stands."""
    versions = {standing.peer: standing.version - 1 for standing in offer.standings}
    return len(versions) == len(offer.standings) and versions == view.versions


def fault_of(view: View, offer: Offer) -> str | None:
    """Why an offer may not be accepted whatever it brings; None when it may. What others are to visit is their word."""
    if any(len(standing.lanes) != view.singles for standing in offer.standings):
        return f"not {view.singles} lanes of each"
    offered = Counter[int]()
    for standing in offer.standings:
        for lane in standing.lanes:
            offered.update(lane.stages)
    held = Counter[int]()
    for peer in view.versions:
        for stages in view.sets_of(peer):
            held.update(stages)
    if offered != held:
        return "other visits than before"
    for standing in offer.standings:
        for lane in standing.lanes:
            if not view.book.serves(lane.route, lane.stages):
                return "a route through a peer that is not there"
            order = [view.book.stage_of[peer] for peer in lane.route]
            if standing.peer == view.own and view.rules.fault(order) is not None:
                return "an order of stages that no path may take"
    return None
