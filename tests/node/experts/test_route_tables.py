"""What is learnt is added to the manifest's tables as integers, bounded, and alike wherever it is done."""

from __future__ import annotations

import numpy as np
import torch

from node.experts.route_tables import (
    BIAS,
    ENTRIES,
    LIMIT,
    UNIT,
    bias_unit,
    route_tables,
    table_shapes,
    trained_router,
    without_tables,
)
from node.experts.router import MAX_BIAS, parse_router
from node.model.initialization import parameters_of
from protocol.manifest.manifest import Manifest, RoutingSection
from tests.node.experts.routed import manifest_with, some_router

ROUTER = some_router((1, 1, 3))
SEVERAL = 3


def resharding(manifest: Manifest, share: float = 0.5) -> Manifest:
    assert manifest.routing is not None
    routing = RoutingSection(router=manifest.routing.router, prefix=manifest.routing.prefix, reshard=share)
    return manifest.model_copy(update={"routing": routing})


def test_only_a_run_that_reshards_has_tables_and_they_begin_at_nothing() -> None:
    assert route_tables(manifest_with(ROUTER)) == ()
    assert table_shapes(manifest_with(ROUTER)) == {}
    manifest = resharding(manifest_with(ROUTER))
    (tables,) = route_tables(manifest)
    parameters = parameters_of(tables)
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == table_shapes(manifest)
    assert trained_router(ROUTER, parameters).to_bytes() == ROUTER.to_bytes()
    assert without_tables({"model.norm.weight": torch.ones(1), **parameters}).keys() == {"model.norm.weight"}


def test_what_is_learnt_moves_integers_and_stays_within_their_range() -> None:
    entries = torch.zeros(SEVERAL, ROUTER.tables[1].entries.shape[1])  # type: ignore[union-attr]
    entries[0, 0], entries[1, 0] = 3.4 / float(UNIT), 99.0
    entries[2, 0] = float("nan")
    bias = torch.tensor([-7.0 / float(bias_unit(ROUTER.prefix)), 99.0, float("-inf")])
    found = trained_router(ROUTER, {ENTRIES: entries, BIAS: bias})
    first, after = ROUTER.tables[1], found.tables[1]
    assert first is not None
    assert after is not None
    assert after.entries[0, 0] == np.clip(int(first.entries[0, 0]) + 3, -127, 127)
    assert after.entries[1, 0] == min(127, int(first.entries[1, 0]) + int(LIMIT * UNIT))
    assert after.entries[2, 0] == first.entries[2, 0]
    assert after.entries[:, 1:].tolist() == first.entries[:, 1:].tolist()
    assert after.bias[0] == first.bias[0] - 7
    assert first.bias[1] < after.bias[1] <= MAX_BIAS
    assert after.bias[2] == first.bias[2]
    assert parse_router(found.to_bytes()).to_bytes() == found.to_bytes()


def test_adding_keeps_to_the_limit() -> None:
    (tables,) = route_tables(resharding(manifest_with(ROUTER)))
    entries, bias = tables.values()
    for _ in range(3):
        tables.add(entries + np.float32(0.3), bias - np.float32(0.01))
    entries, bias = tables.values()
    assert np.unique(entries).tolist() == [LIMIT]
    assert np.allclose(bias, -0.03)
