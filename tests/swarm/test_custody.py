"""Every transition that custody promises, one at a time, seen from one peer."""

from __future__ import annotations

import math

import pytest

from swarm.custody import DATA_NODE_GRACE_S, Custody
from swarm.holdings import (
    Action,
    BackwardArrived,
    BrokenOff,
    CloseArrived,
    Compute,
    Computed,
    ComputeFailed,
    Finished,
    Forget,
    ForwardArrived,
    Holding,
    Key,
    PeerLost,
    Phase,
    ReceiptArrived,
    SendOutput,
    Started,
    Tell,
    Tick,
    Work,
)
from swarm.messages import Backward, Close, Direction, Forward, Purpose, Receipt, ReceiptStatus, Stranded
from swarm.vocabulary import Hop, MicrobatchId, ModuleId, Path, PeerId, Reasoned

DATA, A, B, C = PeerId("data"), PeerId("a"), PeerId("b"), PeerId("c")
A2, B2, B3, C2 = PeerId("a2"), PeerId("b2"), PeerId("b3"), PeerId("c2")
REPLICAS = {1: (A, A2), 2: (B, B2, B3), 3: (C, C2)}
LIFETIME_S = 30.0
MICROBATCH = MicrobatchId(DATA, 7)
OUT, BACK = Direction.FORWARD, Direction.BACKWARD
ACCEPTED, PASSED_ON = ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON
BUSY, REFUSED = ReceiptStatus.BUSY, ReceiptStatus.REFUSED


def path_by(*peers: PeerId) -> Path:
    return Path(DATA, tuple(Hop(ModuleId(stage), peer) for stage, peer in enumerate(peers, start=1)))


ABC = path_by(A, B, C)


def receipt(direction: Direction, position: int, status: ReceiptStatus, retry_after_s: float = 0.0) -> Receipt:
    return Receipt(MICROBATCH, direction, position, status, retry_after_s)


