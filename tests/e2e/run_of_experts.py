"""A run of four routes that take turns, and its router: two stages of two experts each, or one of four."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from node.experts.router import BUCKETS, Router, StageTable, buckets, router_digest
from protocol.manifest.manifest import Manifest, RoutingSection
from tests.e2e.small_run import small_run

ALPHABETS: Final = ("abcdef", "ghijkl", "mnopqr", "stuvwx")
OF_EACH: Final = 20
DOCUMENT_BYTES: Final = 31


def run_of_experts(folder: Path, experts: tuple[int, ...] = (2, 2)) -> tuple[Manifest, Router]:
    """Writes equally many documents of each route, equally long, and makes a manifest and a router of them."""
    folder.mkdir()
    for route, letters in _letters(experts).items():
        for number in range(OF_EACH):
            words = "".join(letters[(number + k * k) % len(letters)] for k in range(DOCUMENT_BYTES))
            (folder / f"{''.join(map(str, route))}{number:02}.txt").write_text(words)
    router = _router_by_letters(experts)
    manifest = small_run(folder, blocks=(0, *(1 for _ in experts)), inner_steps=4, attention="documents")
    routing = RoutingSection(router=router_digest(router.to_bytes()), prefix=router.prefix)
    changes = {
        "stages": manifest.stages.model_copy(update={"experts": (1, *experts)}),
        "data": manifest.data.model_copy(update={"held_out": 0.0}),
        "routing": routing,
    }
    return manifest.model_copy(update=changes), router


def _letters(experts: tuple[int, ...]) -> dict[tuple[int, ...], str]:
    """Of the documents of each route."""
    return dict(zip(product(*map(range, experts)), ALPHABETS, strict=True))


def _router_by_letters(experts: tuple[int, ...]) -> Router:
    """The router that sends each document to the route whose letters it has."""
    entries = [np.zeros((count, BUCKETS), dtype=np.int8) for count in experts]
    for route, letters in _letters(experts).items():
        pairs = [[ord(one), ord(other)] for one in letters for other in letters]
        found = np.concatenate([buckets(np.array(pair, dtype=np.int64)) for pair in pairs])
        for stage, expert in enumerate(route):
            entries[stage][expert, found] = 1
    tables = (StageTable(of, np.zeros(len(of), dtype=np.int32), (1 / len(of),) * len(of)) for of in entries)
    return Router(tuple(tables), prefix=16)
