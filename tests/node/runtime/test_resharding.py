"""A data node packs by the router of stage 0's anchor, and by none before it stands on one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from node.averaging.module_rounds import ModuleRounds
from node.experts.block_routers import BlockRouters
from node.experts.route_tables import BIAS, ENTRIES, trained_router
from node.experts.router import BUCKETS, Router
from node.runtime.resharding import AgreedRouter
from swarm.vocabulary.types import AnchorVersion
from tests.node.experts.routed import some_router

FIRST = some_router((1, 2, 1))
NONE_YET = AnchorVersion(0, 0, 0, 0, bytes(32))


@dataclass
class Rounds:
    """Stands where a module's rounds do."""

    version: AnchorVersion = NONE_YET
    tables: dict[str, Tensor] = field(
        default_factory=lambda: {ENTRIES: torch.zeros(2, BUCKETS), BIAS: torch.zeros(2)},
    )

    def agreed_parameters(self, names: tuple[str, ...]) -> tuple[AnchorVersion, dict[str, Tensor]]:
        assert set(names) == {ENTRIES, BIAS}
        return self.version, self.tables


def test_whoever_joins_packs_nothing_before_it_has_the_agreed_tables() -> None:
    rounds, found = Rounds(), list[Router | None]()
    with AgreedRouter(FIRST, cast(ModuleRounds, rounds)) as agreed:
        routers = BlockRouters(FIRST, agreed.newest)
        packing = threading.Thread(target=lambda: found.append(cast(Router, routers.newest().router)))
        packing.start()
        rounds.version = AnchorVersion(3, 30, 300, 0, bytes(32))
        rounds.tables[ENTRIES][0] += 0.05
        assert not found, "it waits"
        agreed.stands()
        packing.join(timeout=20)
    (router,) = found
    assert router is not None
    assert router.to_bytes() == trained_router(FIRST, rounds.tables).to_bytes() != FIRST.to_bytes()


def test_before_the_first_round_it_is_the_manifests() -> None:
    agreed = AgreedRouter(FIRST, cast(ModuleRounds, Rounds()))
    agreed.stands()
    newest = BlockRouters(FIRST, agreed.newest).newest()
    assert (newest.router, newest.saved) == (FIRST, "")


def test_who_waits_is_let_go_at_the_end() -> None:
    with AgreedRouter(FIRST, cast(ModuleRounds, Rounds())) as agreed:
        packing = threading.Thread(target=agreed.newest)
        packing.start()
    packing.join(timeout=20)
    assert not packing.is_alive()
