"""The held-out loss of a model that lies in files.

It stands alone because an export needs none of it, and neither does the evaluation of a running swarm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from node.data.feed import held_out_microbatches
from node.data.packing import Microbatch
from node.data.places import NOTHING_TOLD, ToldPlaces
from node.export.open_model import open_model
from node.export.routed_model import RoutedModel, routed_model
from node.network.loss_report import WHOLE_MODEL, AskedPaths, held_out_loss, loss_report
from swarm.workload.microbatch_sizes import summary_of

Stages = tuple[int, ...]
CPU = torch.device("cpu")


async def evaluate_model(
    target: str,
    microbatches: int,
    device: torch.device = CPU,
    paths: AskedPaths = WHOLE_MODEL,
    told: ToldPlaces = NOTHING_TOLD,
) -> dict[str, Any]:
    """Mean loss over held-out text: see `node.network.loss_report.loss_report`.

    Raises:
        ConfigError: `target` names no model, the run's data is not here, or it has not so many stages.
        ManifestError, CorruptSnapshot, StateError: the model is damaged or incomplete.
    """
    async with open_model(target, told=told) as opened:
        manifest, model = opened.source.signed.manifest, await routed_model(opened.source, device)
        subsets, documents = paths.of(manifest), await opened.documents()
        texts = await asyncio.to_thread(lambda: list(held_out_microbatches(manifest, microbatches, documents)))
        sizes = summary_of([text.workload for text in texts], manifest.microbatch_tokens)
        losses = await _losses(model, texts, subsets)
    routes = [text.route for text in texts]
    return loss_report([(stages, held_out_loss(routes, losses[stages], sizes)) for stages in subsets])


async def _losses(
    model: RoutedModel, texts: Sequence[Microbatch], subsets: Sequence[Stages]
) -> dict[Stages, list[tuple[float, int]]]:
    """Of each path's stages, the loss of each text by its route, and over how many tokens."""
    losses = {stages: [(0.0, 0)] * len(texts) for stages in subsets}
    for route in sorted({text.route for text in texts}):
        decoder = await model.decoder(model.route_for(route))
        for number, text in enumerate(texts):
            if text.route == route:
                for stages in subsets:
                    loss = await asyncio.to_thread(decoder.through(stages).loss, text)
                    losses[stages][number] = (loss, text.scored)
    return losses