class Desk:
    """One peer's custody, with shorthand for what may happen to it. `dead` are the replicas that the chooser leaves out."""

    def __init__(self, own: PeerId, slots: int = 2) -> None:
        self.own = own
        self.now = 100.0
        self.dead: set[PeerId] = set()
        self.custody = Custody(own, slots, self._choose)

    def _choose(self, module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        left = [peer for peer in REPLICAS[module.stage] if peer not in without | self.dead]
        return Reasoned(left[0], "the first") if left else Reasoned(None, f"module {module} has no peer left")

    def held(self, position: int) -> Holding | None:
        return self.custody.get(Key(MICROBATCH, position))

    def phase(self, position: int) -> Phase | None:
        holding = self.held(position)
        return None if holding is None else holding.phase

    def start(self, path: Path = ABC, purpose: Purpose = Purpose.TRAIN) -> list[Action]:
        return self.custody.handle(Started(MICROBATCH, path, purpose, LIFETIME_S), self.now)

    def forward(self, position: int, path: Path = ABC, purpose: Purpose = Purpose.TRAIN) -> list[Action]:
        """A Forward comes in, header and body."""
        message = Forward(MICROBATCH, path, position, purpose, LIFETIME_S)
        assert self.custody.admit_forward(message, self.now).value
        return self.custody.handle(ForwardArrived(message), self.now)

    def backward(self, position: int, path: Path = ABC) -> list[Action]:
        return self.custody.handle(BackwardArrived(Backward(MICROBATCH, path, position)), self.now)

    def expects(self, position: int, path: Path) -> bool:
        return self.custody.expects_backward(Backward(MICROBATCH, path, position)).value

    def computed(self, position: int) -> list[Action]:
        return self.custody.handle(Computed(Key(MICROBATCH, position)), self.now)

    def receipt(
        self, sender: PeerId, direction: Direction, position: int, status: ReceiptStatus, retry_after_s: float = 0.0
    ) -> list[Action]:
        answer = receipt(direction, position, status, retry_after_s)
        return self.custody.handle(ReceiptArrived(sender, answer), self.now)

    def lose(self, peer: PeerId) -> list[Action]:
        return self.custody.handle(PeerLost(peer, "the link broke"), self.now)

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.custody.handle(Tick(), self.now)

    # ---- shorthand for longer stretches ----------------------------------------------------------------------------

    def handing_on(self, position: int = 0, purpose: Purpose = Purpose.TRAIN) -> list[Action]:
        """Received, computed and offered to the next one."""
        self.forward(position, purpose=purpose)
        return self.computed(position)

    def guarding(self) -> list[Action]:
        self.handing_on()
        return self.receipt(B, OUT, 1, ACCEPTED)

    def awaiting(self) -> None:
        self.guarding()
        self.receipt(B, OUT, 1, PASSED_ON)

    def turned(self) -> None:
        """A data node whose microbatch has come to its end and is being handed back."""
        self.start()
        self.computed(-1)
        self.receipt(A, OUT, 0, ACCEPTED)
        self.receipt(A, OUT, 0, PASSED_ON)
        self.forward(3)
        self.computed(3)


def sent(to: PeerId, message: Forward | Backward, position: int) -> SendOutput:
    return SendOutput(Key(MICROBATCH, position), to, message)


def offer(to: PeerId, path: Path, position: int, purpose: Purpose = Purpose.TRAIN) -> SendOutput:
    """A hop offers its output to the next one, which has `position`."""
    return sent(to, Forward(MICROBATCH, path, position, purpose, LIFETIME_S), position - 1)


def stranded(direction: Direction, position: int, detail: str) -> Tell:
    return Tell(DATA, Stranded(MICROBATCH, direction, position, detail))


# ---- the way everything goes well ------------------------------------------------------------------------------------


def test_a_hop_takes_computes_and_hands_on() -> None:
    desk = Desk(A)
    took = desk.forward(0)
    assert took == [
        Tell(DATA, receipt(OUT, 0, ACCEPTED)),
        Compute(Key(MICROBATCH, 0), Work.FORWARD, Purpose.TRAIN),
    ]
    assert desk.phase(0) is Phase.FORWARD
    assert desk.computed(0) == [offer(B, ABC, 1)]
    assert desk.phase(0) is Phase.HANDING_ON
    assert desk.receipt(B, OUT, 1, ACCEPTED) == [Tell(DATA, receipt(OUT, 0, PASSED_ON))]
    assert desk.phase(0) is Phase.GUARDING
    assert desk.receipt(B, OUT, 1, PASSED_ON) == []
    assert desk.phase(0) is Phase.AWAITING


def test_a_hop_in_the_middle_tells_its_predecessor_and_the_data_node_that_it_has_passed_it_on() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    passed = receipt(OUT, 1, PASSED_ON)
    assert desk.receipt(C, OUT, 2, ACCEPTED) == [Tell(A, passed), Tell(DATA, passed)]


def test_the_gradient_goes_back_and_the_hop_is_done_when_it_has_been_passed_on() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.receipt(C, OUT, 2, ACCEPTED)
    desk.receipt(C, OUT, 2, PASSED_ON)
    key = Key(MICROBATCH, 1)
    assert desk.backward(1) == [
        Tell(C, receipt(BACK, 1, ACCEPTED)),
        Compute(key, Work.BACKWARD, Purpose.TRAIN),
    ]
    assert desk.computed(1) == [sent(A, Backward(MICROBATCH, ABC, 0), 1)]
    passed = receipt(BACK, 1, PASSED_ON)
    assert desk.receipt(A, BACK, 0, ACCEPTED) == [Tell(C, passed), Tell(DATA, passed)]
    assert desk.phase(1) is Phase.GUARDING_BACK
    assert desk.receipt(A, BACK, 0, PASSED_ON) == [Forget(key, "gradient passed on")]
    assert len(desk.custody) == 0


def test_the_first_hop_is_done_as_soon_as_the_data_node_has_its_gradient() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    assert desk.computed(0) == [sent(DATA, Backward(MICROBATCH, ABC, -1), 0)]
    actions = desk.receipt(DATA, BACK, -1, ACCEPTED)
    assert Forget(Key(MICROBATCH, 0), "gradient accepted by its data node") in actions
    assert len(desk.custody) == 0


def test_a_data_node_starts_turns_round_and_finishes() -> None:
    desk = Desk(DATA)
    assert desk.start() == [Compute(Key(MICROBATCH, -1), Work.FORWARD, Purpose.TRAIN)]
    assert desk.computed(-1) == [offer(A, ABC, 0)]
    desk.receipt(A, OUT, 0, ACCEPTED)
    desk.receipt(A, OUT, 0, PASSED_ON)
    assert desk.forward(3)[1:] == [Compute(Key(MICROBATCH, 3), Work.LOSS, Purpose.TRAIN)]
    assert desk.computed(3) == [sent(C, Backward(MICROBATCH, ABC, 2), 3)]
    desk.receipt(C, BACK, 2, ACCEPTED)
    desk.receipt(C, BACK, 2, PASSED_ON)
    assert desk.backward(-1)[1:] == [Compute(Key(MICROBATCH, -1), Work.BACKWARD, Purpose.TRAIN)]
    finished = desk.computed(-1)
    assert finished[0] == Finished(MICROBATCH)
    assert len(desk.custody) == 0


def test_passed_on_counts_for_accepted_when_that_was_overtaken() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.receipt(B, OUT, 1, PASSED_ON) == [Tell(DATA, receipt(OUT, 0, PASSED_ON))]
    assert desk.phase(0) is Phase.AWAITING


def test_a_gradient_that_overtakes_the_receipts_is_taken() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.expects(0, ABC)
    assert desk.backward(0)[1:] == [Compute(Key(MICROBATCH, 0), Work.BACKWARD, Purpose.TRAIN)]
    assert desk.receipt(B, OUT, 1, ACCEPTED) == []
    assert desk.lose(B) == []
    assert desk.phase(0) is Phase.BACKWARD


def test_the_last_hop_awaits_its_gradient_as_soon_as_the_data_node_has_accepted() -> None:
    desk = Desk(C)
    desk.handing_on(2)
    desk.receipt(DATA, OUT, 3, ACCEPTED)
    assert desk.phase(2) is Phase.AWAITING


def test_a_path_without_hops_goes_from_the_data_node_to_itself() -> None:
    desk, path = Desk(DATA), path_by()
    desk.start(path)
    assert desk.computed(-1) == [offer(DATA, path, 0)]
    desk.forward(0, path)
    desk.receipt(DATA, OUT, 0, ACCEPTED)
    assert desk.computed(0) == [sent(DATA, Backward(MICROBATCH, path, -1), 0)]
    desk.backward(-1, path)
    desk.receipt(DATA, BACK, -1, ACCEPTED)
    assert Finished(MICROBATCH) in desk.computed(-1)
    assert len(desk.custody) == 0


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_what_is_only_evaluated_is_gone_as_soon_as_the_next_one_has_accepted() -> None:
    for own, position, target in ((A, 0, B), (C, 2, DATA)):
        desk = Desk(own)
        desk.handing_on(position, Purpose.EVALUATE)
        actions = desk.receipt(target, OUT, position + 1, ACCEPTED)
        assert actions[-1] == Forget(Key(MICROBATCH, position), "passed on")
        assert len(desk.custody) == 0


def test_what_is_only_evaluated_ends_with_its_loss() -> None:
    desk = Desk(DATA)
    desk.start(purpose=Purpose.EVALUATE)
    desk.computed(-1)
    desk.receipt(A, OUT, 0, ACCEPTED)
    assert len(desk.custody) == 0
    assert desk.forward(3, purpose=Purpose.EVALUATE)[1:] == [Compute(Key(MICROBATCH, 3), Work.LOSS, Purpose.EVALUATE)]
    assert desk.computed(3) == [Forget(Key(MICROBATCH, 3), "evaluated")]


# ---- admission -------------------------------------------------------------------------------------------------------


def test_slots_are_bounded_reserved_at_admission_and_given_back() -> None:
    desk = Desk(A, slots=2)
    messages = [Forward(MicrobatchId(DATA, n), ABC, 0, Purpose.TRAIN, LIFETIME_S) for n in range(3)]
    admitted = [desk.custody.admit_forward(message, desk.now).value for message in messages]
    assert admitted == [True, True, False]
    assert desk.custody.used_slots == 2
    assert desk.custody.admit_forward(messages[0], desk.now).value, "the same one needs no second slot"
    assert desk.custody.used_slots == 2
    broken = desk.custody.handle(BrokenOff(Key(MicrobatchId(DATA, 0), 0)), desk.now)
    assert broken == [Forget(Key(MicrobatchId(DATA, 0), 0), "broken off")]
    assert desk.custody.admit_forward(messages[2], desk.now).value


def test_a_data_nodes_own_need_no_slot() -> None:
    desk = Desk(DATA, slots=0)
    desk.start()
    desk.forward(3)
    assert desk.custody.used_slots == 0
    assert len(desk.custody) == 2


def test_broken_off_means_nothing_once_the_tensor_is_there() -> None:
    desk = Desk(A)
    desk.forward(0)
    assert desk.custody.handle(BrokenOff(Key(MICROBATCH, 0)), desk.now) == []
    assert desk.phase(0) is Phase.FORWARD


def test_a_forward_whose_reservation_is_gone_is_refused() -> None:
    desk = Desk(A)
    message = Forward(MICROBATCH, ABC, 0, Purpose.TRAIN, LIFETIME_S)
    (told,) = desk.custody.handle(ForwardArrived(message), desk.now)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.to, told.message.status) == (DATA, REFUSED)
    assert len(desk.custody) == 0


