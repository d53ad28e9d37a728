"""The held-out loss of a model that lies in files."""

from __future__ import annotations

import asyncio

import torch

from node.data.documents import Documents
from node.data.feed import held_out_microbatches
from node.data.sources import open_source
from node.export.opening import OpenedModel, open_model
from node.export.source import read_decoder
from node.model.decoder import Decoder
from node.solo import Event, evaluate

CPU = torch.device("cpu")


async def evaluate_model(target: str, microbatches: int, device: torch.device = CPU) -> Event:
    """Mean loss over held-out text: `{"loss": nats per token, "tokens": n, "microbatches": n}`.

    Raises:
        ConfigError: `target` names no model, or the run's data is not here.
        ManifestError, CorruptSnapshot, StateError: the model is damaged or incomplete.
    """
    async with open_model(target) as opened:
        decoder = await read_decoder(opened.source, device)
        return await asyncio.to_thread(_evaluate, opened, decoder, microbatches)


def _evaluate(opened: OpenedModel, decoder: Decoder, microbatches: int) -> Event:
    manifest = opened.source.signed.manifest
    documents = Documents(open_source(manifest.data), opened.tokenizer(), manifest.seed)
    return evaluate(decoder, held_out_microbatches(manifest, microbatches, documents))
