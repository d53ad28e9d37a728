"""The two sides of a trade: an offer of ours under way, and an offer of another by which we are bound.

The one that offers decides. It may give its offer up at any time before it has decided, and says nothing of it again;
so whoever is bound asks, by accepting once more, and the answer is the decision or that there is none (presumed abort:
Mohan, Lindsay, Obermarck, TODS 1986). A decision stays open until the other side has acknowledged it. A data node has
one bargain at a time, and its lanes change by nothing else while it is bound or has decided.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swarm.routing.lane_book import LEAST_GAIN
from swarm.routing.negotiation.lane_view import View
from swarm.routing.negotiation.proposals import Wish
from swarm.routing.refinement import Exchange
from swarm.vocabulary.routing_messages import Accept, Lane, Offer, Standing, Told
from swarm.vocabulary.types import PeerId


@dataclass(slots=True)
class Asking:
    """Our offer. `decided` once we have changed our lane: then the other side must hear of it."""

    asked: PeerId
    offer: Offer
    until: float
    decided: Told | None = None
    exchange: Exchange | None = None
    """None when whole lanes are offered."""


@dataclass(slots=True)
class Bound:
    """Another's offer that we have accepted: it decides, we wait and keep asking."""

    asking: PeerId
    offer: Offer
    accept: Accept
    repeat_at: float
    wait_s: float


def offer_for(view: View, wish: Wish, number: int) -> Offer:
    """What we say to the other side of a trade that we wish for."""
    trade = wish.trade
    return Offer(
        view.epoch,
        number,
        view.standing(),
        trade.asking[1],
        trade.routes[0],
        view.versions[trade.asked[0]],
        trade.asked[1],
        view.book.stages(trade.routes[1]),
        wish.need_s,
    )


def exchange_offer(view: View, exchange: Exchange, number: int, need_s: float) -> Offer:
    """What we say to the other side of an exchange between two microbatches."""
    return Offer(
        view.epoch,
        number,
        view.standing(),
        exchange.place,
        exchange.route,
        view.versions[exchange.other],
        exchange.other_place,
        view.book.stages(exchange.other_route),
        need_s,
        is_single=True,
    )


def answer_to(view: View, asking: PeerId, offer: Offer) -> Accept | None:
    """Our best route for the stages that are left to us, if the trade helps by what we know."""
    if not (0 <= offer.asking_lane < view.lanes and 0 <= offer.asked_lane < view.lanes):
        return None
    lanes = (asking, offer.asking_lane), (view.own, offer.asked_lane)
    if not view.tradable(lanes[1]):
        return None
    before = Counter(view.stages[lanes[0]]) + Counter(view.stages[lanes[1]])
    after = Counter(view.book.stages(offer.route)) + Counter(offer.stages)
    if before != after or not view.book.whole(offer.route):
        return None
    route = view.book.answer(lanes[0], offer.route, lanes[1], offer.stages)
    if route is None or view.book.gain(*lanes, (offer.route, route), view.times()) <= LEAST_GAIN:
        return None
    return Accept(view.epoch, offer.number, Lane(route, offer.stages, view.costs.round_trip_s(view.own, route)))


def helps(view: View, asking: Asking, accept: Accept) -> bool:
    """Whether our offer is still worth it with the route that the other side has found."""
    offer = asking.offer
    route, book = accept.lane.route, view.book
    if view.versions.get(asking.asked) != offer.asked_version or accept.lane.stages != offer.stages:
        return False
    if not book.serves(route, offer.stages) or len(route) != len(offer.stages):
        return False
    lanes = (view.own, offer.asking_lane), (asking.asked, offer.asked_lane)
    return book.gain(*lanes, (offer.route, route), view.times()) > LEAST_GAIN


def decision(view: View, asking: Asking, accept: Accept) -> Told:
    """We change our lane; what everyone is told, the other side among them."""
    offer = asking.offer
    if asking.exchange is not None:
        other = view.standing_with(asking.asked, offer.asked_lane, accept.lane)
        view.replace(offer.asking_lane, offer.route)
    else:
        known = view.standing_of(asking.asked)
        lanes = tuple(accept.lane if k == offer.asked_lane else lane for k, lane in enumerate(known.lanes))
        other = Standing(asking.asked, known.version + 1, lanes)
        view.move(offer.asking_lane, offer.route, view.book.stages(offer.route))
    view.advance()
    view.take_in(other)
    return Told(view.epoch, view.standing(), other, offer.number)
