"""Announcements for the tests of whoever reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId, VersionRange

RUN = RunId("0" * 64)
VERSIONS = VersionRange(3, 3)


def announcement(
    peer: str, stage: int | ModuleId | None = 1, *, speed: float = 1000.0, slots: int = 8, **changes: Any
) -> Announcement:
    module = ModuleId(stage) if isinstance(stage, int) else stage
    figures = (VERSIONS, speed, slots, 8, 0, None, 1, 1, 1e9)
    return replace(Announcement(RUN, PeerId(peer), PeerState.SERVING, module, (), b"", *figures), **changes)
