"""An existing model cut into the modules of a run: first anchors, whose digests are in the manifest."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from node.averaging.anchor.anchor import Anchor, hash_of, initial_anchor, version_of
from node.averaging.anchor.layout import Layout, layout_of
from node.averaging.anchor.shared_vector import Vector, empty_vector
from node.model.shapes import Shape, parameter_shapes
from node.start.model_folder import ModelFolder, blocks_of
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import AnchorVersion, ModuleId

_OTHER: Final = "Name the folder from which `skipstone new --from-model` made this run, with the same files."


def module_layout(manifest: Manifest, module: ModuleId) -> Layout:
    """The layout of a module's anchors."""
    return layout_of(parameter_shapes(manifest, module), manifest.training.fragments)


def first_version(manifest: Manifest, module: ModuleId) -> AnchorVersion:
    """The version of a module's first anchor, in a run that starts from an existing model."""
    assert manifest.start is not None, "asked only of such runs"
    return AnchorVersion(0, 0, 0, 0, bytes.fromhex(manifest.start.modules[module.stage]))


@dataclass(frozen=True, slots=True, eq=False)
class FirstAnchor:
    """A first anchor whose chunks are read from the folder when they are asked for, for who serves it to others."""

    version: AnchorVersion
    layout: Layout
    hashes: tuple[bytes, ...]
    _folder: ModelFolder

    def chunk(self, number: int) -> memoryview:
        """The bytes of a chunk, read from disk. Raises IndexError, ConfigError."""
        if not 0 <= number < 2 * self.layout.chunks:
            raise IndexError(f"chunk {number} of {2 * self.layout.chunks}")
        part = self.layout.range_of(number % self.layout.chunks, number % self.layout.chunks + 1)
        values: Vector = np.zeros(part.stop - part.start, np.float32)
        if number < self.layout.chunks:
            _read(self._folder, self.layout, part, values)
        return values.view(np.uint8).data


class CutModel:
    """A model's folder cut as a manifest says, for any thread. Raises ConfigError for other parameters."""

    def __init__(self, manifest: Manifest, folder: ModelFolder) -> None:
        self._manifest = manifest
        self._folder = folder
        self._lock = threading.Lock()
        self._anchors: dict[int, FirstAnchor] = {}
        """By stage, of those that were asked for: a hash for each chunk."""
        there, cut = blocks_of(folder.config), sum(manifest.stages.blocks)
        if there != cut:
            raise ConfigError(f"{folder.path} has {there} blocks, and the run's stages have {cut} together")
        wanted: dict[str, Shape] = {}
        for stage in range(manifest.stages.count):
            wanted |= parameter_shapes(manifest, ModuleId(stage))
        folder.require(wanted)

    def digests(self) -> tuple[str, ...]:
        """The hexadecimal digest of each stage's first anchor. Reads the whole model. Raises ConfigError."""
        return tuple(self.first_anchor(stage).version.digest.hex() for stage in range(self._manifest.stages.count))

    def first_anchor(self, stage: int) -> FirstAnchor:
        """The first anchor of a stage's modules, for others; the first time it reads all of it. Raises ConfigError."""
        with self._lock:
            if stage not in self._anchors:
                self._anchors[stage] = self._hashed(stage)
            return self._anchors[stage]

    def has(self, module: ModuleId, digest: bytes) -> bool:
        """Whether the manifest says that this is the module's first anchor."""
        return self._manifest.has(module) and first_version(self._manifest, module).digest == digest

    def hashed(self, module: ModuleId, digest: bytes) -> FirstAnchor | None:
        """The first anchor of this digest, if its hashes are known by now. Never waits."""
        found = self._anchors.get(module.stage)
        return found if found is not None and found.version.digest == digest else None

    def anchor(self, module: ModuleId) -> Anchor:
        """A module's first anchor in memory. Raises ConfigError if the folder is another model, OutOfMemory."""
        layout = module_layout(self._manifest, module)
        parameters = empty_vector(layout)
        for part, array in parameters.pieces():
            _read(self._folder, layout, part, array)
        anchor = initial_anchor(layout, parameters)
        if anchor.version != first_version(self._manifest, module):
            raise ConfigError(
                f"{self._folder.path} is not the model from which this run starts: module {module} has other values",
                hint=_OTHER,
            )
        return anchor

    def _hashed(self, stage: int) -> FirstAnchor:
        layout = module_layout(self._manifest, ModuleId(stage))
        blank = FirstAnchor(AnchorVersion(0, 0, 0, 0, bytes(32)), layout, (), self._folder)
        parameters = [hash_of(blank.chunk(number)) for number in range(layout.chunks)]
        parts = [layout.range_of(number, number + 1) for number in range(layout.chunks)]
        zeros = {size: hash_of(memoryview(bytes(size))) for size in {4 * (part.stop - part.start) for part in parts}}
        momentum = [zeros[4 * (part.stop - part.start)] for part in parts]
        hashes = (*parameters, *momentum)
        return FirstAnchor(version_of(layout, hashes, 0, 0, 0, 0), layout, hashes, self._folder)


def open_start(manifest: Manifest, path: Path | None) -> CutModel | None:
    """Opens the folder from which a run starts; None without a path. Raises ConfigError."""
    if path is None:
        return None
    if manifest.start is None:
        raise ConfigError("this run does not start from an existing model", hint="Leave --model out.")
    return CutModel(manifest, ModelFolder(path))


def _read(folder: ModelFolder, layout: Layout, part: slice, out: Vector) -> None:
    """Reads this part of the vector."""
    for place in layout.places:
        start, stop = max(place.start, part.start), min(place.stop, part.stop)
        if start < stop:
            folder.read(place.name, start - place.start, out[start - part.start : stop - part.start])
