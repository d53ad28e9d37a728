"""Report of a model's held-out loss, and the paths to measure."""

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from node.observability.typed_json import from_json, to_json
from protocol.manifest.manifest import Manifest
from swarm.experts.routes import name_of_route
from swarm.routing.path_rules import chosen_subsets
from swarm.vocabulary.errors import ProtocolViolation, Unreachable
from swarm.vocabulary.types import Route
from swarm.workload.microbatch_sizes import SizeSummary

log = logging.getLogger(__name__)

# Bounded, because a peer writes it.
_ROUTE: Final = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}(,[0-9]{1,4}\.[0-9]{1,4}){0,1023}")


@dataclass(frozen=True, slots=True)
class AskedPaths:
    """Choice of the paths to evaluate: the number of stages per path, and one or all sets of stages."""

    stages_per_path: int | None = None  # None: all
    every_subset: bool = False  # All evenly spread choices, not only the first

    def of(
        self, manifest: Manifest, available: Collection[int] | None = None, missing: Mapping[int, str] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Returns the `available` stages after stage 0 for each path. Raises ConfigError if there are too few.

        `missing`: why the swarm lacks a stage. Raises Unreachable if the paths need it.
        """
        stages, gap = manifest.stages, ", ".join(f"stage {stage} ({why})" for stage, why in (missing or {}).items())
        if missing and (self.stages_per_path is None or 0 in missing):
            left, hint = stages.count - 1 - len(missing), "Try again when `skipstone status` shows its peers."
            if left and 0 not in missing and stages.visited_per_path < stages.count - 1:
                hint += f" Or use the other stages: --stages-per-path {left}."
            raise Unreachable(f"missing: {gap}", hint=hint)
        subsets = chosen_subsets(stages.count, self.stages_per_path, every=self.every_subset, available=available)
        if missing:
            log.warning("missing: %s; uses stages %s", gap, ", ".join(map(str, sorted({0}.union(*subsets)))))
        return subsets


WHOLE_MODEL: Final = AskedPaths()


@dataclass(frozen=True, slots=True)
class RouteLoss:
    loss: float  # Nats per token
    tokens: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class HeldOutLoss(RouteLoss):
    """Held-out loss on paths through one set of stages, in total and by route (the documents' experts)."""

    sizes: SizeSummary | None = None  # Number of microbatches, if known
    # Loss by route, such as `1.0,2.1`; empty without experts.
    routes: Mapping[str, RouteLoss] = field(default_factory=dict)


def summed_loss(losses: Sequence[tuple[float, int]]) -> RouteLoss:
    """Averages losses, weighted by tokens; `losses` are pairs of mean loss and number of tokens."""
    tokens = sum(count for _, count in losses)
    return RouteLoss(math.fsum(loss * count for loss, count in losses) / tokens, tokens, len(losses))


def held_out_loss(
    routes: Sequence[Route], losses: Sequence[tuple[float, int]], sizes: SizeSummary | None = None
) -> HeldOutLoss:
    """Averages the losses of microbatches, weighted by tokens, in total and by route."""
    of_routes: dict[str, list[tuple[float, int]]] = {}
    for route, loss in zip(routes, losses, strict=True):
        if route:
            of_routes.setdefault(name_of_route(route), []).append(loss)
    by_route = {name: summed_loss(each) for name, each in sorted(of_routes.items())}
    whole = summed_loss(losses)
    return HeldOutLoss(whole.loss, whole.tokens, whole.microbatches, sizes, by_route)


def loss_report(measured: Sequence[tuple[tuple[int, ...], HeldOutLoss]]) -> dict[str, Any]:
    """Builds the report of `eval --json`: loss in nats per token, sizes of the text, loss per path and route."""
    _, first = measured[0]
    return {
        "loss": math.fsum(each.loss for _, each in measured) / len(measured),
        "tokens": first.tokens,
        "microbatches": first.microbatches,
        **({} if first.sizes is None else {"sizes": to_json(first.sizes)}),
        **({"routes": _mean_of_routes([each for _, each in measured])} if first.routes else {}),
        "subsets": [{"stages": list(stages), "loss": each.loss} for stages, each in measured],
    }


def answer_of(measured: HeldOutLoss) -> dict[str, Any]:
    return {key: value for key, value in to_json(measured).items() if value or key not in ("sizes", "routes")}


def _mean_of_routes(measured: Sequence[HeldOutLoss]) -> dict[str, Any]:
    """Averages each route's loss over the measured sets of stages."""
    return {
        name: to_json(replace(first, loss=math.fsum(each.routes[name].loss for each in measured) / len(measured)))
        for name, first in measured[0].routes.items()
        if all(name in each.routes for each in measured)
    }


def loss_in(answer: Mapping[str, Any]) -> HeldOutLoss:
    """Parses a data node's answer with the held-out loss. Raises ProtocolViolation if it is malformed."""
    loss, tokens, microbatches = (answer.get(key) for key in ("loss", "tokens", "microbatches"))
    if not (isinstance(loss, float) and type(tokens) is int and type(microbatches) is int):
        raise ProtocolViolation("the answer is not an evaluation")
    said = answer.get("sizes")
    sizes = None if said is None else from_json(SizeSummary, said, "sizes", lenient=True)
    routes = answer.get("routes", {})
    if not (isinstance(routes, dict) and len(routes) <= microbatches and all(map(_ROUTE.fullmatch, routes))):
        raise ProtocolViolation("the routes in the answer are malformed")
    by_route = {name: from_json(RouteLoss, route, "routes") for name, route in routes.items()}
    return HeldOutLoss(loss, tokens, microbatches, sizes, by_route)
