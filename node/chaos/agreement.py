"""Whether the replicas of each module stand together, while they train. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """An anchor that a replica has taken over."""

    module: str
    round: int
    digest: str


def stand_together(replicas: Iterable[Sequence[Held]]) -> bool:
    """Whether all replicas of each module hold one anchor, or the one before it, because a round may be applied just now. `skipstone check` wants it so
    at the end.

    Args:
        replicas: of each its last anchors, the latest last; at least one.
    """
    by_module: defaultdict[str, list[Sequence[Held]]] = defaultdict(list)
    for anchors in replicas:
        by_module[anchors[-1].module].append(anchors)
    return all(_are_together(histories) for histories in by_module.values())


def _are_together(histories: list[Sequence[Held]]) -> bool:
    newest = max(anchors[-1].round for anchors in histories)
    ahead = [anchors for anchors in histories if anchors[-1].round == newest]
    behind = {anchors[-1] for anchors in histories if anchors[-1].round != newest}
    before = {held for anchors in ahead for held in anchors[:-1] if held.round == newest - 1}
    return len({anchors[-1] for anchors in ahead}) == 1 and behind <= before
