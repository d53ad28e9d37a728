"""Small routers, and the manifests that name them."""

from __future__ import annotations

from typing import Any

import numpy as np

from node.experts.router import BUCKETS, Router, StageTable, router_digest
from protocol.manifest.manifest import Manifest
from tests.node.small_manifest import small_manifest

PREFIX = 8


def some_router(experts: tuple[int, ...] = (1, 2, 3), prefix: int = PREFIX, seed: int = 0) -> Router:
    """Of random tables."""
    random = np.random.default_rng(seed)

    def table(count: int) -> StageTable:
        return StageTable(
            random.integers(-127, 128, (count, BUCKETS)).astype(np.int8),
            random.integers(-200, 201, count).astype(np.int32),
            tuple([1 / count] * count),
        )

    return Router(tuple(table(count) if count > 1 else None for count in experts[1:]), prefix)


def manifest_with(router: Router, **changes: Any) -> Manifest:
    """Of three stages."""
    return small_manifest(
        model__attention="documents",
        stages__experts=router.experts,
        routing={"router": router_digest(router.to_bytes()), "prefix": router.prefix},
        **changes,
    )
