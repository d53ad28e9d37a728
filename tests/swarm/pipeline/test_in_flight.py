"""The account of microbatches in flight, and the window in virtual time."""

import math
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.world.world import VirtualTime
from swarm.pipeline.in_flight import (
    Counts,
    InFlight,
    InFlightRules,
    InFlightTable,
    StepDone,
    Stragglers,
    Window,
    room_at_hops,
)
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId, Reasoned

OWN = PeerId("data")
PLANNED = Path(OWN, (Hop(ModuleId(1), PeerId("a")),))
TAKEN = PLANNED.with_peer(0, PeerId("b"))


def in_flight(per_step: int = 3, staleness: int = 0, window: int = 100, steps: int | None = None) -> InFlightTable:
    return InFlightTable(OWN, InFlightRules(per_step, staleness, window, steps))


def start_all(account: InFlightTable) -> list[InFlight]:
    return [account.start(PLANNED, now=0.0) for _ in iter(lambda: account.may_start().value, False)]


def complete(account: InFlightTable, entry: InFlight, loss: float = 1.0) -> StepDone | None:
    account.returned(entry.microbatch, TAKEN, loss)
    return account.complete(entry.microbatch)


def test_the_staleness_grows_by_one_after_so_many_steps() -> None:
    account = InFlightTable(OWN, InFlightRules(2, 3, 100, staleness_steps=5), steps_before=4)
    for done in range(4, 20):
        start_all(account)
        assert len(account.entries) == 2 * (1 + min(3, done // 5))
        assert [complete(account, entry) is not None for entry in account.entries[:2]] == [False, True]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_later_step_waits_until_the_current_one_is_complete(staleness: int) -> None:
    account = in_flight(staleness=staleness)
    begun = start_all(account)
    assert len(begun) == 3 * (1 + staleness)
    assert account.may_start().reason == "step 1 is not complete"
    for entry in begun[:2]:
        complete(account, entry)
        assert not account.may_start().value
    complete(account, begun[2])
    assert len(start_all(account)) == 3


def test_the_window_bounds_what_is_under_way() -> None:
    account = in_flight(per_step=10, window=4)
    begun = start_all(account)
    assert len(begun) == 4
    assert account.may_start().reason == "the window of 4 is full"
    complete(account, begun[0])
    assert len(start_all(account)) == 1


def test_no_more_starts_than_the_steps_asked_for_need() -> None:
    account = in_flight(staleness=5, steps=2)
    begun = start_all(account)
    assert len(begun) == 6
    for entry in begun[:-1]:
        complete(account, entry)
    assert not account.finished
    account.abandon(begun[-1].microbatch)
    assert not account.finished, "a step is one short"
    (last,) = start_all(account)
    complete(account, last)
    assert account.finished
    assert not account.may_start().value


def test_a_step_reports_the_mean_loss_of_its_own_microbatches() -> None:
    account = in_flight(staleness=1)
    begun = start_all(account)
    done = [complete(account, entry, loss) for entry, loss in zip(begun, (1.0, 2.0, 6.0, 4.0, 4.0, 1.0), strict=True)]
    assert done == [None, None, StepDone(1, 3.0, 3), None, None, StepDone(2, 3.0, 3)]


def test_a_second_completion_is_a_defect_and_one_without_a_loss_is_abandoned() -> None:
    account = in_flight()
    entry = start_all(account)[0]
    complete(account, entry)
    assert account.complete(entry.microbatch) is None
    assert account.counts == Counts(started=3, completed=1, duplicated=1)
    account = in_flight(per_step=1)
    (entry,) = start_all(account)
    assert account.complete(entry.microbatch) is None
    assert account.counts == Counts(started=1, abandoned=1)
    assert account.steps_done == 0
    assert account.may_start().value


def test_a_second_life_takes_its_numbers_from_where_it_is_told() -> None:
    account = InFlightTable(OWN, InFlightRules(1, 0, 1), first_number=5000)
    assert account.next_number == 5000
    assert account.start(PLANNED, 0.0).microbatch.number == 5000
    assert account.next_number == 5001


@settings(deadline=None)
@given(
    rules=st.builds(
        InFlightRules, st.integers(1, 4), st.integers(0, 2), st.integers(1, 8), st.none() | st.integers(1, 3)
    ),
    draws=st.lists(
        st.tuples(st.sampled_from(["start", "return", "complete", "abandon"]), st.integers(0, 7)), max_size=80
    ),
)
def test_the_account_always_adds_up(rules: InFlightRules, draws: list[tuple[str, int]]) -> None:
    account = InFlightTable(OWN, rules)
    steps = 0
    for what, which in draws:
        flying = account.entries
        entry = flying[which % len(flying)] if flying else None
        if what == "start" and account.may_start().value:
            account.start(PLANNED, 0.0)
        elif entry is not None and what == "return":
            account.returned(entry.microbatch, TAKEN, 1.0)
        elif entry is not None and what == "complete":
            steps += account.complete(entry.microbatch) is not None
        elif entry is not None and what == "abandon":
            account.abandon(entry.microbatch)
        counts, flying = account.counts, account.entries
        assert counts.started == counts.completed + counts.abandoned + len(flying)
        assert counts.duplicated == 0
        assert len(flying) <= rules.window
        assert account.steps_done == steps
        assert counts.completed + len(flying) <= (account.steps_done + 1 + rules.staleness) * rules.per_step


def test_one_that_is_far_slower_than_all_others_is_launched_again_and_another_once_one_completes_or_later() -> None:
    account, stragglers = in_flight(per_step=40), Stragglers()
    stuck, also_stuck, *others = [account.start(PLANNED, 0.0) for _ in range(8)]
    for entry in others[:3]:
        stragglers.completed(entry, 5.0)
    assert stragglers.find(account.entries, 99.0) is None, "three are too few to compare"
    stragglers.completed(others[3], 8.0)
    assert stragglers.find(account.entries, 24.0) is None
    assert stragglers.find(account.entries, 24.1) == stuck
    account.abandon(stuck.microbatch)
    assert stragglers.find(account.entries, 48.0) is None, "perhaps everything is slow now"
    assert stragglers.find(account.entries, 49.0) == also_stuck
    stragglers.completed(account.start(PLANNED, 49.0), 50.0)
    assert stragglers.find(account.entries, 50.0) == also_stuck
    stragglers.completed(others[4], 50.0)
    assert stragglers.find(account.entries, 99.0) is None, "all are slow now"
    assert stragglers.find((), 99.0) is None
    quick = Stragglers()
    for entry in others[:4]:
        quick.completed(entry, 0.01)
    assert (quick.find(account.entries, 1.0), quick.find(account.entries, 1.1)) == (None, also_stuck), "a moment"


START, LEAST = 6, 4
SLOTS = Reasoned(64, "so many slots")


@dataclass
class World:
    """Microbatches pass four peers, out and back; each peer computes one after another in the order they come."""

    link_s: float
    forward_s: tuple[float, ...]
    jitter: float = 0.0  # Standard deviation of the logarithm of every delay and computation
    seed: int = 1
    time: VirtualTime = field(default_factory=VirtualTime)
    flying: int = 0
    completed: int = 0
    free_at: dict[int, float] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def noisy(self, seconds: float) -> float:
        return seconds * self._random.lognormvariate(0.0, self.jitter) if self.jitter else seconds

    @property
    def product(self) -> float:
        stations = [3 * seconds for seconds in self.forward_s]
        return (sum(stations) + 2 * len(stations) * self.link_s) / max(stations)

    @property
    def most_pace(self) -> float:
        return math.exp(-(self.jitter**2) / 2) / max(3 * seconds for seconds in self.forward_s)

    def launch(self, window: Window) -> None:
        while self.flying < window.value.value:
            self.flying += 1
            started = self.time.now
            there = list(range(len(self.forward_s)))
            self._step(window, started, [*((at, 1.0) for at in there), *((at, 2.0) for at in reversed(there))])

    def _step(self, window: Window, started: float, way: list[tuple[int, float]]) -> None:
        if not way:
            window.completed(started, self.time.now, self.flying)
            self.flying -= 1
            self.completed += 1
            self.sizes.append(window.value.value)
            self.launch(window)
            return

        def arrived() -> None:
            (peer, factor), rest = way[0], way[1:]
            begun = max(self.time.now, self.free_at.get(peer, 0.0))
            self.free_at[peer] = begun + self.noisy(factor * self.forward_s[peer])
            self.time.after(self.free_at[peer] - self.time.now, lambda: self._step(window, started, rest))

        self.time.after(self.noisy(self.link_s), arrived)

    def pace(self, window: Window, seconds: float) -> float:
        """Microbatches a second from now on."""
        before = self.completed
        self.launch(window)
        self.time.run_until(self.time.now + seconds)
        return (self.completed - before) / seconds


def later(world: World, window: Window, after_s: float) -> tuple[float, int]:
    """The pace and the usual window of the minute that begins then."""
    world.pace(window, after_s)
    world.sizes.clear()
    return world.pace(window, 60.0), sorted(world.sizes)[len(world.sizes) // 2]


LINKS = st.floats(0.0, 0.2)
PEERS = st.lists(st.floats(0.03, 0.08), min_size=3, max_size=5).map(tuple)


@settings(deadline=None, max_examples=12)
@given(LINKS, PEERS, st.floats(0.0, 0.4), st.integers(0, 1000), st.sampled_from([START, 40]))
def test_it_finds_the_pace_without_a_heap_that_waits(
    link_s: float, forward_s: tuple[float, ...], jitter: float, seed: int, start: int
) -> None:
    world, window = World(link_s, forward_s, jitter, seed), Window(start, LEAST, Reasoned(120, "enough"))
    pace, usual = later(world, window, 60.0 if start == START else 900.0)
    assert pace >= 0.8 * world.most_pace
    assert usual <= max(START, 4 * world.product + 4), "waiting is not what it is for"


@settings(deadline=None, max_examples=10)
@given(LINKS, PEERS, st.floats(0.0, 0.5), st.integers(1, 40), st.integers(1, 10), st.integers(0, 1000))
def test_it_never_leaves_its_bounds(
    link_s: float, forward_s: tuple[float, ...], jitter: float, most: int, least: int, seed: int
) -> None:
    world, window = World(link_s, forward_s, jitter, seed), Window(START, least, Reasoned(most, "no more"))
    world.pace(window, 60.0)
    assert all(min(least, most) <= size <= most for size in world.sizes)
    assert world.flying <= most
    window.bound(Reasoned(2, "fewer slots now"))
    assert window.value.value <= 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("before", "after"), [(0.01, 0.1), (0.02, 0.2), (0.15, 0.01)])
def test_it_follows_links_that_change_on_the_way(before: float, after: float, seed: int) -> None:
    world = World(before, (0.04, 0.04, 0.05, 0.04), 0.2, seed)
    window = Window(START, LEAST, Reasoned(120, "enough"))
    world.pace(window, 60.0)
    world.link_s = after
    pace, usual = later(world, window, 150.0)
    assert pace >= 0.88 * world.most_pace
    assert usual <= 3.2 * world.product + 4


@pytest.mark.parametrize("seed", range(2))
def test_it_follows_a_peer_that_becomes_slower(seed: int) -> None:
    world = World(0.05, (0.04, 0.04, 0.04, 0.04), 0.2, seed)
    window = Window(START, LEAST, Reasoned(120, "enough"))
    world.pace(window, 60.0)
    before = window.value.value
    world.forward_s = (0.04, 0.16, 0.04, 0.04)
    pace, usual = later(world, window, 60.0)
    assert usual < 0.6 * before
    assert pace >= 0.88 * world.most_pace


def test_what_is_held_back_elsewhere_does_not_let_it_grow() -> None:
    window = Window(START, LEAST, SLOTS)
    for number in range(400):
        window.completed(number * 0.1, number * 0.1 + 0.3, flying=2)
    assert window.value.value <= START


def test_one_bad_epoch_changes_nothing() -> None:
    """A round of averaging stops the peers for a moment."""
    window = Window(20, LEAST, SLOTS)
    now = 0.0
    for trip_s in [*[0.5] * 200, *[2.0] * 20, *[0.5] * 20]:
        now += 0.05
        window.completed(now - trip_s, now, flying=window.value.value)
        smallest = window.value.value if trip_s > 1 else 64
        assert smallest >= 20


def test_it_says_why() -> None:
    window = Window(START, LEAST, SLOTS)
    assert window.value == Reasoned(6, "not measured yet")
    world = World(0.1, (0.02, 0.02, 0.02))
    world.pace(window, 8.0)
    assert "without queueing" in window.value.reason
    window.bound(Reasoned(8, "a staleness of 1 allows so many"))
    world.pace(window, 20.0)
    assert window.value.value == 8
    assert window.value.reason.startswith("a staleness of 1 allows so many; ")


@pytest.mark.parametrize(
    ("slots", "visited", "data_nodes", "room"),
    [([[16], [16, 16]], 1.0, 1, 12), ([[16], [16, 16]], 1.0, 4, 4), ([[16, 16], [4]], 0.5, 1, 6), ([[8]], 1.0, 2, 4)],
)
def test_slots_at_hops_bound_it(slots: list[list[int]], visited: float, data_nodes: int, room: int) -> None:
    assert room_at_hops(slots, visited, data_nodes).value == room
    assert room_at_hops([[], [0]], 1.0, 1) is None
