"""A plan of one iteration: the routes of every data node's microbatches, in launch order."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.paths.costs import Route
from swarm.vocabulary import PeerId

Plan = Mapping[PeerId, tuple[Route, ...]]


def launched(lanes: tuple[Route, ...], microbatches: int) -> tuple[Route, ...]:
    """The routes of so many microbatches that take the lanes in turn.

    Raises:
        ValueError: there is no lane: a stage has nobody.
    """
    if not lanes:
        raise ValueError("a data node has no lane, because a stage has no peer")
    return tuple(lanes[number % len(lanes)] for number in range(microbatches))
