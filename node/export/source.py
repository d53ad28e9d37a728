"""The source of a run's modules: the seam between reading a model and whatever it is read from."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from node.experts.router import DocumentRouter, Router, document_router
from node.model.decoder import Decoder, decoder_bytes
from node.model.shapes import parameter_bytes, parameter_shapes
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest
from swarm.experts.routes import best_route, module_at, name_of_route, served_route
from swarm.vocabulary.errors import ConfigError, ResourceExhausted, StateError
from swarm.vocabulary.types import ModuleId, Route

Parameters = Mapping[str, Tensor]
"""Float32, by the names of the whole model (`model.layers.5.mlp.up_proj.weight`)."""


class ModuleSource(Protocol):
    """A run's model, one module at a time, so that nobody has to hold all of it."""

    @property
    def modules(self) -> tuple[ModuleId, ...]:
        """Those that can be asked for: of an exported path its own, else all of the run."""
        ...

    @property
    def signed(self) -> SignedManifest:
        """The run's manifest, its signature checked."""
        ...

    async def router(self) -> Router | None:
        """The run's router; None if the manifest names none. Raises SkipstoneError."""
        ...

    async def module(self, module: ModuleId) -> Parameters:
        """The module's parameters, float32, on the CPU. Use `checked_module`. Raises SkipstoneError."""
        ...


async def checked_module(source: ModuleSource, module: ModuleId) -> Parameters:
    """Reads the module's parameters and compares them with the manifest. Raises StateError; others as `module`."""
    parameters = await source.module(module)
    await asyncio.to_thread(_check, source.signed.manifest, module, parameters)
    return parameters


async def read_decoder(source: ModuleSource, device: torch.device, route: Route | None = None) -> Decoder:
    """Reads the whole model, or one path of a run with experts (None: the only one), onto the device.

    Raises:
        ConfigError: The path is ambiguous or missing.
        ResourceExhausted: The model is larger than this machine's memory.
        StateError: See `checked_module`.
    """
    manifest, modules = source.signed.manifest, path_modules(source, route)
    require_memory(manifest, modules)
    parameters: dict[str, Tensor] = {}
    for module in modules:
        parameters |= await checked_module(source, module)
    return await asyncio.to_thread(Decoder, manifest, parameters, device)


def path_modules(source: ModuleSource, route: Route | None) -> tuple[ModuleId, ...]:
    """The modules of one path, by stage; None is the only path. Raises ConfigError if ambiguous or missing."""
    manifest, there = source.signed.manifest, source.modules
    if route is None:
        if len(there) > manifest.stages.count:
            raise ConfigError(
                f"run {manifest.name} has stages.experts = {manifest.stages.experts}: it is as many models as there "
                "are choices of an expert at each stage, and one Llama model has one expert a stage",
                hint="Choose one with --path, such as --path 1.0,2.1.",
            )
        return there
    wanted = tuple(module_at(route, stage) for stage in range(manifest.stages.count))
    lacking = [module for module in wanted if module not in there]
    if lacking or len(route) != manifest.stages.count - 1:
        what = f"has no module {lacking[0]}" if lacking else f"has {manifest.stages.count - 1} stages after stage 0"
        raise ConfigError(f"there is no path {name_of_route(route)}: this model {what}")
    return wanted


def parse_path(text: str, stages: int) -> Route:
    """The route that `1.0,2.1` names. Raises ConfigError unless it has one module of each stage after stage 0."""
    found = [re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})", word.strip()) for word in text.split(",")]
    if [int(word[1]) for word in found if word is not None] != list(range(1, stages)) or None in found:
        example = ",".join(f"{stage}.0" for stage in range(1, stages))
        raise ConfigError(
            f"{text!r} is not a path through the stages 1 to {stages - 1}", hint=f"Write it as {example}."
        )
    return tuple(int(word[2]) for word in found if word is not None)


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


def require_memory(manifest: Manifest, modules: Sequence[ModuleId]) -> None:
    """Raises ResourceExhausted if the modules exceed this machine's memory. Ignores GPU memory."""
    shapes = (parameter_shapes(manifest, module) for module in modules)
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


class RoutedModel:
    """The model of a source as decoders of single paths; without a `router` there is one path."""

    def __init__(self, source: ModuleSource, device: torch.device, router: DocumentRouter | None) -> None:
        self._source, self._device, self._router = source, device, router
        self._read: dict[ModuleId, dict[str, Tensor]] = {}
        """On the device: of the modules of all paths so far."""

    @property
    def modules_read(self) -> tuple[ModuleId, ...]:
        """Those that some path has needed."""
        return tuple(self._read)

    @property
    def has_paths(self) -> bool:
        """Whether there are several, among which texts choose."""
        return self._router is not None

    def route_of(self, tokens: Sequence[int]) -> Route | None:
        """The route of a text by its first tokens, among the experts that the source has; None for the only path."""
        if self._router is None:
            return None
        affinity = self._router.affinity("", np.array(tokens, dtype=np.int64))
        there = frozenset(self._source.modules)
        return served_route(best_route(affinity), affinity, lambda module: module in there).value

    def route_for(self, route: Route) -> Route | None:
        """A text's own route as `decoder` takes it: None where there is one path, whatever the text's."""
        return None if self._router is None else route

    async def decoder(self, route: Route | None) -> Decoder:
        """The decoder of one path. Errors as `read_decoder`."""
        manifest, modules = self._source.signed.manifest, path_modules(self._source, route)
        require_memory(manifest, tuple({*self._read, *modules}))
        for module in modules:
            if module not in self._read:
                parameters = await checked_module(self._source, module)
                self._read[module] = {name: tensor.to(self._device) for name, tensor in parameters.items()}
        whole = {name: tensor for module in modules for name, tensor in self._read[module].items()}
        return Decoder(manifest, whole, self._device)


async def routed_model(source: ModuleSource, device: torch.device) -> RoutedModel:
    """Opens the model of a source, with the router if there are several paths. Raises SkipstoneError."""
    manifest = source.signed.manifest
    several = len(source.modules) > manifest.stages.count
    return RoutedModel(source, device, document_router(manifest, await source.router()) if several else None)


async def model_on_path(
    source: ModuleSource, device: torch.device, path: str | None, prompt: Sequence[int]
) -> tuple[RoutedModel, Route | None]:
    """Opens the model for one text on `path`, else on the prompt's route. Raises ConfigError."""
    if path is not None:
        return RoutedModel(source, device, None), parse_path(path, source.signed.manifest.stages.count)
    model = await routed_model(source, device)
    return model, model.route_of(prompt)