@pytest.mark.parametrize("phase", [None, Phase.RECEIVING, Phase.FORWARD])
def test_a_gradient_is_refused_where_it_is_not_awaited(phase: Phase | None) -> None:
    desk = Desk(A)
    if phase is Phase.RECEIVING:
        desk.custody.admit_forward(Forward(MICROBATCH, ABC, 0, Purpose.TRAIN, LIFETIME_S), desk.now)
    if phase is Phase.FORWARD:
        desk.forward(0)
    assert not desk.expects(0, ABC)
    (told,) = desk.backward(0)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.to, told.message.direction, told.message.status) == (B, BACK, REFUSED)
    assert desk.phase(0) is phase


def test_a_second_copy_of_a_gradient_is_accepted_and_not_computed() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    assert desk.backward(0) == [Tell(B, receipt(BACK, 0, ACCEPTED))]


def test_a_gradient_is_awaited_along_a_path_that_others_have_repaired_further_on() -> None:
    desk = Desk(A)
    desk.awaiting()
    repaired = ABC.with_peer(2, C2)
    assert desk.expects(0, repaired)
    desk.backward(0, repaired)
    assert desk.computed(0) == [sent(DATA, Backward(MICROBATCH, repaired, -1), 0)]


def test_a_gradient_is_not_awaited_from_a_peer_that_it_was_not_handed_to() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.lose(C)
    assert desk.expects(1, ABC.with_peer(2, C2))
    assert not desk.expects(1, ABC)
    assert not desk.expects(1, ABC.with_peer(2, C2).with_peer(0, A2))
    assert not desk.expects(1, Path(DATA, ABC.with_peer(2, C2).hops[:2])), "another length"


