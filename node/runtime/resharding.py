"""The part of a data node that lets its router go on learning: documents are scored, and blocks are packed by the
router as stage 0's last round left it. Neither rounds know of routers nor routers of rounds.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from node.averaging.module_rounds import ModuleRounds
from node.experts.route_tables import BIAS, ENTRIES, trained_router
from node.experts.router import Router
from node.routing.document_scoring import DocumentScoring


class AgreedRouter:
    """The tables of the anchor of stage 0, added to those that the manifest names.

    Within its block the packing thread waits until the node stands where its module stands: whoever joins packs nothing
    by an older router.
    """

    def __init__(self, first: Router, rounds: ModuleRounds) -> None:
        self._first, self._rounds = first, rounds
        self._stands = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stands.set()

    def stands(self) -> None:
        """Notes that the module's agreed state is here."""
        self._stands.set()

    def newest(self) -> Router | None:
        """The router; None before the first round. Waits until it can be known."""
        self._stands.wait()
        version, tables = self._rounds.agreed_parameters((ENTRIES, BIAS))
        return trained_router(self._first, tables) if version.round else None


@dataclass(frozen=True, slots=True, eq=False)
class Resharding:
    """What a data node has more of in a run that re-shards."""

    agreed: AgreedRouter
    scoring: DocumentScoring
