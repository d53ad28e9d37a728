"""Which module a newcomer takes: the one whose replicas together are slowest for their share of the visits, empty ones first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from swarm.announcement import Announcement
from swarm.vocabulary import ModuleId, PeerId, PeerState, Reasoned


def choose_module(
    own: PeerId, modules: Sequence[ModuleId], announcements: Iterable[Announcement], cost: Sequence[float]
) -> Reasoned[ModuleId]:
    """The module that needs the newcomer most.

    Args:
        own: the newcomer. Among modules that need it equally, its hash decides, so that several newcomers at once spread out.
        modules: those it may take, none of them empty.
        announcements: everybody's; peers that are joining count as if they served already.
        cost: of each stage, the work of one visit (blocks, say).
    """
    replicas: dict[ModuleId, list[Announcement]] = {module: [] for module in modules}
    for announcement in announcements:
        alive = announcement.state in (PeerState.SERVING, PeerState.JOINING)
        if alive and announcement.module in replicas:
            replicas[announcement.module].append(announcement)
    empty = [module for module in modules if not replicas[module]]
    if empty:
        chosen = min(empty, key=lambda module: _draw(own, module))
        return Reasoned(chosen, f"module {chosen} has no peer")

    def need(module: ModuleId) -> float:
        return cost[module.stage] / len(replicas[module])

    chosen = max(modules, key=lambda module: (need(module), _draw(own, module)))
    return Reasoned(chosen, f"module {chosen} has the most work for each of its {len(replicas[chosen])} peers")


def _draw(own: PeerId, module: ModuleId) -> bytes:
    return hashlib.sha256(f"{own}/{module}".encode()).digest()
