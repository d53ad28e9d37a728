"""A model on disk: a checkpoint as `--checkpoint-dir` has one, with weights in which everything matters."""

from __future__ import annotations

from pathlib import Path

import torch

from node.checkpoint.folder import CheckpointFolder, save_state
from node.checkpoint.saver import capture_module
from node.model.initialization import parameters_of
from node.model.optimizer import Accumulator, InnerOptimizer
from node.solo.trainer import WholeModel, solo_peer
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest

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
    folder = CheckpointFolder(path, signed.run, signed.text)
    for module, parts in (model or noisy_model(manifest)).modules():
        optimizer = InnerOptimizer(manifest.training, [Accumulator(part) for part in parts])
        save_state(folder, solo_peer(module), module, capture_module(parts, optimizer, visits=1, tokens=64))
    return path


def file_of(checkpoint: Path, module: str) -> Path:
    """The only snapshot's tensors of a module such as `1.0`."""
    (file,) = (checkpoint / f"solo-{module}").glob("*.safetensors")
    return file


@torch.no_grad()
def logits_of(model: WholeModel, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.embedding(tokens)
    for stack in model.stacks:
        hidden = stack(hidden)
    return model.head.logits(hidden)
