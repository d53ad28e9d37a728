"""A run of two stages with two experts each, whose four routes take turns, and its router."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from node.experts.router import BUCKETS, Router, StageTable, buckets, router_digest
from protocol.manifest.manifest import Manifest, RoutingSection
from tests.e2e.small_run import small_run

ALPHABETS: Final = {(0, 0): "abcdef", (0, 1): "ghijkl", (1, 0): "mnopqr", (1, 1): "stuvwx"}
"""Of the documents of each route."""
OF_EACH: Final = 20
DOCUMENT_BYTES: Final = 31
"""One less than a row: with the end of document they fill it."""


def run_of_experts(folder: Path, reshard: float = 0.0) -> tuple[Manifest, Router]:
    """Writes equally many documents of each route, equally long, and makes a manifest and a router of them."""
    folder.mkdir()
    for (first, second), letters in ALPHABETS.items():
        for number in range(OF_EACH):
            words = "".join(letters[(number + k * k) % len(letters)] for k in range(DOCUMENT_BYTES))
            (folder / f"{first}{second}{number:02}.txt").write_text(words)
    router = router_by_letters()
    manifest = small_run(folder, blocks=(0, 1, 1), inner_steps=4, attention="documents")
    routing = RoutingSection(router=router_digest(router.to_bytes()), prefix=router.prefix, reshard=reshard)
    changes = {
        "stages": manifest.stages.model_copy(update={"experts": 2}),
        "data": manifest.data.model_copy(update={"held_out": 0.0}),
        "routing": routing,
    }
    return manifest.model_copy(update=changes), router


def router_by_letters() -> Router:
    """The router that sends each document to the route whose letters it has."""
    entries = np.zeros((2, 2, BUCKETS), dtype=np.int8)
    for route, letters in ALPHABETS.items():
        pairs = [[ord(one), ord(other)] for one in letters for other in letters]
        found = np.concatenate([buckets(np.array(pair, dtype=np.int64)) for pair in pairs])
        for stage, expert in enumerate(route):
            entries[stage, expert, found] = 1
    none, alike = np.zeros(2, dtype=np.int32), (0.5, 0.5)
    return Router(tuple(StageTable(entries[stage], none, alike) for stage in range(2)), prefix=16)
