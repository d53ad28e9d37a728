"""Interface to read a run's modules, decoders built from modules, and exported folders as such a source."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from node.checkpoint.folder import opened_tensors
from node.data.files import read_named, read_table
from node.experts.router import DocumentRouter, Router, document_router, load_router
from node.export import hugging_face as layout
from node.model.decoder import Decoder, decoder_bytes
from node.model.initialization import digest_of_tensors
from node.model.machine_limits import available_memory
from node.model.shapes import Shape, names_in_part, parameter_bytes, parameter_shapes
from protocol.manifest.manifest import MAX_MANIFEST_BYTES, Manifest
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.experts.routes import best_route, module_at, name_of_route, served_route
from swarm.membership.memory_fit import size_text
from swarm.vocabulary.errors import ConfigError, CorruptSnapshot, ResourceExhausted, StateError
from swarm.vocabulary.types import ModuleId, Route, RunId

Parameters = Mapping[str, Tensor]  # Float32 parameters by their names in the whole model


class ModuleSource(Protocol):
    """A run's model, read one module at a time, so that it may exceed the memory."""

    modules: tuple[ModuleId, ...]  # Those to read, by stage: all of the run, or fewer of a part or a path

    @property
    def signed(self) -> SignedManifest:
        """The run's signed manifest. Its signature was verified."""

    async def router(self) -> Router | None:
        """Returns the run's router, or None if the manifest names none. Raises SkipstoneError."""

    async def module(self, module: ModuleId) -> Parameters:
        """Reads the module's float32 parameters to the CPU, unchecked (see `checked_module`). Raises SkipstoneError."""


async def checked_module(source: ModuleSource, module: ModuleId) -> Parameters:
    """Reads a module for `full_width`; checks names, shapes, values. Raises StateError, errors of `source.module`."""
    parameters, manifest = await source.module(module), source.signed.manifest
    if isinstance(source, ExportedSource):
        manifest = layout.full_width(manifest)
    await asyncio.to_thread(_check, manifest, module, parameters)
    return await asyncio.to_thread(layout.at_full_width, manifest, parameters)


def path_modules(source: ModuleSource, route: Route | None) -> tuple[ModuleId, ...]:
    """Returns a route's modules by stage (None: the only route). Raises ConfigError if it is missing or ambiguous."""
    manifest, there = source.signed.manifest, source.modules
    if route is None:
        if len(there) > len({module.stage for module in there}):
            raise ConfigError(
                f"run {manifest.name} has several paths (stages.experts = {manifest.stages.experts}), a model only one",
                hint="Choose one with --path, such as --path 1.0,2.1.",
            )
        return there
    wanted = tuple(dict.fromkeys(module_at(route, module.stage) for module in there))
    lacking = [module for module in wanted if module not in there]
    if lacking or len(route) != manifest.stages.count - 1:
        what = f"has no module {lacking[0]}" if lacking else f"has {manifest.stages.count - 1} stages after stage 0"
        raise ConfigError(f"path {name_of_route(route)} does not exist: this model {what}")
    return wanted


def parse_path(text: str, stages: int) -> Route:
    """Parses a path such as `1.0,2.1`. Raises ConfigError unless it has one module of each stage after stage 0."""
    found = [re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})", word.strip()) for word in text.split(",")]
    if [int(word[1]) for word in found if word is not None] != list(range(1, stages)) or None in found:
        example = ",".join(f"{stage}.0" for stage in range(1, stages))
        raise ConfigError(f"{text!r} is not a path through stages 1 to {stages - 1}", hint=f"Write it as {example}.")
    return tuple(int(word[2]) for word in found if word is not None)


