"""Announcements for the tests of whoever reads them."""

from typing import Any

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId, VersionRange

RUN = RunId("0" * 64)
USUAL = {"run": RUN, "state": PeerState.SERVING, "addresses": (), "certificate": b"", "versions": VersionRange(5, 5)}
USUAL |= {"slots": 8, "free_slots": 8, "steps": 0, "anchor": None, "incarnation": 1, "sequence": 1, "expires_at": 1e9}


def announcement(peer: str, stage: int | ModuleId | None = 1, *, speed: float = 1000.0, **changes: Any) -> Announcement:
    module = ModuleId(stage) if isinstance(stage, int) else stage
    return Announcement(peer=PeerId(peer), module=module, tokens_per_second=speed, **{**USUAL, **changes})
