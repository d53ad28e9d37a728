"""The window in virtual time, over a swarm of peers that compute one microbatch after another and links that delay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.pipeline.in_flight import Window, least_of, room_at_hops
from swarm.simulation.virtual_network import VirtualTime
from swarm.vocabulary.types import Reasoned

START, LEAST = 6, 4
SLOTS = Reasoned(64, "so many slots")


@dataclass
class World:
    """Microbatches pass four peers, out and back; each peer computes one after another in the order they come."""

    link_s: float
    forward_s: tuple[float, ...]
    jitter: float = 0.0
    """Standard deviation of the logarithm of every delay and computation."""
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
        """The bandwidth-delay product of the quiet swarm."""
        stations = [3 * seconds for seconds in self.forward_s]
        return (sum(stations) + 2 * len(stations) * self.link_s) / max(stations)

    @property
    def most_pace(self) -> float:
        """What the slowest peer computes in a second."""
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


LINKS = st.floats(0.0, 0.2)
PEERS = st.lists(st.floats(0.03, 0.08), min_size=3, max_size=5).map(tuple)


@settings(deadline=None, max_examples=12)
@given(LINKS, PEERS, st.floats(0.0, 0.4), st.integers(0, 1000), st.sampled_from([START, 40]))
def test_it_finds_the_pace_without_a_heap_that_waits(
    link_s: float, forward_s: tuple[float, ...], jitter: float, seed: int, start: int
) -> None:
    """From below as from above, whatever the noise."""
    world, window = World(link_s, forward_s, jitter, seed), Window(start, LEAST, Reasoned(120, "enough"))
    world.pace(window, 60.0 if start == START else 900.0)
    world.sizes.clear()
    pace = world.pace(window, 60.0)
    assert pace >= 0.8 * world.most_pace
    usual = sorted(world.sizes)[len(world.sizes) // 2]
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
    world.pace(window, 150.0)
    world.sizes.clear()
    pace = world.pace(window, 60.0)
    assert pace >= 0.88 * world.most_pace
    assert sorted(world.sizes)[len(world.sizes) // 2] <= 3.2 * world.product + 4


@pytest.mark.parametrize("seed", range(2))
def test_it_follows_a_peer_that_becomes_slower(seed: int) -> None:
    world = World(0.05, (0.04, 0.04, 0.04, 0.04), 0.2, seed)
    window = Window(START, LEAST, Reasoned(120, "enough"))
    world.pace(window, 60.0)
    before = window.value.value
    world.forward_s = (0.04, 0.16, 0.04, 0.04)
    world.pace(window, 60.0)
    world.sizes.clear()
    pace = world.pace(window, 60.0)
    assert sorted(world.sizes)[len(world.sizes) // 2] < 0.6 * before
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
    assert window.value == Reasoned(6, "nothing was measured yet")
    world = World(0.1, (0.02, 0.02, 0.02))
    world.pace(window, 8.0)
    assert "without waiting" in window.value.reason
    window.bound(Reasoned(8, "a staleness of 1 allows so many"))
    world.pace(window, 20.0)
    assert window.value.value == 8
    assert window.value.reason.startswith("a staleness of 1 allows so many; ")


@pytest.mark.parametrize(
    ("slots", "visited", "data_nodes", "room"),
    [([[16], [16, 16]], 1.0, 1, 12), ([[16], [16, 16]], 1.0, 4, 4), ([[16, 16], [4]], 0.5, 1, 6), ([[8]], 1.0, 2, 4)],
)
def test_slots_at_hops_bound_it(slots: list[list[int]], visited: float, data_nodes: int, room: int) -> None:
    found = room_at_hops(slots, visited, data_nodes)
    assert found is not None
    assert found.value == room


def test_where_nobody_has_said_there_is_no_bound() -> None:
    assert room_at_hops([[], [0]], 1.0, 1) is None


def test_the_smallest_bound_holds() -> None:
    assert least_of([Reasoned(3, "a"), Reasoned(2, "b"), Reasoned(9, "c")]) == Reasoned(2, "b")