# ---- the way out goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarding", [False, True])
def test_a_lost_successor_is_replaced_from_the_output_that_is_kept(guarding: bool) -> None:
    desk = Desk(A)
    if guarding:
        desk.guarding()
    else:
        desk.handing_on()
    assert desk.lose(B) == [offer(B2, ABC.with_peer(1, B2), 1)]
    assert desk.phase(0) is Phase.HANDING_ON


def test_the_data_node_replaces_a_lost_first_hop() -> None:
    desk = Desk(DATA)
    desk.start()
    desk.computed(-1)
    assert desk.lose(A) == [offer(A2, ABC.with_peer(0, A2), 0)]


def test_a_lost_successor_that_has_passed_it_on_matters_no_more() -> None:
    desk = Desk(A)
    desk.awaiting()
    assert desk.lose(B) == []
    assert desk.phase(0) is Phase.AWAITING


def test_a_refusing_successor_is_replaced_and_not_asked_again() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.receipt(B, OUT, 1, REFUSED) == [offer(B2, ABC.with_peer(1, B2), 1)]
    assert desk.receipt(B2, OUT, 1, REFUSED) == [offer(B3, ABC.with_peer(1, B3), 1)]
    gone, told = desk.receipt(B3, OUT, 1, REFUSED)
    assert isinstance(gone, Forget)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Stranded)
    assert (told.to, told.message.direction, told.message.position) == (DATA, OUT, 1)
    assert "no peer left" in told.message.detail
    assert len(desk.custody) == 0


def test_a_busy_successor_is_replaced_by_another() -> None:
    desk = Desk(A)
    desk.handing_on()
    assert desk.receipt(B, OUT, 1, BUSY, 1.0) == [offer(B2, ABC.with_peer(1, B2), 1)]