def _check(manifest: Manifest, module: ModuleId, parameters: Parameters) -> None:
    wanted = parameter_shapes(manifest, module)
    if wanted.keys() != parameters.keys():
        odd = min(wanted.keys() ^ parameters.keys())
        problem = "is missing" if odd in wanted else "is not one of its parameters"
        raise StateError(f"module {module} does not belong to this run's model: {odd} {problem}")
    for name, tensor in parameters.items():
        if tuple(tensor.shape) != wanted[name] or tensor.dtype != torch.float32:
            raise StateError(
                f"module {module} does not belong to this run's model: {name} is {tensor.dtype} {tuple(tensor.shape)},"
                f" not {torch.float32} {wanted[name]}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise StateError(f"module {module} diverged in training: {name} has values that are not finite")


def require_memory(manifest: Manifest, modules: Sequence[ModuleId]) -> None:
    """Raises ResourceExhausted if modules to read exceed this machine's free memory. Ignores GPU memory."""
    shapes = (parameter_shapes(manifest, module) for module in modules)
    needed, free = sum(map(parameter_bytes, shapes)) + decoder_bytes(manifest), available_memory()
    if free.value is not None and needed > free.value:
        raise ResourceExhausted(
            f"run {manifest.name} needs {size_text(needed)} of memory; {size_text(free.value)} are free {free.reason}",
            hint="Close other programs, or use a machine with more memory.",
        )


class RoutedModel:
    """A source's model as one decoder per route; `router` chooses a text's route (None: the model has one route)."""

    def __init__(self, source: ModuleSource, device: torch.device, router: DocumentRouter | None) -> None:
        self._source, self._device, self.router = source, device, router
        self.read: dict[ModuleId, dict[str, Tensor]] = {}  # Parameters of the modules that were loaded so far

    def route_of(self, tokens: Sequence[int]) -> Route | None:
        """Returns the route of a text by its first tokens, limited to the source's experts. None for a single path."""
        if self.router is None:
            return None
        affinity = self.router.affinity("", np.array(tokens, dtype=np.int64))
        there = frozenset(self._source.modules)
        stages = {module.stage for module in there}
        is_there: Callable[[ModuleId], bool] = lambda module: module in there or module.stage not in stages  # noqa: E731
        return served_route(best_route(affinity), affinity, is_there).value

    async def decoder(self, route: Route | None) -> Decoder:
        """Returns a route's Decoder; loads only modules not loaded before. Raises SkipstoneError."""
        manifest, modules = layout.full_width(self._source.signed.manifest), path_modules(self._source, route)
        require_memory(manifest, [module for module in modules if module not in self.read])
        for module in modules:
            if module not in self.read:
                parameters = await checked_module(self._source, module)
                self.read[module] = {name: tensor.to(self._device) for name, tensor in parameters.items()}
        whole = {name: tensor for module in modules for name, tensor in self.read[module].items()}
        return Decoder(manifest, whole, self._device).through([module.stage for module in modules if module.stage])


async def routed_model(source: ModuleSource, device: torch.device) -> RoutedModel:
    """Opens a source's model, with a router if the model has several routes. Raises SkipstoneError."""
    manifest = source.signed.manifest
    several = len(source.modules) > len({module.stage for module in source.modules})
    return RoutedModel(source, device, document_router(manifest, await source.router()) if several else None)


async def model_on_path(
    source: ModuleSource, device: torch.device, path: str | None, prompt: Sequence[int]
) -> tuple[RoutedModel, Route | None]:
    """Opens the model and chooses a route for one text: `path` if given, else by the router. Raises ConfigError."""
    if path is not None:
        return RoutedModel(source, device, None), parse_path(path, source.signed.manifest.stages.count)
    model = await routed_model(source, device)
    return model, model.route_of(prompt)


def check_header(file: Path, wanted: Mapping[str, Shape]) -> None:
    """Checks that a safetensors file has these parameters with these shapes. Raises CorruptSnapshot, StateError."""
    with opened_tensors(file) as opened:
        there = set(opened.keys())
        for name, shape in wanted.items():
            if name not in there:
                raise StateError(f"{file} has no parameter {name}")
            header = opened.get_slice(name)
            found = tuple(header.get_shape())
            if found != shape or header.get_dtype() != "F32":
                raise StateError(f"{file} is of another model: {name} is {header.get_dtype()} {found}, not F32 {shape}")


_MAX_JSON_BYTES: Final = 1 << 20
Content = TypeVar("Content")


class ExportedSource:
    """ModuleSource of an exported folder. Raises ConfigError, ManifestError, StateError, CorruptSnapshot."""

    def __init__(self, path: Path) -> None:
        origin = _undamaged(read_table, path / layout.ORIGIN, _MAX_JSON_BYTES)
        if origin.get("format") != layout.FORMAT or not isinstance(origin.get("run"), str):
            raise StateError(f"{path / layout.ORIGIN} has an unknown format", hint="Export the model again.")
        self.signed: SignedManifest = read_signed_manifest(
            _undamaged(read_named, path / layout.MANIFEST, MAX_MANIFEST_BYTES), RunId(origin["run"])
        )
        by_module = origin.get("shards") == 0
        self._path = path
        digests, manifest = origin.get("modules"), self.signed.manifest
        if not isinstance(digests, dict):
            raise StateError(f"{path / layout.ORIGIN}: `modules` must map modules to digests")
        self._digests: Mapping[str, Any] = digests
        self.modules = tuple(module for module in manifest.modules() if str(module) in digests)
        stages, there = list(range(manifest.stages.count)), sorted({module.stage for module in self.modules})
        if there[:1] != [0] or there != origin.get("only_stages", stages):
            raise StateError(f"{path / layout.ORIGIN}: `modules` lacks a stage", hint="Export the model again.")
        self._names = names_in_part(manifest, self.modules)
        if not by_module:  # an export of all experts has no config.json
            _check_config(path / layout.CONFIG, self.signed, self.modules)
        self._files = None if by_module else _files_by_parameter(path, origin, manifest)
        for module in self.modules:
            for file, shapes in self._by_file(module).items():
                check_header(file, {self._names[name]: shape for name, shape in shapes.items()})

    async def router(self) -> Router | None:
        return await asyncio.to_thread(load_router, self._path / layout.MANIFEST, self.signed.manifest)

    async def module(self, module: ModuleId) -> Parameters:
        return await asyncio.to_thread(self._read_module, module)

    def _read_module(self, module: ModuleId) -> Parameters:
        tensors: dict[str, Any] = {}
        for file, shapes in self._by_file(module).items():
            with opened_tensors(file) as opened:
                tensors |= {name: opened.get_tensor(self._names[name]) for name in shapes}
        if digest_of_tensors(tensors).hex() != self._digests.get(str(module)):  # damage that the header does not show
            files = ", ".join(sorted(file.name for file in self._by_file(module)))
            raise CorruptSnapshot(
                f"{self._path}: module {module} differs from the exported one. {files} or {layout.ORIGIN} was damaged",
                hint="Export the model or copy the folder again.",
            )
        return tensors

    def _by_file(self, module: ModuleId) -> dict[Path, dict[str, Shape]]:
        files: dict[Path, dict[str, Shape]] = {}
        if self._files is None:
            return {self._path / layout.module_file(module): dict(self._shapes(module))}
        for name, shape in self._shapes(module).items():
            if self._names[name] not in self._files:
                raise StateError(
                    f"{self._path} is incomplete: no file has parameter {name} of module {module}",
                    hint="Export the model again, or copy the missing file.",
                )
            files.setdefault(self._files[self._names[name]], {})[name] = shape
        return files

    def _shapes(self, module: ModuleId) -> Mapping[str, Shape]:
        return parameter_shapes(layout.full_width(self.signed.manifest), module)


def is_exported(path: Path) -> bool:
    """Tells whether `skipstone export` wrote the folder."""
    return (path / layout.ORIGIN).is_file()


def _files_by_parameter(path: Path, origin: Mapping[str, Any], manifest: Manifest) -> dict[str, Path]:
    count = origin.get("shards")
    # Each file has at least one parameter.
    most = sum(len(parameter_shapes(manifest, module)) for module in manifest.modules())
    if not isinstance(count, int) or not 1 <= count <= most:
        raise StateError(f"{path / layout.ORIGIN}: `shards` must be a number from 1 to {most}")
    found: dict[str, Path] = {}
    for file in (path / layout.shard_file(number, count) for number in range(1, count + 1)):
        with opened_tensors(file) as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _check_config(file: Path, signed: SignedManifest, modules: Sequence[ModuleId]) -> None:
    """Checks that config.json, which `transformers` reads, describes the same model as the manifest."""
    found, wanted = (
        _undamaged(read_table, file, _MAX_JSON_BYTES),
        layout.model_config(signed.manifest, modules, special={}),
    )
    for key in wanted:
        if found.get(key) != wanted[key]:
            raise StateError(
                f"{file}: {key} is {str(found.get(key))[:80]}, but the run's manifest has {wanted[key]}",
                hint="Export the model again: a changed config.json describes another model.",
            )


def _undamaged(read: Callable[[Path, int, str], Content], file: Path, limit: int) -> Content:
    """Reads a file of an export. Raises ConfigError if it is missing, CorruptSnapshot if it is not as exported."""
    try:
        return read(file, limit, "Choose a folder that `skipstone export` wrote.")
    except ConfigError as error:
        if file.is_file():
            raise CorruptSnapshot(str(error)) from None
        raise
