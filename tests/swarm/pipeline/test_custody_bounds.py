"""How much one peer, one link or one data node may take of a hop, for how long, and from whom a hop takes anything."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from swarm.pipeline import custody
from swarm.vocabulary.pipeline_messages import Backward, Forward, Purpose, Recall, Stranded
from swarm.vocabulary.types import MicrobatchId, Path, PeerId, SignedRoute
from tests.swarm.pipeline.custody_desk import A2, ABC, B2, DATA, LIFETIME_S, MICROBATCH, A, B, C, Desk

HOUR_S = 3600.0
ROUTE = SignedRoute(tuple(hop.module for hop in ABC.hops), LIFETIME_S, b"s" * 64)
SIGNED = replace(ABC, route=ROUTE)
OTHERWISE = replace(ABC, route=replace(ROUTE, signature=b"o" * 64))


def forward(path: Path, position: int, number: int = 7, purpose: Purpose = Purpose.TRAIN) -> Forward:
    return Forward(MicrobatchId(path.data_node, number), path, position, purpose, HOUR_S)


def backward(path: Path, position: int, number: int = 7) -> Backward:
    return Backward(MicrobatchId(path.data_node, number), path, position)


def admitted(desk: Desk, messages: Iterable[Forward | Backward]) -> int:
    return sum(desk.admit(message).value is custody.SlotState.FREE for message in messages)


def of_data_nodes(path: Path, numbers: range) -> list[Path]:
    return [replace(path, data_node=PeerId(f"data{number}")) for number in numbers]


@pytest.mark.parametrize(
    ("own", "position", "before"), [(B, 1, PeerId("visitor")), (B, 1, C), (B, 1, B2), (A, 0, C), (DATA, 3, B)]
)
def test_a_forward_comes_only_from_a_replica_of_the_module_before(own: PeerId, position: int, before: PeerId) -> None:
    """If our view is old its sender is honest, so it may come again."""
    path = replace(ABC, data_node=before) if position == 0 else ABC.with_peer(position - 1, before)
    desk = Desk(own)
    place = desk.admit(forward(path, position))
    assert (place.value, place.reason) == (custody.SlotState.BUSY, custody.STRANGER)
    assert len(desk.custody) == 0


def test_a_substitute_takes_a_gradient_from_a_replica_of_the_module_after_only() -> None:
    stranger = Desk(B2).admit(backward(ABC.with_peer(1, B2).with_peer(2, A), 1))
    assert (stranger.value, stranger.reason) == (custody.SlotState.BUSY, custody.STRANGER)


def test_an_entry_stays_on_the_route_that_was_signed_first() -> None:
    """A data node that signs two routes for one number does not get them mixed."""
    desk = Desk(B)
    assert desk.admit(forward(SIGNED, 1)).value is custody.SlotState.FREE
    place = desk.admit(forward(OTHERWISE, 1))
    assert (place.value, place.reason) == (custody.SlotState.REFUSED, custody.OTHER_ROUTE)
    desk.custody.handle(custody.TensorArrived(forward(SIGNED, 1)), desk.now)
    desk.do("computed 1")
    assert desk.admit(backward(OTHERWISE, 1)).value is custody.SlotState.REFUSED
    assert desk.admit(backward(SIGNED, 1)).value is custody.SlotState.FREE
    [told] = desk.custody.handle(custody.ControlArrived(C, Recall(MICROBATCH, OTHERWISE, 1)), desk.now)
    assert told.message.detail == custody.OTHER_ROUTE  # type: ignore[union-attr]


def test_a_signed_route_goes_with_the_microbatch_through_every_repair() -> None:
    desk = Desk(B)
    desk.admit(forward(SIGNED, 1))
    desk.custody.handle(custody.TensorArrived(forward(SIGNED, 1)), desk.now)
    for event in ("computed 1", "c refused out 2"):
        assert desk.do(event)
        [entry] = desk.custody.entries()
        assert entry.path.route == ROUTE
    repaired = SIGNED.with_peer(1, B2)
    substitute = Desk(B2)
    substitute.admit(backward(repaired, 1))
    substitute.custody.handle(custody.TensorArrived(backward(repaired, 1)), substitute.now)
    substitute.custody.handle(custody.TensorArrived(forward(repaired.with_peer(0, A2), 1)), substitute.now)
    [entry] = substitute.custody.entries()
    assert entry.path == repaired.with_peer(0, A2)


def test_slots_are_bounded_reserved_at_admission_and_given_back() -> None:
    desk = Desk(A, slots=2)
    messages = [forward(ABC, 0, number) for number in range(3)]
    assert [desk.admit(message).value for message in messages] == [
        custody.SlotState.FREE,
        custody.SlotState.FREE,
        custody.SlotState.BUSY,
    ]
    assert desk.admit(messages[0]).value is custody.SlotState.FREE, "the same one needs no second slot"
    assert desk.custody.used_slots == 2
    desk.custody.handle(custody.BrokenOff(messages[0]), desk.now)
    assert desk.admit(messages[2]).value is custody.SlotState.FREE


def test_a_data_nodes_own_need_no_slot() -> None:
    desk = Desk(DATA, slots=0)
    desk.do("start")
    assert desk.do("forward 3")
    assert (desk.custody.used_slots, len(desk.custody)) == (0, 2)


def test_one_data_node_cannot_take_all_slots_and_at_most_half_while_another_has_work_here() -> None:
    desk = Desk(A, slots=8)
    assert admitted(desk, (forward(replace(ABC, data_node=PeerId("greedy")), 0, number) for number in range(10))) == 6
    assert admitted(desk, (forward(ABC, 0, number) for number in range(10))) == 2
    desk = Desk(A, slots=8)
    assert admitted(desk, [forward(ABC, 0)]) == 1
    assert admitted(desk, (forward(replace(ABC, data_node=PeerId("greedy")), 0, number) for number in range(10))) == 4


def test_one_link_cannot_take_all_slots_and_gradients_for_a_substitute_count() -> None:
    desk = Desk(B, slots=8)
    assert admitted(desk, (forward(path, 1) for path in of_data_nodes(ABC, range(10)))) == 6
    assert admitted(desk, (forward(path, 1) for path in of_data_nodes(ABC.with_peer(0, A2), range(10, 20)))) == 2
    desk, paths = Desk(B2, slots=8), of_data_nodes(ABC.with_peer(1, B2), range(10))
    assert admitted(desk, (backward(path, 1) for path in paths)) == 6
    assert "this link" in desk.admit(backward(paths[-1], 1)).reason


def test_data_nodes_without_a_link_have_a_quarter_together() -> None:
    desk = Desk(B, slots=8)
    desk.unlinked = {f"data{number}" for number in range(10)}
    paths = of_data_nodes(ABC, range(10))
    assert admitted(desk, (forward(path, 1) for path in paths)) == 2
    assert "without a link" in desk.admit(forward(paths[9], 1)).reason
    assert desk.admit(forward(ABC, 1)).value is custody.SlotState.FREE, "others have slots"


@pytest.mark.parametrize("by_one", [True, False])
def test_a_hop_with_too_many_unsettled_gradients_takes_no_more(by_one: bool) -> None:
    desk = Desk(A, slots=4)
    for number in range(9):
        path = ABC if by_one else replace(ABC, data_node=PeerId(f"data{number}"))
        message = forward(path, 0, number)
        place = desk.admit(message)
        if place.value is not custody.SlotState.FREE:
            assert number == (3 if by_one else 4), "three quarters of the slots, or all"
            assert "unsettled" in place.reason
            return
        desk.custody._await_settlement(desk.custody.get(custody.Key(message.microbatch, 0)), desk.now)
    raise AssertionError("it took all of them")


def kept_s(desk: Desk, message: Forward) -> float:
    assert desk.admit(message).value is custody.SlotState.FREE
    return desk.custody.get(custody.Key(message.microbatch, message.position)).deadline - desk.now


def test_a_lifetime_is_bounded_by_residence_times() -> None:
    desk = Desk(A, slots=8)
    assert kept_s(desk, forward(ABC, 0, number=1)) == custody.LONGEST_LIFETIME_S, "nothing is known yet"
    for event in ("handed 0", "b passed_on out 1"):
        desk.do(event)
    desk.now += 5.0
    for event in ("backward 0", "computed 0", "data accepted back -1"):
        assert desk.do(event)
    assert kept_s(desk, forward(ABC, 0, number=2)) == pytest.approx(custody.LIFETIME_IN_RESIDENCES * 5.0)
    assert kept_s(desk, forward(ABC, 0, number=3, purpose=Purpose.EVALUATE)) == custody.SHORTEST_LIFETIME_S


def test_residence_times_are_those_of_each_data_node_within_bounds() -> None:
    times = custody.ResidenceTimes()
    times.note(DATA, 0.1)
    assert times.longest_s(DATA) == custody.SHORTEST_LIFETIME_S
    slow, hostile = PeerId("slow"), PeerId("hostile")
    for _ in range(100):
        times.note(slow, 10.0)
    assert times.longest_s(slow) == pytest.approx(200.0)
    assert times.longest_s(PeerId("new")) == pytest.approx(200.0), "as slow as the slowest"
    times.note(hostile, 1e6)
    assert times.longest_s(hostile) == custody.LONGEST_LIFETIME_S
    assert times.longest_s(slow) == pytest.approx(200.0), "which changes nothing for others"
    for number in range(2 * custody.MAX_TIMED):
        times.note(PeerId(str(number)), 1.0)
    assert len(times._mean_s) == custody.MAX_TIMED


def test_busy_replicas_are_asked_less_often_and_not_in_step_with_other_microbatches() -> None:
    desk = Desk(A)
    for event in ("handed 0", "dead b2 b3"):
        desk.do(event)
    waited = []
    for _ in range(6):
        assert desk.do("b busy out 1 0.1") == ""
        begun = desk.now
        while not desk.do("wait 0.01"):
            pass
        waited.append(desk.now - begun)
    assert waited[0] == pytest.approx(0.1, abs=0.011)
    assert all(0.1 * 2**n <= pause + 1e-6 <= 0.1 * 2**n * 1.5 + 0.02 for n, pause in enumerate(waited[:4]))
    assert max(waited) <= 0.8 * 1.5 + 0.02
    assert len({round(pause, 2) for pause in waited[3:]}) > 1
    [entry] = desk.custody.entries()
    other = replace(entry, key=custody.Key(MicrobatchId(DATA, 8), 0))
    assert custody.put_off(entry, 0.1, 0.0).retry_at != custody.put_off(other, 0.1, 0.0).retry_at
    desk.do("b accepted out 1")
    assert desk.custody.entries()[0].refusals == 0


def test_a_hop_asks_so_often_whether_its_gradient_counts_and_then_takes_it_back() -> None:
    desk = Desk(A)
    for event in ("handed 0", "backward 0", "computed 0", "data accepted back -1", "lose data"):
        desk.do(event)
    for _ in range(custody.MAX_ASKS):
        assert desk.do("linked data") == "data < asks", "which is not counted"
        assert desk.do("wait 3000") == "data < asks", "however long the machine slept"
    assert desk.do("wait 3") == "take back 0; forget 0, its data node does not answer whether its gradient counts"


def test_a_data_node_remembers_its_last_microbatches() -> None:
    desk = Desk(DATA)
    for number in range(custody.REMEMBERED + 5):
        desk.custody._completed[MicrobatchId(DATA, number + 100)] = ABC
    for event in ("start", "computed -1", "forward 3", "computed 3", "backward -1", "computed -1"):
        desk.do(event)
    assert len(desk.custody._completed) == custody.REMEMBERED
    assert desk.do("a asks") == "a < settled by a b c"


def test_closing_one_microbatch_leaves_the_others() -> None:
    desk = Desk(A)
    desk.admit(forward(ABC, 0, number=8))
    desk.do("handed 0")
    assert desk.do("data close") == "forget 0, closed: abandoned"
    assert len(desk.custody) == 1


def test_a_long_explanation_is_cut_to_what_a_message_carries() -> None:
    desk = Desk(A)
    desk.do("forward 0")
    _, told = desk.custody.handle(custody.ComputeFailed(custody.Key(MICROBATCH, 0), "x" * 1000), desk.now)
    assert isinstance(told.message, Stranded)
    assert len(told.message.detail) == 256
