"""The held-out loss of a model that lies in files.

It stands alone because an export needs none of it, and neither does the evaluation of a running swarm.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from node.data.feed import held_out_microbatches
from node.data.places import NOTHING_TOLD, ToldPlaces
from node.export.open_model import OpenedModel, open_model
from node.export.source import read_decoder
from node.model.decoder import Decoder
from node.network.loss_report import WHOLE_MODEL, AskedPaths, HeldOutLoss, loss_report
from node.solo.trainer import evaluate

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
        decoder = await read_decoder(opened.source, device)
        return await asyncio.to_thread(_evaluate, opened, decoder, microbatches, paths)


def _evaluate(opened: OpenedModel, decoder: Decoder, microbatches: int, paths: AskedPaths) -> dict[str, Any]:
    manifest = opened.source.signed.manifest
    subsets = paths.of(manifest)
    texts = list(held_out_microbatches(manifest, microbatches, opened.documents()))
    return loss_report([(stages, HeldOutLoss(**evaluate(decoder.through(stages), texts))) for stages in subsets])
