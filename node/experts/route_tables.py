"""The router's tables as parameters of stage 0, in a run whose router goes on learning: what is added to the tables
that the manifest names.

They lie beside embedding and head in the vector that stage 0's rounds average, so replicas compare, clip and agree on
them as on everything else, and whoever joins gets them with the anchor. Only an anchor's tables route documents, as
integers: one multiplication and one rounding to float32, so every machine has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from node.experts.router import BUCKETS, MAX_BIAS, MAX_ENTRY, Router, StageTable
from protocol.manifest.manifest import Manifest

Values = npt.NDArray[np.float32]

ENTRIES: Final = "routing.entries"
BIAS: Final = "routing.bias"
UNIT: Final = np.float32(512)
"""Of the router's integers for each 1.0 here: so what is learnt is no larger than what other parameters change by, and
has no more than its part in the norm by which contributions are judged."""
LIMIT: Final = np.float32(0.5)
"""More is not added to an entry, whatever was averaged: with it any is at the other end of its range."""


def table_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shapes of the tables by their names in stage 0; none in a run whose router stays as it is."""
    if not manifest.reshards:
        return {}
    several = sum(count for count in manifest.stages.experts_of_each if count > 1)
    return {ENTRIES: (several, BUCKETS), BIAS: (several,)}


class RouteTables(nn.Module):
    """What is added to the tables of the stages with several experts, one after the other: 0 to begin with.

    A bias is in units of an entry for each token of the prefix.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        shapes = table_shapes(manifest)
        self.routing = nn.ParameterDict(
            {
                "entries": nn.Parameter(torch.zeros(shapes[ENTRIES]), requires_grad=False),
                "bias": nn.Parameter(torch.zeros(shapes[BIAS]), requires_grad=False),
            }
        )

    def values(self) -> tuple[Values, Values]:
        """A copy on the CPU: entries and bias."""
        entries, bias = (self.routing[name].detach().to("cpu", copy=True).numpy() for name in ("entries", "bias"))
        return entries, bias

    @torch.no_grad()
    def add(self, entries: Values, bias: Values) -> None:
        """Adds what was learnt to them, wherever they are by now."""
        for name, change in (("entries", entries), ("bias", bias)):
            parameter = self.routing[name]
            parameter.add_(torch.from_numpy(change).to(parameter.device)).clamp_(-float(LIMIT), float(LIMIT))


def route_tables(manifest: Manifest) -> tuple[RouteTables, ...]:
    """The tables as parts of stage 0's module: one, or none in a run whose router stays as it is."""
    return (RouteTables(manifest),) if manifest.reshards else ()


def without_tables(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the model alone."""
    return {name: tensor for name, tensor in parameters.items() if name not in (ENTRIES, BIAS)}


def trained_router(first: Router, parameters: Mapping[str, Tensor]) -> Router:
    """The router with what stage 0 has learnt.

    Args:
        first: that which the manifest names.
        parameters: of an anchor of stage 0, the tables among them; float32.
    """
    entries = _integers(parameters[ENTRIES], UNIT)
    bias = _integers(parameters[BIAS], bias_unit(first.prefix))
    tables: list[StageTable | None] = []
    at = 0
    for table in first.tables:
        if table is None:
            tables.append(None)
            continue
        end = at + len(table.bias)
        moved = np.clip(table.entries + entries[at:end], -MAX_ENTRY, MAX_ENTRY).astype(np.int8)
        shifted = np.clip(table.bias + bias[at:end], -MAX_BIAS, MAX_BIAS).astype(np.int32)
        tables.append(StageTable(moved, shifted, table.shares))
        at = end
    return Router(tuple(tables), first.prefix)


def bias_unit(prefix: int) -> np.float32:
    """The router's integers for each 1.0 of a bias."""
    return np.float32(UNIT * np.float32(prefix))


def _integers(values: Tensor, unit: np.float32) -> npt.NDArray[np.int64]:
    """What is not finite counts as nothing."""
    bounded = np.clip(np.nan_to_num(values.detach().cpu().numpy(), nan=0.0, posinf=0.0, neginf=0.0), -LIMIT, LIMIT)
    found: npt.NDArray[np.int64] = np.rint(bounded * unit).astype(np.int64)
    return found
