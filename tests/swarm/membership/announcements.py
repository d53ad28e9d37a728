"""Announcements for the tests of whoever reads them."""

from __future__ import annotations

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId, VersionRange

RUN = RunId("0" * 64)


def announcement(
    peer: str,
    stage: int | ModuleId | None = 1,
    *,
    speed: float = 1000.0,
    state: PeerState = PeerState.SERVING,
    sequence: int = 1,
    expires_at: float = 1e9,
    slots: int = 8,
    free_slots: int = 8,
    run: RunId = RUN,
    versions: VersionRange = VersionRange(3, 3),  # noqa: B008 - immutable
    memory_bytes: int = 0,
) -> Announcement:
    module = ModuleId(stage) if isinstance(stage, int) else stage
    return Announcement(
        run,
        PeerId(peer),
        state,
        module,
        (),
        b"",
        versions,
        speed,
        slots,
        free_slots,
        0,
        None,
        1,
        sequence,
        expires_at,
        memory_bytes=memory_bytes,
    )
