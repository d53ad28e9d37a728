"""The source of a run's modules: the seam between reading a model and whatever it is read from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from node.model.decoder import Decoder, decoder_bytes
from node.model.shapes import parameter_bytes, parameter_shapes
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest
from swarm.vocabulary.errors import ConfigError, ResourceExhausted, StateError
from swarm.vocabulary.types import ModuleId

Parameters = Mapping[str, Tensor]
"""Float32, by the names of the whole model (`model.layers.5.mlp.up_proj.weight`)."""


class ModuleSource(Protocol):
    """A run's model, one module at a time, so that nobody has to hold all of it."""

    @property
    def signed(self) -> SignedManifest:
        """The run's manifest, its signature checked."""
        ...

    async def module(self, module: ModuleId) -> Parameters:
        """The module's parameters, float32, on the CPU; read them through `checked_module`.

        Raises:
            SkipstoneError: it cannot be had; the message says why.
        """
        ...


async def checked_module(source: ModuleSource, module: ModuleId) -> Parameters:
    """Reads the module's parameters, which are those that the manifest asks for and no others.

    Raises:
        StateError: a parameter is missing, unknown, of another shape or type, or not finite; also as
            `ModuleSource.module`.
    """
    parameters = await source.module(module)
    await asyncio.to_thread(_check, source.signed.manifest, module, parameters)
    return parameters


async def read_decoder(source: ModuleSource, device: torch.device) -> Decoder:
    """Reads the whole model onto the device.

    Raises:
        ConfigError: the run has several experts a stage.
        ResourceExhausted: the model is larger than this machine's memory.
        StateError: as `checked_module`.
    """
    manifest = source.signed.manifest
    require_one_path(manifest)
    _require_memory(manifest)
    parameters: dict[str, Tensor] = {}
    for module in manifest.modules():
        parameters |= await checked_module(source, module)
    return await asyncio.to_thread(Decoder, manifest, parameters, device)


def require_one_path(manifest: Manifest) -> None:
    """Refuses a run with several experts a stage, which is many models, one for each choice of experts.

    Raises:
        ConfigError: it is such a run.
    """
    if manifest.stages.experts != 1:
        raise ConfigError(
            f"run {manifest.name} has stages.experts = {manifest.stages.experts}: it is as many models as "
            "there are choices of"
            " an expert at each stage, and one Llama model has one expert a stage",
            hint="Only runs with stages.experts = 1 can be exported, generate text, or be evaluated from files.",
        )


def _check(manifest: Manifest, module: ModuleId, parameters: Parameters) -> None:
    wanted = parameter_shapes(manifest, module)
    if wanted.keys() != parameters.keys():
        odd = min(wanted.keys() ^ parameters.keys())
        problem = "is missing" if odd in wanted else "is none of its parameters"
        raise StateError(f"module {module} is not of this run's model: {odd} {problem}")
    for name, tensor in parameters.items():
        if tuple(tensor.shape) != wanted[name] or tensor.dtype != torch.float32:
            raise StateError(
                f"module {module} is not of this run's model: {name} is {tensor.dtype} {tuple(tensor.shape)},"
                f" not {torch.float32} {wanted[name]}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise StateError(
                f"module {module} is of no use: {name} has values that are not finite; its training diverged"
            )


def _require_memory(manifest: Manifest) -> None:
    """Refuses what cannot work before trying takes the machine down. Says nothing of a GPU's memory."""
    shapes = (parameter_shapes(manifest, module) for module in manifest.modules())
    needed = sum(map(parameter_bytes, shapes)) + decoder_bytes(manifest)
    there = memory_bytes()
    if there is not None and needed > there:
        raise ResourceExhausted(
            f"the model of run {manifest.name} needs {needed / 2**30:,.1f} GiB of memory, this machine has"
            f" {there / 2**30:,.1f}",
            hint="Use a machine with more memory.",
        )


def memory_bytes() -> int | None:
    """The physical memory of this machine, or None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