def test_when_all_are_busy_the_last_is_asked_again_when_it_wants_to_be_and_then_the_others() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B3}
    desk.receipt(B, OUT, 1, BUSY, 1.0)
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == []
    assert desk.wait(0.5) == []
    assert desk.wait(0.6) == [offer(B2, ABC.with_peer(1, B2), 1)]
    assert desk.wait(0.6) == [], "once for each answer"
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == [offer(B, ABC, 1)]


def test_a_busy_one_is_asked_again_before_the_microbatch_strands() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B3}
    desk.receipt(B, OUT, 1, BUSY, 1.0)
    assert desk.lose(B2) == [offer(B, ABC, 1)]


def test_one_that_refused_is_not_asked_again_because_the_rest_are_busy() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B3}
    desk.receipt(B, OUT, 1, REFUSED)
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == []
    desk.wait(1.1)
    assert desk.receipt(B2, OUT, 1, BUSY, 1.0) == []
    assert desk.wait(1.1) == [offer(B2, ABC.with_peer(1, B2), 1)]


def test_the_deadline_comes_also_to_one_that_waits_for_a_busy_peer() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B2, B3}
    for _ in range(40):
        desk.receipt(B, OUT, 1, BUSY, 0.5)
        desk.wait(1.0)
    assert len(desk.custody) == 0


def test_busy_after_accepted_is_not_believed() -> None:
    desk = Desk(A)
    desk.guarding()
    assert desk.receipt(B, OUT, 1, BUSY, 1.0) == []
    assert desk.phase(0) is Phase.GUARDING


def test_nobody_left_strands_it() -> None:
    desk = Desk(A)
    desk.handing_on()
    desk.dead = {B2, B3}
    assert desk.lose(B) == [
        Forget(Key(MICROBATCH, 0), "the link broke; module 2.0 has no peer left"),
        stranded(OUT, 1, "the link broke; module 2.0 has no peer left"),
    ]


def test_nobody_stands_in_for_the_data_node() -> None:
    desk = Desk(C)
    desk.handing_on(2)
    assert desk.lose(DATA) == [Forget(Key(MICROBATCH, 2), "the link broke"), stranded(OUT, 3, "the link broke")]


def test_a_busy_data_node_is_asked_again() -> None:
    desk = Desk(C)
    offered = desk.handing_on(2)
    assert desk.receipt(DATA, OUT, 3, BUSY, 1.0) == []
    assert desk.wait(1.1) == offered


@pytest.mark.parametrize("status", list(ReceiptStatus))
def test_only_the_one_it_is_handed_to_can_answer(status: ReceiptStatus) -> None:
    desk = Desk(A)
    desk.handing_on()
    before = desk.held(0)
    assert desk.receipt(B2, OUT, 1, status) == []
    assert desk.receipt(B, BACK, 1, status) == []
    assert desk.receipt(B, OUT, 2, status) == []
    assert desk.held(0) == before


def test_a_computation_that_fails_strands_it() -> None:
    desk = Desk(A)
    desk.forward(0)
    failed = desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "out of memory"), desk.now)
    assert failed == [Forget(Key(MICROBATCH, 0), "out of memory"), stranded(OUT, 0, "out of memory")]


def test_results_for_what_is_not_held_are_ignored() -> None:
    desk = Desk(A)
    assert desk.computed(0) == []
    assert desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "late"), desk.now) == []


# ---- the way back goes wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarding", [False, True])
def test_on_the_way_back_nobody_stands_in(guarding: bool) -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.backward(1)
    desk.computed(1)
    if guarding:
        desk.receipt(A, BACK, 0, ACCEPTED)
    assert desk.lose(A) == [Forget(Key(MICROBATCH, 1), "the link broke"), stranded(BACK, 0, "the link broke")]


def test_a_refused_gradient_strands_it() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.backward(1)
    desk.computed(1)
    assert desk.receipt(A, BACK, 0, REFUSED)[1] == stranded(BACK, 0, "refused: ")


def test_a_busy_predecessor_is_asked_again() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.backward(1)
    handed_back = desk.computed(1)
    assert desk.receipt(A, BACK, 0, BUSY, 1.0) == []
    assert desk.wait(1.1) == handed_back


