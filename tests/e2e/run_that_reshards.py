"""A run of two experts whose router prefers the first of them too much: all documents go there, until the tables that
were learnt while it trained even out the shares."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from node.experts.router import BUCKETS, Router, StageTable, buckets, router_digest
from protocol.manifest.manifest import Manifest, RoutingSection
from tests.e2e.small_run import small_run

ALPHABETS: Final = ("abcdef", "uvwxyz")
"""Of the documents of each kind."""
OF_EACH: Final = 32
DOCUMENT_BYTES: Final = 31
"""One less than a microbatch: with the end of document they fill it."""
FIRST: Final = (0,)
"""The route of all documents by the router that the manifest names."""
LEARNT: Final = (1,)
"""The route that only learnt tables have documents for."""


def run_that_reshards(folder: Path) -> tuple[Manifest, Router]:
    """Writes documents of two kinds, and makes a manifest and a router that sends both to the first expert. A data
    node's block has 256 microbatches: no block has fewer."""
    folder.mkdir()
    for kind, letters in enumerate(ALPHABETS):
        for number in range(OF_EACH):
            (folder / f"{kind}{number:02}.txt").write_text(text_of(letters, number))
    router = _biased_router()
    plain = small_run(folder, blocks=(0, 1), inner_steps=4, rows=1, inner_tokens=128, attention="documents")
    changes = {
        "stages": plain.stages.model_copy(update={"experts": 2}),
        "data": plain.data.model_copy(update={"held_out": 0.0}),
        "routing": RoutingSection(router=router_digest(router.to_bytes()), prefix=router.prefix, reshard=1.0),
    }
    return plain.model_copy(update=changes), router


def text_of(letters: str, number: int) -> str:
    return "".join(letters[(number + k * k) % len(letters)] for k in range(DOCUMENT_BYTES))


def _biased_router() -> Router:
    """Its table tells the kinds apart, and its bias outweighs that."""
    entries = np.zeros((2, BUCKETS), dtype=np.int8)
    pairs = [[ord(one), ord(other)] for one in ALPHABETS[1] for other in ALPHABETS[1]]
    entries[1, np.concatenate([buckets(np.array(pair, dtype=np.int64)) for pair in pairs])] = 4
    return Router((StageTable(entries, np.array([60, 0], dtype=np.int32), (0.5, 0.5)),), prefix=8)
