"""A checkpoint's folder as a source of modules."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from node.checkpoint import load_module, module_file, read_manifest
from node.export.source import Parameters
from node.export.tensor_files import check_header
from node.model.initial import parameters_of
from node.model.parts import BlockStack, EmbeddingPart, HeadPart
from node.model.shapes import parameter_shapes
from protocol.manifest import Manifest
from protocol.signed_manifest import SignedManifest, read_signed_manifest
from swarm.errors import StateError
from swarm.vocabulary import ModuleId


class CheckpointSource:
    """Implements `ModuleSource`."""

    def __init__(self, path: Path) -> None:
        self.signed, self._modules = gather_modules(path)

    async def module(self, module: ModuleId) -> Parameters:
        return await asyncio.to_thread(self._modules.__getitem__, module)


def gather_modules(path: Path) -> tuple[SignedManifest, Mapping[ModuleId, Parameters]]:
    """The run of a checkpoint, and its modules, each read when it is asked for.

    Raises:
        ConfigError: there is no checkpoint in this folder.
        ManifestError: its manifest is damaged, or the signature is not its author's.
        StateError: a module has no file, or one of another model.
        CorruptSnapshot: a file is damaged.
    """
    signed = read_signed_manifest(read_manifest(path), None)
    modules = signed.manifest.modules()
    missing = [module for module in modules if not module_file(path, module).exists()]
    if missing:
        raise StateError(
            f"{path} is not a whole model: module {', '.join(map(str, missing))} of {len(modules)} has no file",
            hint="Put the files of all nodes' checkpoints of this run into one folder.",
        )
    for module in modules:
        check_header(module_file(path, module), parameter_shapes(signed.manifest, module))
    return signed, _ModuleFiles(path, signed)


class _ModuleFiles(Mapping[ModuleId, Parameters]):
    """Reads a module's file anew each time it is asked for."""

    def __init__(self, path: Path, signed: SignedManifest) -> None:
        self._path = path
        self._signed = signed

    def __getitem__(self, module: ModuleId) -> Parameters:
        parts = _empty_parts(self._signed.manifest, module)
        state = load_module(self._path, module, *parts)
        if state.run != self._signed.run:
            raise StateError(
                f"{module_file(self._path, module)} is of run {state.run}, the manifest's is {self._signed.run}"
            )
        return parameters_of(*parts)

    def __iter__(self) -> Iterator[ModuleId]:
        return iter(self._signed.manifest.modules())

    def __len__(self) -> int:
        return len(self._signed.manifest.modules())


def _empty_parts(manifest: Manifest, module: ModuleId) -> tuple[nn.Module, ...]:
    """The module's parts with room for parameters, and nothing in it."""
    blocks = manifest.stages.blocks
    if module.stage == 0:
        return EmbeddingPart(manifest.model, blocks[0]), HeadPart(manifest.model)
    return (BlockStack(manifest.model, sum(blocks[: module.stage]), blocks[module.stage]),)