def test_a_backward_that_fails_strands_it() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.backward(0)
    failed = desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "not finite"), desk.now)
    assert failed == [Forget(Key(MICROBATCH, 0), "not finite"), stranded(BACK, 0, "not finite")]


# ---- the same microbatch again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("repaired_since", [False, True])
def test_the_same_forward_again_is_answered_and_not_computed(repaired_since: bool) -> None:
    desk = Desk(A)
    desk.forward(0)
    accepted, passed_on = Tell(DATA, receipt(OUT, 0, ACCEPTED)), Tell(DATA, receipt(OUT, 0, PASSED_ON))
    assert desk.forward(0) == [accepted]
    desk.computed(0)
    if repaired_since:
        desk.lose(B)
    assert desk.forward(0) == [accepted]
    desk.receipt(B2 if repaired_since else B, OUT, 1, ACCEPTED)
    assert desk.forward(0) == [accepted, passed_on]
    assert desk.phase(0) is Phase.GUARDING


@pytest.mark.parametrize("progress", ["computing", "handing on", "awaiting"])
def test_a_copy_by_a_repaired_path_replaces_one_that_has_no_gradient_yet(progress: str) -> None:
    desk = Desk(B)
    desk.forward(1)
    if progress != "computing":
        desk.computed(1)
    if progress == "awaiting":
        desk.receipt(C, OUT, 2, PASSED_ON)
    repaired = ABC.with_peer(0, A2)
    assert desk.forward(1, repaired) == [
        Forget(Key(MICROBATCH, 1), "replaced by a repaired path"),
        Tell(A2, receipt(OUT, 1, ACCEPTED)),
        Compute(Key(MICROBATCH, 1), Work.FORWARD, Purpose.TRAIN),
    ]
    assert desk.computed(1) == [offer(C, repaired, 2)]
    assert desk.custody.used_slots == 1


def test_a_copy_by_another_path_is_refused_once_the_gradient_is_there() -> None:
    desk = Desk(B)
    desk.handing_on(1)
    desk.backward(1)
    (told,) = desk.forward(1, ABC.with_peer(0, A2))
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.to, told.message.status) == (A2, REFUSED)
    assert desk.phase(1) is Phase.BACKWARD


@pytest.mark.parametrize("passed_back", [False, True])
def test_it_turns_round_only_once(passed_back: bool) -> None:
    desk = Desk(DATA)
    desk.turned()
    if passed_back:
        desk.receipt(C, BACK, 2, ACCEPTED)
        desk.receipt(C, BACK, 2, PASSED_ON)
    (told,) = desk.forward(3, ABC.with_peer(2, C2))
    assert isinstance(told, Tell)
    assert isinstance(told.message, Receipt)
    assert (told.to, told.message.status) == (C2, REFUSED)
    desk.backward(-1)
    desk.computed(-1)
    assert len(desk.custody) == 0


def test_a_loss_of_the_last_hop_after_it_has_passed_the_gradient_on_matters_no_more() -> None:
    desk = Desk(DATA)
    desk.turned()
    desk.receipt(C, BACK, 2, PASSED_ON)
    assert desk.lose(C) == []
    desk.custody.touch(Key(MICROBATCH, -1), desk.now + 10 * LIFETIME_S)
    assert desk.wait(2 * LIFETIME_S) == [], "the end lasts as long as its start"


def test_an_end_whose_receipt_is_late_ends_with_its_start() -> None:
    desk = Desk(DATA)
    desk.turned()
    desk.receipt(C, BACK, 2, ACCEPTED)
    desk.backward(-1)
    assert Finished(MICROBATCH) in desk.computed(-1)
    assert len(desk.custody) == 0
    assert desk.lose(C) == []


# ---- deadlines, closing, a data node that vanishes -----------------------------------------------------------------------


def test_a_hop_forgets_in_silence_when_nothing_happens_any_more() -> None:
    desk = Desk(A)
    desk.awaiting()
    assert desk.wait(LIFETIME_S - 1) == []
    assert desk.wait(1.0) == [Forget(Key(MICROBATCH, 0), "nothing happened to it for 30 s")]


