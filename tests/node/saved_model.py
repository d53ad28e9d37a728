"""A model on disk: a checkpoint as `--save` writes one, with weights in which everything matters."""

from __future__ import annotations

from pathlib import Path

import torch

from node.checkpoint import CheckpointFolder
from node.model.initial import parameters_of
from node.solo import WholeModel
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.signed_manifest import sign_manifest

CPU = torch.device("cpu")


def noisy_model(manifest: Manifest) -> WholeModel:
    """Norm weights that are all 1 would hide where they are applied; weights this small, what attention does."""
    model = WholeModel(manifest, CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parts in model.modules():
            for parameter in parameters_of(*parts).values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def save_checkpoint(path: Path, manifest: Manifest, model: WholeModel | None = None) -> Path:
    signed = sign_manifest(manifest, Identity.generate())
    (model or noisy_model(manifest)).save(CheckpointFolder(path, signed.run, signed.text), steps=1, tokens=64)
    return path


@torch.no_grad()
def logits_of(model: WholeModel, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.embedding(tokens)
    for stack in model.stacks:
        hidden = stack(hidden)
    return model.head.logits(hidden)
