"""The swarm's progress is what its data nodes report, whoever lags, dies or comes late."""

from __future__ import annotations

import math

import pytest

from node.local_swarm.swarm_progress import (
    MAX_CURVE,
    MAX_LAG,
    MAX_NOTES,
    Curve,
    SwarmProgress,
    apply,
    noted,
    peer_exited,
    peer_started,
    summarize,
)
from node.observability.events import BusySeconds as Busy
from node.observability.events import (
    Event,
    InnerStep,
    LastPeer,
    Load,
    MicrobatchCounts,
    NodeStatus,
    NodeSummary,
    Note,
    PeerChange,
    Resumed,
    Step,
    Waiting,
)


class Swarm:
    """Feeds events and keeps the state and what was told outward."""

    def __init__(self, *stages: int, target: int | None = None) -> None:
        self.state = SwarmProgress(stages=max(stages) + 1, target=target)
        self.told: list[Event] = []
        for index, stage in enumerate(stages):
            self.state = peer_started(self.state, index, stage, f"peer-{index}")

    def take(self, index: int, event: Event, now: float = 0.0) -> None:
        progressed = apply(self.state, index, event, now)
        self.state = progressed.state
        self.told += progressed.events

    def step(self, index: int, step: int, loss: float, tokens: int, now: float = 0.0) -> None:
        self.take(index, Step(step, loss, tokens, 10.0, f"peer-{index}"), now)

    def exits(self, index: int, code: int) -> None:
        progressed = peer_exited(self.state, index, code)
        self.state = progressed.state
        self.told += progressed.events

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.told if isinstance(event, Step)]


def test_one_data_node_is_the_swarm() -> None:
    swarm = Swarm(0, 1)
    swarm.step(0, 1, 5.0, 100, now=10.0)
    swarm.step(0, 2, 4.0, 200, now=12.0)
    assert swarm.steps == [Step(1, 5.0, 100, 10.0, "peer-0"), Step(2, 4.0, 200, 50.0, "peer-0")]
    assert (swarm.state.loss_first, swarm.state.loss_last) == (5.0, 4.0)


def test_a_step_is_done_when_every_data_node_has_reported_it_and_its_loss_is_weighted_by_tokens() -> None:
    swarm = Swarm(0, 1, 0)
    swarm.step(0, 1, 5.0, 300)
    assert not swarm.steps
    swarm.step(2, 1, 1.0, 100)
    (step,) = swarm.steps
    assert (step.step, step.loss, step.tokens, step.peer) == (1, pytest.approx(4.0), 400, "swarm")


def test_a_data_node_that_dies_is_not_waited_for_but_its_work_counts() -> None:
    swarm = Swarm(0, 0)
    swarm.step(0, 1, 4.0, 100)
    swarm.step(1, 1, 2.0, 100)
    swarm.step(1, 2, 2.0, 200)
    swarm.exits(0, 137)
    assert [step.step for step in swarm.steps] == [1, 2]
    assert swarm.state.tokens == 300
    assert swarm.state.peers[0].state == "failed"
    swarm.step(1, 3, 1.0, 300)
    assert swarm.steps[-1].step == 3


def test_a_silent_data_node_is_left_behind_after_max_lag_and_taken_up_again() -> None:
    swarm = Swarm(0, 0)
    for step in range(1, MAX_LAG + 3):
        swarm.step(0, step, 3.0, 10 * step)
    assert swarm.steps[-1].step == MAX_LAG + 2
    swarm.step(1, 1, 9.0, 10)
    assert swarm.state.tokens == 10 * (MAX_LAG + 2) + 10
    swarm.step(1, MAX_LAG + 2, 9.0, 20)
    swarm.step(0, MAX_LAG + 3, 3.0, 10 * (MAX_LAG + 3))
    assert swarm.steps[-1].step == MAX_LAG + 2, "now it keeps up, so it is waited for"
    swarm.step(1, MAX_LAG + 3, 1.0, 30)
    assert (swarm.steps[-1].step, swarm.steps[-1].loss) == (MAX_LAG + 3, 2.0)
    assert not swarm.state.pending


def test_a_data_node_that_comes_late_holds_nobody_up() -> None:
    swarm = Swarm(0)
    swarm.step(0, 1, 3.0, 10)
    swarm.state = peer_started(swarm.state, 1, 0, "late")
    swarm.step(0, 2, 3.0, 20)
    assert [step.step for step in swarm.steps] == [1, 2]


def test_who_came_late_goes_on_counting_when_those_before_it_are_gone() -> None:
    swarm = Swarm(0, 0)
    for step in range(1, 31):
        swarm.step(0, step, 5.0, 10 * step)
    swarm.step(1, 1, 4.0, 10)
    assert swarm.state.step == 30
    swarm.exits(0, -9)
    swarm.step(1, 2, 3.0, 20)
    swarm.step(1, 3, 2.0, 30)
    assert [(step.step, step.loss) for step in swarm.steps[-2:]] == [(31, 3.0), (32, 2.0)]
    assert swarm.state.tokens == 330