def test_whatever_happens_puts_the_deadline_off() -> None:
    desk = Desk(A)
    desk.handing_on()
    for status in (ACCEPTED, PASSED_ON):
        assert desk.wait(LIFETIME_S - 1) == []
        desk.receipt(B, OUT, 1, status)
    assert desk.wait(LIFETIME_S - 1) == []
    assert len(desk.custody) == 1


def test_a_data_node_strands_its_own_at_the_deadline() -> None:
    desk = Desk(DATA)
    desk.start()
    desk.computed(-1)
    desk.receipt(A, OUT, 0, PASSED_ON)
    desk.now += LIFETIME_S - 1
    desk.custody.touch(Key(MICROBATCH, -1), desk.now)
    assert desk.wait(LIFETIME_S - 1) == [], "it has moved elsewhere"
    gone, told = desk.wait(1.0)
    assert isinstance(gone, Forget)
    assert told == stranded(OUT, -1, "lost on its path")


def test_abandoning_forgets_both_ends_and_tells_every_hop() -> None:
    desk = Desk(DATA)
    desk.turned()
    actions = desk.custody.abandon(MICROBATCH, "enough")
    assert set(actions) == {
        Forget(Key(MICROBATCH, -1), "enough"),
        Forget(Key(MICROBATCH, 3), "enough"),
        *(Tell(peer, Close(MICROBATCH, "enough")) for peer in (A, B, C)),
    }
    assert desk.custody.abandon(MICROBATCH, "again") == []


def test_abandoning_also_tells_the_hops_of_a_repaired_path() -> None:
    desk = Desk(DATA)
    desk.start()
    desk.computed(-1)
    desk.forward(3, ABC.with_peer(1, B2))
    told = {action.to for action in desk.custody.abandon(MICROBATCH, "enough") if isinstance(action, Tell)}
    assert told == {A, B, B2, C}


def test_only_its_own_data_node_may_close_a_microbatch() -> None:
    desk = Desk(A)
    desk.awaiting()
    close = Close(MICROBATCH, "abandoned")
    assert desk.custody.handle(CloseArrived(B, close), desk.now) == []
    assert len(desk.custody) == 1
    assert desk.custody.handle(CloseArrived(DATA, close), desk.now) == [Forget(Key(MICROBATCH, 0), "closed: abandoned")]


def test_closing_one_microbatch_leaves_the_others() -> None:
    desk = Desk(A)
    desk.awaiting()
    other = Forward(MicrobatchId(DATA, 8), ABC, 0, Purpose.TRAIN, LIFETIME_S)
    desk.custody.admit_forward(other, desk.now)
    desk.custody.handle(CloseArrived(DATA, Close(MICROBATCH, "abandoned")), desk.now)
    assert desk.custody.get(Key(other.microbatch, 0)) is not None


@pytest.mark.parametrize("own", [A, C])
def test_a_vanished_data_nodes_microbatches_are_kept_for_a_grace_only(own: PeerId) -> None:
    desk, position = Desk(own), ABC.hops.index(Hop(ModuleId(1 if own == A else 3), own))
    desk.handing_on(position)
    desk.receipt(ABC.peer_at(position + 1), OUT, position + 1, ACCEPTED)
    assert desk.lose(DATA) == []
    assert desk.wait(DATA_NODE_GRACE_S / 2) == []
    assert len(desk.wait(DATA_NODE_GRACE_S / 2)) == 1
    assert len(desk.custody) == 0


def test_the_grace_never_lengthens_a_deadline() -> None:
    desk = Desk(A)
    desk.awaiting()
    desk.wait(LIFETIME_S - 1)
    desk.lose(DATA)
    assert len(desk.wait(1.0)) == 1


def test_an_end_that_has_been_passed_back_has_no_deadline_of_its_own() -> None:
    desk = Desk(DATA)
    desk.turned()
    desk.receipt(C, BACK, 2, PASSED_ON)
    end = desk.held(3)
    assert end is not None
    assert end.deadline == math.inf


def test_a_long_explanation_is_cut_to_what_a_message_carries() -> None:
    desk = Desk(A)
    desk.forward(0)
    failed = desk.custody.handle(ComputeFailed(Key(MICROBATCH, 0), "x" * 1000), desk.now)
    assert isinstance(failed[1], Tell)
    assert isinstance(failed[1].message, Stranded)
    assert len(failed[1].message.detail) == 256
