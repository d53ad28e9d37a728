"""Chunks of an anchor from several donors at once, some of which fail or lie, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.world.world import VirtualTime
from swarm.averaging import chunk_download as machine
from swarm.averaging.chunk_download import MOST_OWED, Ask, Download, Tick
from swarm.averaging.schedule import choose_version
from swarm.vocabulary.averaging_messages import StateRefusal
from swarm.vocabulary.types import AnchorVersion, PeerId

CHUNK_BYTES = 2**20
TICK_S = 0.2
LATENCY_S = 0.03
QUEUE_OF_ASKER = 32


@dataclass
class Donor:
    """One that serves its askers in turn, chunk by chunk. Times are when a fault sets in."""

    peer: PeerId
    bytes_per_s: float = 20e6
    wrong: float = 0.0  # Probability that a chunk does not match
    freezes_at: float = float("inf")
    thaws_at: float = float("inf")
    gone_at: float = float("inf")
    dies_at: float = float("inf")
    breaks: float = 0.0  # Probability that the link breaks in place of a chunk
    busy: float = 0.0  # Probability that a request is refused as busy
    served: Counter[str] = field(default_factory=Counter)
    queues: dict[str, list[int]] = field(default_factory=dict)
    sending: bool = False


class Joiner:
    def __init__(self, name: str, world: World, chunks: int, here: set[int]) -> None:
        self.name = name
        self.chunks = set(here)
        self.reports: list[machine.Report] = []
        self.end: machine.Complete | machine.Failed | None = None
        self._world = world
        self.plan = Download(chunks, CHUNK_BYTES, here, list(world.donors), world.random, MOST_OWED)

    def handle(self, event: machine.Event) -> None:
        if self.end is not None:
            return
        if isinstance(event, machine.ChunkArrived) and event.matches:
            self.chunks.add(event.chunk)
        for action in self.plan.handle(event, self._world.time.now):
            self._carry_out(action)

    def _carry_out(self, action: machine.Action) -> None:
        match action:
            case Ask(donor, chunks):
                assert 1 <= len(chunks) <= 16
                assert len(set(chunks)) == len(chunks)
                assert not self.chunks & set(chunks)
                self._world.after_latency(lambda: self._world.asked(self, donor, chunks))
            case machine.Report():
                self.reports.append(action)
            case machine.Complete() | machine.Failed():
                self.end = action


class World:
    def __init__(self, donors: list[Donor], seed: int) -> None:
        self.time = VirtualTime()
        self.random = Random(seed)
        self.donors = {donor.peer: donor for donor in donors}
        self.joiners: dict[str, Joiner] = {}

    def join(self, chunks: int, here: set[int] | None = None) -> Joiner:
        joiner = Joiner(f"joiner {len(self.joiners)}", self, chunks, here or set())
        self.joiners[joiner.name] = joiner
        self._tick(joiner)
        return joiner

    def run(self, seconds: float) -> None:
        self.time.run_until(seconds, lambda: all(joiner.end for joiner in self.joiners.values()))

    def after_latency(self, what: Callable[[], None]) -> None:
        self.time.after(LATENCY_S * self.random.uniform(1.0, 2.0), what)

    def _tick(self, joiner: Joiner) -> None:
        joiner.handle(Tick())
        if joiner.end is None:
            self.time.after(TICK_S, lambda: self._tick(joiner))

    def asked(self, joiner: Joiner, peer: PeerId, chunks: tuple[int, ...]) -> None:
        donor = self.donors[peer]
        now = self.time.now
        if now >= donor.dies_at:
            self.after_latency(lambda: joiner.handle(machine.DonorLost(peer)))
        elif self._frozen(donor):
            return
        elif now >= donor.gone_at:
            self.after_latency(lambda: joiner.handle(machine.ChunksRefused(peer, chunks, StateRefusal.GONE)))
        else:
            queue = donor.queues.setdefault(joiner.name, [])
            if len(queue) + len(chunks) > QUEUE_OF_ASKER or self.random.random() < donor.busy:
                self.after_latency(lambda: joiner.handle(machine.ChunksRefused(peer, chunks, StateRefusal.BUSY)))
                return
            queue.extend(chunks)
            self._send_next(donor)

    def _frozen(self, donor: Donor) -> bool:
        return donor.freezes_at <= self.time.now < donor.thaws_at

    def _send_next(self, donor: Donor) -> None:
        asker = next((name for name, queue in donor.queues.items() if queue), None)
        if donor.sending or asker is None or self._frozen(donor) or self.time.now >= donor.dies_at:
            return
        queue = donor.queues.pop(asker)
        donor.queues[asker] = queue  # to the end: askers take turns
        chunk = queue.pop(0)
        donor.sending = True
        self.time.after(CHUNK_BYTES / donor.bytes_per_s, lambda: self._sent(donor, self.joiners[asker], chunk))

    def _sent(self, donor: Donor, joiner: Joiner, chunk: int) -> None:
        donor.sending = False
        peer = donor.peer
        if self.time.now >= donor.dies_at:
            joiner.handle(machine.ChunkLost(peer, chunk))
            joiner.handle(machine.DonorLost(peer))
            return
        if self._frozen(donor):
            return
        if self.random.random() < donor.breaks:
            donor.queues[joiner.name] = []
            self.after_latency(lambda: joiner.handle(machine.DonorLost(peer)))
        else:
            donor.served[joiner.name] += CHUNK_BYTES
            matches = self.random.random() >= donor.wrong
            self.after_latency(lambda: joiner.handle(machine.ChunkArrived(peer, chunk, matches)))
        self._send_next(donor)


A, B, C, D = (PeerId(name) for name in "ABCD")


def asks(actions) -> dict[PeerId, tuple[int, ...]]:
    return {action.donor: action.chunks for action in actions if isinstance(action, Ask)}


def test_joiners_begin_at_different_places_with_donors_in_different_order():
    firsts = set()
    for seed in range(8):
        action = Download(1000, CHUNK_BYTES, (), [A, B, C], Random(seed), MOST_OWED).handle(Tick(), 0.0)[0]
        firsts.add((action.donor, action.chunks[0]))
    assert len(firsts) > 4
    assert len({donor for donor, _ in firsts}) > 1


def test_with_no_donor_left_it_fails_and_says_what_happened_with_each():
    plan = Download(10, CHUNK_BYTES, (), [A, B], Random(0), MOST_OWED)
    asked = asks(plan.handle(Tick(), 0.0))
    plan.handle(machine.ChunkArrived(A, asked[A][0], False), 0.1)
    (failed,) = plan.handle(machine.ChunksRefused(B, asked[B], StateRefusal.GONE), 0.2)
    assert isinstance(failed, machine.Failed)
    assert not failed.stalled
    assert "does not match" in failed.detail
    assert "no longer has this state" in failed.detail
    assert plan.handle(Tick(), 99.0) == []


@pytest.mark.parametrize("most_owed", [1, 3, 7, 24])
def test_no_more_is_asked_for_than_there_is_room_for(most_owed: int):
    plan = Download(500, CHUNK_BYTES, (), [A], Random(0), most_owed)
    owed, now, actions = 0, 0.0, plan.handle(Tick(), 0.0)
    order: list[int] = []
    while not any(isinstance(action, machine.Complete) for action in actions):
        asked = asks(actions).get(A, ())
        order += asked
        owed += len(asked)
        assert owed <= max(2, most_owed)
        now += 0.001
        actions = plan.handle(machine.ChunkArrived(A, order.pop(0), True), now)
        owed -= 1


def test_fast_donors_serve_more():
    world = World([Donor(A, 40e6), Donor(B, 10e6)], 3)
    joiner = world.join(400)
    world.run(60.0)
    assert isinstance(joiner.end, machine.Complete)
    served = {peer: donor.served.total() for peer, donor in world.donors.items()}
    assert 2.5 < served[A] / served[B] < 6.0
    assert world.time.now < 1.3 * 400 * CHUNK_BYTES / 50e6


@pytest.mark.parametrize("donors", [3, 4])
@pytest.mark.parametrize("seed", range(20))
def test_four_joiners_at_once_are_spread_over_the_donors(donors: int, seed: int):
    world = World([Donor(peer) for peer in (A, B, C, D)[:donors]], seed)
    joiners = [world.join(128) for _ in range(4)]
    world.run(600.0)
    assert all(isinstance(joiner.end, machine.Complete) for joiner in joiners)
    served = [donor.served.total() for donor in world.donors.values()]
    assert max(served) / (sum(served) / len(served)) <= 1.2
    assert sum(served) <= 1.1 * 4 * 128 * CHUNK_BYTES


FAULTS = st.builds(
    Donor,
    st.just(A),
    bytes_per_s=st.sampled_from([0.3e6, 2e6, 20e6, 200e6]),
    wrong=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    freezes_at=st.sampled_from([float("inf"), 0.0, 0.5, 3.0]),
    thaws_at=st.sampled_from([float("inf"), 8.0]),
    gone_at=st.sampled_from([float("inf"), 0.0, 1.0]),
    dies_at=st.sampled_from([float("inf"), 0.0, 1.0]),
    breaks=st.sampled_from([0.0, 0.1, 0.9]),
    busy=st.sampled_from([0.0, 0.5, 1.0]),
)
FROZEN = [Donor(A, 3e5, freezes_at=at, breaks=b) for at, b in ((9e9, 0), (9e9, 0.1), (0, 0), (0, 0), (9e9, 0))]


@example(FROZEN, True, 1, set(), 626756)  # the last one was never asked
@settings(max_examples=150, deadline=None)
@given(
    faulty=st.lists(FAULTS, max_size=5),
    honest=st.booleans(),
    chunks=st.integers(1, 80),
    here=st.sets(st.integers(0, 79)),
    seed=st.integers(0, 2**32),
)
def test_it_always_ends_and_with_everything_when_one_honest_donor_remains(faulty, honest, chunks, here, seed):
    donors = [*faulty, *([Donor(A, 2e6)] if honest else [])]
    for number, donor in enumerate(donors):
        donor.peer = PeerId(f"donor {number}")
    world = World(donors, seed)
    joiner = world.join(chunks, {chunk for chunk in here if chunk < chunks})
    world.run(3600.0)
    assert joiner.end is not None
    completed = isinstance(joiner.end, machine.Complete)
    assert completed or not honest
    assert not completed or joiner.chunks == set(range(chunks))
    assert all(world.donors[report.donor].wrong > 0.0 for report in joiner.reports)
    for donor in donors:
        assert not donor.served or max(donor.served.values()) <= 3 * chunks * CHUNK_BYTES


@pytest.mark.parametrize("faulty", [{"freezes_at": 0.4}, {"dies_at": 0.4}, {"gone_at": 0.4}, {"wrong": 1.0}])
def test_one_that_fails_in_the_middle_costs_seconds(faulty: dict[str, float]):
    world = World([Donor(A), Donor(B), Donor(C, **faulty)], 1)
    joiner = world.join(200)
    world.run(600.0)
    assert isinstance(joiner.end, machine.Complete)
    assert {report.donor for report in joiner.reports} == ({C} if "wrong" in faulty else set())
    assert world.time.now < 200 * CHUNK_BYTES / 40e6 + 3.0


def version(number: int, tokens: int = 0, digest: bytes = b"") -> AnchorVersion:
    return AnchorVersion(number, 10 * number, tokens or 1000 * number, 0, digest or bytes([number]) * 32)


def test_the_version_of_most_replicas_is_chosen_and_of_two_halves_the_one_with_more_tokens():
    chosen = choose_version({A: version(3), B: version(3), C: version(4)})
    assert chosen.value == version(3)
    assert "2 of 3" in chosen.reason
    announced = {A: version(3, 900), B: version(3, 900), C: version(2, 1000), D: version(2, 1000)}
    assert choose_version(announced).value == version(2, 1000)
    assert choose_version({}).value is None, "without anybody there is no version"


@given(st.builds(version, st.integers(0, 200), tokens=st.integers(0, 2**48)))
def test_one_that_lies_never_prevails_against_two_that_agree(lie: AnchorVersion):
    assert choose_version({A: version(3), B: version(3), C: lie}).value == version(3)


@given(st.builds(version, st.integers(5, 200), tokens=st.integers(0, 2**48)))
def test_one_that_lies_does_not_prevail_while_two_honest_ones_are_a_round_apart(lie: AnchorVersion):
    assert choose_version({A: version(3), B: version(4), C: lie}).value is None
