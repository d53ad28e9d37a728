"""The talk about lanes: that it ends, that visits stay equal, and that nothing is exchanged twice, whatever becomes of
messages and data nodes."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator

import pytest

from swarm.routing.cost_model import Costs
from swarm.routing.negotiation.groups import group_of, share_of
from swarm.routing.negotiation.negotiation_events import Action, Arrived, Member, SwarmChanged, TalkRules, Tell, Tick
from swarm.routing.negotiation.negotiator import Negotiator
from swarm.routing.path_rules import PathRules
from swarm.simulation.generate import jittered
from swarm.vocabulary.routing_messages import Abandon, Accept, Decline, Heard, LaneControl, Offer, Told
from swarm.vocabulary.types import PeerId
from tests.swarm.routing.negotiation.talkers import Party, Weather
from tests.swarm.routing.small_swarms import RULES, names, swarm

FIVE = [5, 3, 3, 3, 3, 3]
SLOW = {"1.0": 3.0, "2.1": 2.0, "0.4": 2.5, "4.2": 3.0, "3.0": 2.0}
CALM, STORM = Weather(), Weather(lost=0.25, doubled=0.25, slowest_s=2.5)
LONG = 3000.0


def party(weather: Weather = CALM, seed: int = 0, microbatches: int = 6) -> Party:
    return Party(swarm(FIVE, SLOW), RULES, microbatches, weather, seed)


# ---- what holds whatever happens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weather", [CALM, STORM], ids=["calm", "storm"])
@pytest.mark.parametrize("seed", range(12))
def test_the_talk_ends_and_visits_are_equal(weather: Weather, seed: int) -> None:
    talkers = party(weather, seed)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    talkers.assert_trades_keep_the_sum()
    assert talkers.decided or weather is STORM, "in a storm routes may be refined before anybody has traded"
    assert len({(sender, told.number) for sender, told in talkers.decided}) <= 5 * (8 + 2)
    said = talkers.said.total()
    talkers.run(LONG)
    assert talkers.said.total() == said


@pytest.mark.parametrize("seed", range(25))
def test_a_data_node_may_die_at_any_step(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(5, 250)):
        talkers.step()
    talkers.die(talkers.rng.choice(list(talkers.machines)))
    talkers.run(talkers.rng.uniform(0, 5))
    talkers.announce_members(within_s=4.0)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    talkers.assert_trades_keep_the_sum()


@pytest.mark.parametrize("seed", range(12))
def test_a_data_node_may_come_back_with_nothing_in_mind(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(20, 250)):
        talkers.step()
    talkers.restart(talkers.rng.choice(list(talkers.machines)))
    talkers.announce_members(within_s=4.0)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()


@pytest.mark.parametrize("seed", range(12))
def test_who_takes_another_for_dead_for_a_while_stands_afterwards_where_it_stood(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(100, 800)):
        talkers.step()
    mistaken, taken_for_dead = talkers.rng.sample(list(talkers.machines), 2)
    fewer = frozenset(member for member in talkers.members() if member.peer != taken_for_dead)
    talkers.push(talkers.now, mistaken, SwarmChanged(fewer, copy.deepcopy(talkers.costs)))
    talkers.run(talkers.rng.uniform(0, 20))
    talkers.push(talkers.now, mistaken, SwarmChanged(talkers.members(), copy.deepcopy(talkers.costs)))
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    talkers.assert_trades_keep_the_sum()


@pytest.mark.parametrize("seed", range(12))
def test_another_peer_may_die_at_any_step_and_stages_stay_as_agreed(seed: int) -> None:
    talkers = party(STORM, seed)
    for _ in range(talkers.rng.randrange(5, 250)):
        talkers.step()
    gone = talkers.rng.choice([peer for peers in talkers.costs.stages[1:] for peer in peers])
    talkers.announce_members(within_s=4.0, costs=talkers.costs.without(frozenset({gone})))
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
    assert all(gone not in route for machine in talkers.machines.values() for route in machine.launches)


@pytest.mark.parametrize("seed", range(8))
def test_data_nodes_that_measure_differently_still_agree(seed: int) -> None:
    talkers = party(STORM, seed)
    for peer in talkers.machines:
        talkers.push(0.0, peer, SwarmChanged(talkers.members(), jittered(talkers.costs, 0.3, talkers.rng)))
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()


@pytest.mark.parametrize("microbatches", [4, 5])
def test_several_lanes_each(microbatches: int) -> None:
    rules = PathRules(stages=4, per_path=2, max_forward_jump=3)
    talkers = Party(swarm([4, 3, 3, 3], {"1.0": 3.0, "0.2": 2.0}), rules, microbatches, STORM, microbatches)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()


# ---- who knows what -----------------------------------------------------------------------------------------------


def mutable_parts(thing: object, seen: set[int]) -> Iterator[object]:
    """Everything that can change and can be reached from here."""
    if id(thing) in seen or isinstance(thing, type | str | bytes | int | float | None):
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        inside: list[object] = [*thing.keys(), *thing.values()]
    elif isinstance(thing, tuple | list | set | frozenset):
        inside = list(thing)
    else:
        inside = list(getattr(thing, "__dict__", {}).values())
        inside += [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    frozen = isinstance(thing, tuple | frozenset) or (
        dataclasses.is_dataclass(thing) and type(thing).__dataclass_params__.frozen  # type: ignore[attr-defined]
    )
    if not frozen:
        yield thing
    for part in inside:
        yield from mutable_parts(part, seen)


def test_nothing_that_can_change_is_known_to_two_data_nodes() -> None:
    talkers = party()
    talkers.run(LONG)
    owners: dict[int, PeerId] = {}
    for peer, machine in talkers.machines.items():
        parts = {id(part) for part in mutable_parts(machine, set())}
        assert len(parts) > 10
        assert not parts & owners.keys()
        owners |= dict.fromkeys(parts, peer)


def test_who_hears_nothing_keeps_what_the_ring_dealt() -> None:
    talkers = party(Weather(lost=1.0))
    for _ in range(5):
        talkers.step()
    dealt = [machine.stages for machine in talkers.machines.values()]
    talkers.run(100.0)
    assert [machine.stages for machine in talkers.machines.values()] == dealt
    talkers.assert_equal_visits()
    assert talkers.said["Offer"] == 0


def test_views_that_differ_do_not_trade() -> None:
    talkers = party()
    talkers.run(LONG)
    first = next(iter(talkers.machines))
    talkers.restart(first)
    talkers.push(talkers.now, first, SwarmChanged(talkers.members(), copy.deepcopy(talkers.costs)))
    offers = talkers.said["Offer"]
    talkers.run(60.0)
    assert talkers.said["Offer"] == offers
    talkers.announce_members()
    talkers.run(LONG)
    talkers.assert_equal_visits()
    talkers.assert_settled()


# ---- one trade, step by step --------------------------------------------------------------------------------------

A, B = names("0.0", "0.1")
PAIR = PathRules(stages=3, per_path=1, max_forward_jump=2)


class Two:
    """Two data nodes; messages are handed over by hand. Peer 1.0 is near A, 2.0 near B, and the ring deals them the
    wrong way round."""

    def __init__(self) -> None:
        costs = self.costs()
        members = frozenset({Member(A), Member(B)})
        self.now = 0.0
        self.machines = {peer: Negotiator(peer, PAIR, TalkRules(1)) for peer in (A, B)}
        greetings = [(peer, self.give(peer, SwarmChanged(members, costs))) for peer in (A, B)]
        for peer, actions in greetings:
            for answer in self.pass_on(peer, actions):
                assert isinstance(answer[1], Heard)
                self.pass_on(answer[0], [Tell(self.other(answer[0]), answer[1])])

    @staticmethod
    def costs() -> Costs:
        costs = swarm([2, 1, 1], slots=1)
        far = [(PeerId("0.0"), PeerId("2.0")), (PeerId("0.1"), PeerId("1.0"))]
        links = {here: dict(row) for here, row in costs.message_s.items()}
        for data_node, peer in far:
            links[data_node][peer] = links[peer][data_node] = 9.0
        return dataclasses.replace(costs, message_s=links)

    @staticmethod
    def other(peer: PeerId) -> PeerId:
        return B if peer == A else A

    def give(self, peer: PeerId, event: SwarmChanged | Arrived | Tick) -> list[Action]:
        return self.machines[peer].handle(event, self.now)

    def pass_on(self, sender: PeerId, actions: list[Action]) -> list[tuple[PeerId, LaneControl]]:
        """Delivers all messages of a data node; what the other says to them."""
        said: list[tuple[PeerId, LaneControl]] = []
        for action in actions:
            if isinstance(action, Tell):
                answers = self.give(action.to, Arrived(sender, action.message))
                said += [(action.to, answer.message) for answer in answers if isinstance(answer, Tell)]
        return said

    def tick(self, peer: PeerId, seconds: float) -> list[Action]:
        self.now += seconds
        return self.give(peer, Tick())

    def offer(self) -> tuple[PeerId, Offer]:
        """The first offer that one of them makes."""
        for _ in range(8):
            for peer in (A, B):
                for action in self.tick(peer, 0.5):
                    if isinstance(action, Tell) and isinstance(action.message, Offer):
                        return peer, action.message
        raise AssertionError("nobody offers")

    def say(self, sender: PeerId, message: LaneControl) -> list[LaneControl]:
        return [answer for _, answer in self.pass_on(sender, [Tell(self.other(sender), message)])]


def decided() -> tuple[Two, PeerId, Offer, Accept, Told]:
    """A trade up to the decision, which is under way."""
    two = Two()
    asking, offer = two.offer()
    (accept,) = two.say(asking, offer)
    assert isinstance(accept, Accept)
    told = next(message for message in two.say(two.other(asking), accept) if isinstance(message, Told))
    return two, asking, offer, accept, told


def test_a_trade_is_offer_acceptance_and_decision() -> None:
    two, asking, _, _, told = decided()
    before = {peer: machine.stages for peer, machine in two.machines.items()}
    assert before[A] == before[B]  # the one that decided has changed, the other hears of it now
    (heard,) = two.say(asking, told)
    assert isinstance(heard, Heard)
    assert {machine.stages for machine in two.machines.values()} == {(frozenset({1}),), (frozenset({2}),)}
    assert two.machines[A].launches == (names("1.0"),)


def test_a_lost_decision_is_asked_for_and_said_again() -> None:
    two, asking, offer, accept, told = decided()
    asked = two.other(asking)
    again = [action.message for action in two.tick(asked, 1.6) if isinstance(action, Tell)]
    assert again == [accept]
    assert told in two.say(asked, accept)
    assert any(isinstance(answer, Heard) for answer in two.say(asking, told))
    assert two.machines[A].stages != two.machines[B].stages
    assert offer.stages == two.machines[asked].stages[0]


def test_an_old_offer_and_an_old_acceptance_change_nothing() -> None:
    two, asking, offer, accept, told = decided()
    (heard,) = two.say(asking, told)
    two.say(two.other(asking), heard)
    stood = [machine.stages for machine in two.machines.values()]
    (declined,) = two.say(asking, offer)
    assert isinstance(declined, Decline)
    assert two.say(two.other(asking), accept) == [Abandon(offer.epoch, offer.number)]
    assert two.say(asking, Abandon(offer.epoch, offer.number)) == []
    two.say(asking, told)
    assert [machine.stages for machine in two.machines.values()] == stood


def test_an_offer_without_answer_is_given_up_and_the_other_set_free() -> None:
    two = Two()
    asking, offer = two.offer()
    asked = two.other(asking)
    (accept,) = two.say(asking, offer)  # which is lost
    late = [action.message for action in two.tick(asking, 2.5) if isinstance(action, Tell)]
    assert Abandon(offer.epoch, offer.number) in late
    two.say(asked, accept)
    assert not two.machines[asked].settled
    two.say(asking, Abandon(offer.epoch, offer.number))
    assert two.machines[A].stages != two.machines[B].stages
    assert "bound" not in two.machines[asked].describe()


def test_of_two_offers_that_cross_the_greater_need_goes_first() -> None:
    two = Two()
    offers: dict[PeerId, Offer] = {}
    while len(offers) < 2:
        for peer in (A, B):
            for action in two.tick(peer, 0.3):
                if isinstance(action, Tell) and isinstance(action.message, Offer):
                    offers[peer] = action.message
    first = max((A, B), key=lambda peer: (offers[peer].need_s, peer))
    (decline,) = two.say(two.other(first), offers[two.other(first)])
    assert isinstance(decline, Decline)
    assert decline.busy
    (accept,) = two.say(first, offers[first])
    assert isinstance(accept, Accept)


def test_an_offer_whose_stages_do_not_add_up_is_declined() -> None:
    two = Two()
    asking, offer = two.offer()
    wrong = dataclasses.replace(offer, stages=frozenset(two.machines[two.other(asking)].stages[0]))
    (decline,) = two.say(asking, wrong)
    assert isinstance(decline, Decline)
    assert not decline.busy


def test_an_exchange_that_is_none_is_declined_although_it_would_help_the_one_asked() -> None:
    two = Two()
    asking, offer = two.offer()
    wrong = dataclasses.replace(offer, route=offer.sender.lanes[0].route)
    (decline,) = two.say(asking, wrong)
    assert isinstance(decline, Decline)


def test_nothing_of_another_epoch_counts() -> None:
    two, asking, offer, _, told = decided()
    stood = two.machines[two.other(asking)].stages
    for message in (offer, told, Heard(told.epoch, 1), Abandon(offer.epoch, offer.number)):
        assert two.say(asking, dataclasses.replace(message, epoch=b"another.")) == []
    assert two.machines[two.other(asking)].stages == stood


# ---- launching ----------------------------------------------------------------------------------------------------


def around_the_corner(data_nodes: int, slots: int) -> Costs:
    """Stage 2 is on the way to stage 1: the shortest way steps back."""
    costs = swarm([data_nodes, 1, 1, 1], slots=slots)
    place = {**dict.fromkeys(costs.data_nodes, 0), **dict(zip(names("2.0", "1.0", "3.0"), (1, 2, 3), strict=True))}
    links = {here: {there: 0.1 + abs(place[here] - place[there]) for there in place} for here in place}
    for here, there in (names("3.0", data_node) for data_node in costs.data_nodes):
        links[here][there] = links[there][here] = 1.1
    held = {**costs.slots, **dict.fromkeys(costs.data_nodes, 2)}
    return dataclasses.replace(costs, message_s=links, slots=held)


@pytest.mark.parametrize(
    ("data_nodes", "slots", "walked"),
    [
        pytest.param(1, 2, names("2.0", "1.0", "3.0"), id="nobody else"),
        pytest.param(2, 2, names("1.0", "2.0", "3.0"), id="too few slots for both"),
        pytest.param(34, 1000, names("1.0", "2.0", "3.0"), id="another group of which we know nothing"),
    ],
)
def test_lanes_are_walked_in_the_order_of_their_stages_where_a_step_back_could_block(
    data_nodes: int, slots: int, walked: tuple[PeerId, ...]
) -> None:
    rules = PathRules(stages=4, per_path=3, max_forward_jump=2, max_back_stops=1, max_back_distance=1)
    talkers = Party(around_the_corner(data_nodes, slots), rules, 1, CALM, 0)
    stuck = dataclasses.replace(talkers.costs, forward_s=dict.fromkeys(talkers.costs.forward_s, 1.1))
    talkers.announce_members(costs=stuck)
    talkers.run(10.0)
    assert {machine.launches for machine in talkers.machines.values()} == {(walked,)}


# ---- large swarms -------------------------------------------------------------------------------------------------


def test_large_swarms_talk_in_groups_that_share_no_peer() -> None:
    talkers = Party(swarm([70, 40, 40, 40]), PathRules(stages=4, per_path=2, max_forward_jump=3), 1, CALM, 0)
    talkers.run(20.0)
    talkers.assert_equal_visits()
    groups = [group_of(peer, talkers.members()) for peer in sorted(talkers.machines)]
    assert [len(group.members) for group in dict.fromkeys(groups)] == [24, 23, 23]
    users: dict[PeerId, set[int]] = {}
    for peer, machine in talkers.machines.items():
        for route in machine.launches:
            for visited in route:
                users.setdefault(visited, set()).add(group_of(peer, talkers.members()).number)
    assert all(len(numbers) == 1 for numbers in users.values())


def test_a_stage_with_fewer_peers_than_groups_belongs_to_all() -> None:
    costs = swarm([70, 40, 2])
    members = frozenset(Member(peer) for peer in costs.data_nodes)
    shares = [share_of(costs, group_of(peer, members)) for peer in costs.data_nodes]
    assert all(share.stages[2] == costs.stages[2] and not exclusive for share, exclusive in shares)
    assert {peer for share, _ in shares for peer in share.stages[1]} == set(costs.stages[1])


@pytest.mark.parametrize("seed", range(5))
def test_swarms_in_which_visits_cannot_be_equal_in_one_iteration_end_as_dealt(seed: int) -> None:
    costs = jittered(swarm([4, 2, 2, 2, 2, 2]), 0.5, random.Random(seed))
    talkers = Party(costs, RULES, 3, STORM, seed)
    talkers.run(LONG)
    talkers.assert_settled()
    talkers.assert_equal_visits()