def test_the_run_is_over_at_its_target_or_without_data_nodes() -> None:
    swarm = Swarm(0, 1, target=1)
    assert not swarm.state.is_over
    swarm.step(0, 1, 3.0, 10)
    assert swarm.state.is_over
    swarm = Swarm(0, 1)
    swarm.exits(1, 1)
    assert not swarm.state.is_over
    swarm.exits(0, 1)
    assert swarm.state.is_over


def test_what_a_peer_says_of_itself_is_kept() -> None:
    swarm = Swarm(0, 1)
    swarm.take(1, NodeStatus("12D3x", "1.0", "serving", "127.0.0.1:1", "link"))
    swarm.take(1, InnerStep("12D3x", "1.0", 7, 4, 1.0, 1e-3))
    swarm.take(1, Load("12D3x", "1.0", 4, 3, math.nan))
    peer = swarm.state.peers[1]
    assert (peer.peer, peer.module, peer.state, peer.inner_steps) == ("12D3x", "1.0", "serving", 7)
    assert (peer.slots, peer.busy_slots, peer.tokens_per_s) == (4, 3, None)
    swarm.take(1, NodeStatus("12D3x", "2.0", "joining", "127.0.0.1:1", "link"))
    assert swarm.state.peers[1].stage == 2, "it has moved"
    swarm.take(1, NodeStatus("12D3x", None, "visiting", "127.0.0.1:1", "link"))
    assert swarm.state.peers[1].stage == 2


def test_several_data_nodes_wait_for_one_module_once() -> None:
    swarm = Swarm(0, 0)
    swarm.take(0, Waiting("2.0", "no peer"))
    swarm.take(1, Waiting("2.0", "no peer"))
    swarm.take(0, Resumed("2.0"))
    swarm.take(1, Resumed("2.0"))
    assert swarm.told == [Waiting("2.0", "no peer"), Resumed("2.0")]
    assert not swarm.state.waiting


def test_other_events_pass_through_and_notes_are_bounded() -> None:
    swarm = Swarm(0)
    change = PeerChange("12D3y", "down", "gone")
    swarm.take(0, change)
    assert swarm.told == [change]
    for number in range(MAX_NOTES + 3):
        swarm.state = noted(swarm.state, Note("info", str(number))).state
    assert [note.message for note in swarm.state.notes] == [str(n) for n in range(3, MAX_NOTES + 3)]


def test_the_curve_stays_bounded_and_spans_the_run() -> None:
    curve = Curve()
    for step in range(1, 5000):
        curve = curve.with_point(step, float(step))
    assert MAX_CURVE / 4 < len(curve.points) < MAX_CURVE
    assert curve.points[0] < 50
    assert curve.points[-1] > 4900
    assert list(curve.points) == sorted(curve.points)
    assert curve.with_point(curve.stride * 1000, math.nan) == curve


def test_the_summary_adds_up() -> None:
    swarm = Swarm(0, 1, 0)
    for step in range(1, 4):
        swarm.step(0, step, 6.0 - step, 100 * step, now=float(step))
        swarm.step(2, step, 6.0 - step, 100 * step, now=float(step))
    for index in (0, 2):
        counts = MicrobatchCounts(10, 9, 1, 0)
        swarm.take(index, NodeSummary(f"peer-{index}", "0.0", 3, 5.0, 3.0, 300, 1.0, counts, 9, Busy()))
        swarm.exits(index, 0)
    swarm.exits(1, 137)
    summary = summarize(swarm.state)
    assert (summary.steps, summary.loss_first, summary.loss_last, summary.tokens) == (3, 5.0, 3.0, 600)
    assert summary.tokens_per_s == pytest.approx(200.0)
    assert summary.microbatches == MicrobatchCounts(20, 18, 2, 0)
    assert [(peer.peer, peer.accumulated, peer.exit_code) for peer in summary.peers] == [
        ("peer-0", 9, 0),
        ("peer-1", 0, 137),
        ("peer-2", 9, 0),
    ]


def test_a_swarm_that_never_started_has_a_summary_too() -> None:
    summary = summarize(SwarmProgress(stages=2))
    assert (summary.steps, summary.loss_first, summary.tokens_per_s, summary.peers) == (0, None, 0.0, ())


def test_what_is_lost_with_its_last_peers_is_counted_once_a_module() -> None:
    swarm = Swarm(0, 1, 1)
    swarm.take(0, LastPeer("peer-0", "0.0", "saved"))
    swarm.take(1, LastPeer("peer-1", "1.0", None))
    swarm.take(2, LastPeer("peer-2", "1.0", None))
    assert swarm.state.lost == {"1.0"}
    assert not swarm.state.notes
