"""Announcements for the directory's tests."""

from __future__ import annotations

import dataclasses
import functools
import time

from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerState, RunId, VersionRange

RUN = RunId("5c" * 32)
OTHER_RUN = RunId("6d" * 32)
MODULE = ModuleId(1)


@functools.cache
def certificate_of(identity: Identity, run: RunId) -> bytes:
    return make_credentials(identity, run).certificate_der


def announced(identity: Identity, *, run: RunId = RUN, **changes: object) -> Announcement:
    now = time.time()
    announcement = Announcement(
        run=run,
        peer=identity.peer,
        state=PeerState.SERVING,
        module=MODULE,
        addresses=("127.0.0.1:4000",),
        certificate=certificate_of(identity, run),
        versions=VersionRange(2, 2),
        tokens_per_second=10.0,
        slots=2,
        free_slots=1,
        steps=3,
        anchor=None,
        incarnation=int(now * 1000),
        sequence=int(now * 1000),
        expires_at=now + 60,
    )
    return dataclasses.replace(announcement, **changes)
