"""What is told of rounds and downloads: not too often, and with who gave what."""

from __future__ import annotations

from node.averaging.module_rounds import PROGRESS_S, RoundReports
from node.observability.events import CatchingUp, CaughtUp, RoundCommitted
from node.observability.status import DownloadStatus, RoundStatus
from swarm.vocabulary.types import ModuleId, PeerId
from tests.kit.events import KeptEvents
from tests.node.checkpoint.small_states import state
from tests.node.network.small_swarm import ManualClock

OWN, A, B = PeerId("own"), PeerId("a"), PeerId("b")
MODULE = ModuleId(1)


def test_a_download_is_told_when_it_begins_and_once_a_second() -> None:
    clock, kept = ManualClock(), KeptEvents()
    reports = RoundReports(OWN, MODULE, clock, kept)
    wanted, known = state(3), state(2)
    with reports.fetching(wanted.version):
        for done in range(5):
            reports.progressed(done, 8)
            clock.now += PROGRESS_S / 2
        assert kept.events == [CatchingUp(OWN, "1.0", 3, done, 8) for done in (0, 2, 4)]
        assert reports.catching_up() == DownloadStatus(3, 4, 8)
        reports.caught_up(wanted, known, (A, B), {B: 7})
    told = kept.events[-1]
    assert isinstance(told, CaughtUp)
    assert (told.donors, told.donor_bytes, told.seconds) == ((A, B), (0, 7), 2.5 * PROGRESS_S)
    assert reports.catching_up() is None
    reports.progressed(8, 8)
    assert kept.events[-1] is told


def test_the_last_round_is_remembered() -> None:
    clock, kept = ManualClock(), KeptEvents()
    reports = RoundReports(OWN, MODULE, clock, kept)
    assert reports.last_round() is None
    event = RoundCommitted(OWN, "1.0", 3, "", (OWN, A, B), (OWN, A), 100, 1, 0.5, 10, 20, "int4")
    reports.committed(event, "slow", 1.0)
    clock.now += 4
    assert reports.last_round() == RoundStatus(3, 4.0, "int4", "slow")
    assert kept.events == [event]
