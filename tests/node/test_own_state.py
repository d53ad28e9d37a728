"""What a node announces of itself follows from its clock and from what it is."""

from __future__ import annotations

from node.own_state import OwnState
from swarm.vocabulary import ModuleId, PeerId, RunId
from tests.node.small_swarm import ManualClock


def state(clock: ManualClock) -> OwnState:
    return OwnState(RunId("7" * 64), PeerId("a"), b"", clock)


def test_every_announcement_of_one_life_names_the_same_incarnation() -> None:
    clock = ManualClock()
    own = state(clock)
    began = int(clock.wall() * 1000)
    for _ in range(3):
        clock.now += 10.0
        own.take(ModuleId(1))
        assert own.announcement().incarnation == began


def test_the_next_life_has_another_incarnation() -> None:
    clock = ManualClock()
    first = state(clock)
    clock.now += 0.01
    assert first.announcement().incarnation < state(clock).announcement().incarnation


def test_the_sequence_rises_though_the_clock_stands() -> None:
    own = state(ManualClock())
    assert own.announcement().sequence < own.announcement().sequence
