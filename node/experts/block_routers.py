"""The routers by which a data node packs its blocks of text: the newest for one that begins, and the one that a block
was begun with for whoever goes on within it.

A run that re-shards has another router after each round of stage 0. A block's microbatches follow from its router, so
a place within a block says which that was; a few kilobytes in a checkpoint.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass

from node.experts.router import DocumentRouter, Router, parse_router
from swarm.vocabulary.errors import CorruptSnapshot


def _none() -> Router | None:
    return None


@dataclass(frozen=True, slots=True, eq=False)
class BlockRouter:
    """The router of one block."""

    router: DocumentRouter | None
    """None in a run without experts."""
    saved: str = ""
    """Its bytes in base64; empty for the one that the run began with."""


class BlockRouters:
    """The routers of a run as one of its data nodes needs them. Any thread may use it.

    Args:
        first: that which the run began with; None in a run without experts.
        trained: the newest that has been learnt, None as long as it is the first.
    """

    def __init__(self, first: DocumentRouter | None, trained: Callable[[], Router | None] = _none) -> None:
        self._first, self._trained = first, trained

    def newest(self) -> BlockRouter:
        """That of a block that begins now."""
        trained = self._trained()
        if trained is None:
            return BlockRouter(self._first)
        return BlockRouter(trained, base64.b64encode(trained.to_bytes()).decode("ascii"))

    def saved(self, text: str) -> BlockRouter:
        """That of a block which was begun before.

        Args:
            text: `BlockRouter.saved`.

        Raises:
            CorruptSnapshot: it is none.
            StateError: as `node.experts.router.parse_router`.
        """
        if not text:
            return BlockRouter(self._first)
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise CorruptSnapshot("the saved place in the text names a router that cannot be read") from None
        return BlockRouter(parse_router(data), text)
