"""What a node announces of itself follows from its clock and from what it is."""

from __future__ import annotations

import dataclasses

import pytest

from node.network.local_peer import LocalPeer
from protocol.identity.signed_records import MAX_LIFETIME_S, RECORD_LIFETIME_S
from swarm.vocabulary.types import ModuleId, PeerId, RunId
from tests.node.network.small_swarm import ManualClock


def state(clock: ManualClock) -> LocalPeer:
    return LocalPeer(RunId("7" * 64), PeerId("a"), b"", clock)


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


@dataclasses.dataclass
class SetClock(ManualClock):
    """Somebody sets its wall clock."""

    set_by_s: float = 0.0

    def wall(self) -> float:
        return super().wall() + self.set_by_s


@pytest.mark.parametrize("step_s", [-7200.0, -300.0, -30.0, 30.0, 300.0, 7200.0])
def test_a_clock_that_is_set_changes_the_expiry_and_not_the_order(step_s: float) -> None:
    clock = SetClock()
    own = state(clock)
    clock.now += 10.0
    before = own.announcement()
    clock.set_by_s = step_s
    clock.now += 2.0
    after = own.announcement()
    assert after.sequence == before.sequence + 2000
    assert after.expires_at == clock.wall() + RECORD_LIFETIME_S
    assert 0 < after.expires_at - clock.wall() <= MAX_LIFETIME_S


def test_a_machine_that_thinks_it_is_1969_says_something_that_can_be_said() -> None:
    clock = SetClock(set_by_s=-1_000_100.0 - 86_400.0)
    own = state(clock)
    assert own.incarnation == 1
    assert own.announcement().sequence >= 1
