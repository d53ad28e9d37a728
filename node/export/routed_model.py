"""The paths of a model with experts, each read when a text needs it; the modules that paths share are read once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from node.experts.router import DocumentRouter, document_router
from node.export.source import ModuleSource, checked_module, parse_path, path_modules, require_memory
from node.model.decoder import Decoder
from swarm.experts.routes import best_route, served_route
from swarm.vocabulary.types import ModuleId, Route


class RoutedModel:
    """The model of a source, as decoders of one path each. Made by `routed_model`.

    Args:
        router: None where there is only one path.
    """

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
        """The decoder of one path.

        Raises:
            ConfigError, ResourceExhausted, StateError: as `node.export.source.read_decoder`.
        """
        manifest, modules = self._source.signed.manifest, path_modules(self._source, route)
        require_memory(manifest, tuple({*self._read, *modules}))
        for module in modules:
            if module not in self._read:
                parameters = await checked_module(self._source, module)
                self._read[module] = {name: tensor.to(self._device) for name, tensor in parameters.items()}
        whole = {name: tensor for module in modules for name, tensor in self._read[module].items()}
        return Decoder(manifest, whole, self._device)


async def routed_model(source: ModuleSource, device: torch.device) -> RoutedModel:
    """Opens the model of a source, with the run's router where there are several paths.

    Raises:
        SkipstoneError: the router cannot be had.
    """
    manifest = source.signed.manifest
    several = len(source.modules) > manifest.stages.count
    return RoutedModel(source, device, document_router(manifest, await source.router()) if several else None)


async def model_on_path(
    source: ModuleSource, device: torch.device, path: str | None, prompt: Sequence[int]
) -> tuple[RoutedModel, Route | None]:
    """Opens the model of a source for one text, and says on which path it begins.

    Args:
        path: the one that was asked for, such as `1.0,2.1`, which stays; None for the prompt's.

    Raises:
        ConfigError: it is no path of this run.
        SkipstoneError: the router cannot be had.
    """
    if path is not None:
        return RoutedModel(source, device, None), parse_path(path, source.signed.manifest.stages.count)
    model = await routed_model(source, device)
    return model, model.route_of(prompt)
