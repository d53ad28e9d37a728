"""The choice of peers to which one that cannot be dialled keeps links, so that it can be called through them.

It stands alone because it is the only decision about links; the others are about modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState

_STAY: tuple[PeerState, ...] = (PeerState.JOINING, PeerState.SERVING)


def by_worth(
    own: PeerId, module: ModuleId | None, announcements: Iterable[Announcement], kept: Collection[PeerId]
) -> list[PeerId]:
    """The peers that can be dialled and mean to stay, the best to hold on to first.

    Peers that links are needed to anyway come first: of the stages before and after ours (the last is before the first:
    a path ends where it began), and replicas of our own module. Among equals those that we hold on to already, so that
    nothing is given up without need; then a hash decides, so that many such peers spread over those they can be called
    through.

    Args:
        module: that `own` hosts, if any.
        kept: peers that `own` holds on to now.
    """
    fit = [a for a in announcements if a.addresses and a.module is not None and a.state in _STAY and a.peer != own]
    stages = 1 + max((a.module.stage for a in fit if a.module is not None), default=0)
    if module is not None:
        stages = max(stages, module.stage + 1)

    def worth(announcement: Announcement) -> tuple[bool, bool, bytes]:
        near = announcement.module is not None and _is_near(module, announcement.module, stages)
        return not near, announcement.peer not in kept, _draw(own, announcement.peer)

    return [announcement.peer for announcement in sorted(fit, key=worth)]


def relays_first(order: Sequence[PeerId], relaying: Collection[PeerId], wanted: int = 2) -> list[PeerId]:
    """The peers reordered: the first `wanted` of those that serve tunnels before all others, because without one of
    them, peers that cannot be dialled either have no way to us.
    """
    chosen = [peer for peer in order if peer in relaying][:wanted]
    return chosen + [peer for peer in order if peer not in chosen]


def _is_near(own: ModuleId | None, other: ModuleId, stages: int) -> bool:
    if own is None:
        return False
    return other == own or (other.stage - own.stage) % stages in (1, stages - 1)


def _draw(own: PeerId, other: PeerId) -> bytes:
    return hashlib.sha256(f"{own} {other}".encode()).digest()
