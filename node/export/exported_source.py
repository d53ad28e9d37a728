"""An exported folder as a source of modules, checked against the signed manifest before memory is spent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.experts.router import Router, load_router
from node.export.hugging_face import CONFIG, FORMAT, MANIFEST, ORIGIN, model_config, module_file, shard_files
from node.export.source import Parameters
from node.model.initialization import digest_of_tensors
from node.model.shapes import Shape, parameter_shapes
from protocol.manifest.manifest import MAX_MANIFEST_BYTES, Manifest
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.vocabulary.errors import ConfigError, CorruptSnapshot, StateError
from swarm.vocabulary.types import ModuleId, RunId


def names_in(file: Path) -> list[str]:
    """The names of the tensors in a file. Raises CorruptSnapshot, StateError: the file is damaged, or not there."""
    with _opened(file) as opened:
        return list(opened.keys())


def check_header(file: Path, wanted: Mapping[str, Shape]) -> None:
    """Compares the file's header with the wanted shapes. Raises CorruptSnapshot, StateError."""
    with _opened(file) as opened:
        there = set(opened.keys())
        for name, shape in wanted.items():
            if name not in there:
                raise StateError(f"{file} has no parameter {name}")
            header = opened.get_slice(name)
            found = tuple(header.get_shape())
            if found != shape or header.get_dtype() != "F32":
                raise StateError(
                    f"{file} is not of this run's model: {name} is {header.get_dtype()} {found}, not F32 {shape}"
                )


def read_tensors(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads the named tensors into memory of their own. Raises CorruptSnapshot, StateError."""
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except FileNotFoundError:
        raise StateError(f"there is no file {file}") from None
    except (OSError, SafetensorError) as error:
        raise CorruptSnapshot(f"{file} cannot be read: {error}") from error


_MAX_JSON_BYTES: Final = 1 << 20
_MAX_SHARDS: Final = 99_999
_LEFT_TO_THE_TOKENIZER: Final = {"bos_token_id", "eos_token_id"}


class ExportedSource:
    """`ModuleSource` of an exported folder. Raises ConfigError, ManifestError, StateError, CorruptSnapshot."""

    def __init__(self, path: Path) -> None:
        origin = _read_json(path / ORIGIN)
        if origin.get("format") != FORMAT or not isinstance(origin.get("run"), str):
            raise StateError(
                f"{path / ORIGIN} is of a format that this version does not know", hint="Export the model again."
            )
        self.signed: SignedManifest = read_signed_manifest(
            _read(path / MANIFEST, MAX_MANIFEST_BYTES), RunId(origin["run"])
        )
        by_module = origin.get("shards") == 0
        if not by_module:
            _check_config(path / CONFIG, self.signed)
        self._path = path
        self.modules = _modules_in(path, origin, self.signed.manifest)
        self._digests = _digests(path, origin)
        self._files = None if by_module else _files_by_parameter(path, origin)
        """None where each module has a file of its own."""
        for module in self.modules:
            self._check_headers(module)

    async def router(self) -> Router | None:
        return await asyncio.to_thread(load_router, self._path / MANIFEST, self.signed.manifest)

    async def module(self, module: ModuleId) -> Parameters:
        return await asyncio.to_thread(self._read_module, module)

    def _check_headers(self, module: ModuleId) -> None:
        for file, shapes in self._by_file(module).items():
            check_header(file, shapes)

    def _read_module(self, module: ModuleId) -> Parameters:
        tensors: dict[str, Any] = {}
        for file, shapes in self._by_file(module).items():
            tensors |= read_tensors(file, shapes)
        if digest_of_tensors(tensors).hex() != self._digests.get(str(module)):
            files = ", ".join(sorted(file.name for file in self._by_file(module)))
            raise CorruptSnapshot(
                (
                    f"{self._path}: module {module} is not what was exported; {files} or {ORIGIN} has been changed "
                    "or damaged"
                ),
                hint="Export the model again, or copy the folder again from where it came.",
            )
        return tensors

    def _by_file(self, module: ModuleId) -> dict[Path, dict[str, Shape]]:
        files: dict[Path, dict[str, Shape]] = {}
        if self._files is None:
            return {self._path / module_file(module): dict(parameter_shapes(self.signed.manifest, module))}
        for name, shape in parameter_shapes(self.signed.manifest, module).items():
            if name not in self._files:
                raise StateError(
                    f"{self._path} is not a whole model: no file has parameter {name} of module {module}",
                    hint="Export the model again, or copy the missing file.",
                )
            files.setdefault(self._files[name], {})[name] = shape
        return files


def _modules_in(path: Path, origin: Mapping[str, Any], manifest: Manifest) -> tuple[ModuleId, ...]:
    """The modules of which the folder says to have them, one a stage at least."""
    named = _digests(path, origin)
    modules = tuple(module for module in manifest.modules() if str(module) in named)
    if {module.stage for module in modules} != set(range(manifest.stages.count)):
        raise StateError(f"{path / ORIGIN}: modules must have one of each stage at least", hint="Export it again.")
    return modules


def is_exported(path: Path) -> bool:
    """Whether the folder was written by `skipstone export`."""
    return (path / ORIGIN).is_file()


def _files_by_parameter(path: Path, origin: Mapping[str, Any]) -> dict[str, Path]:
    count = origin.get("shards")
    if not isinstance(count, int) or not 1 <= count <= _MAX_SHARDS:
        raise StateError(f"{path / ORIGIN}: shards must be a number from 1 to {_MAX_SHARDS}")
    return {name: path / file for file in shard_files(count) for name in names_in(path / file)}


def _digests(path: Path, origin: Mapping[str, Any]) -> Mapping[str, Any]:
    digests = origin.get("modules")
    if not isinstance(digests, dict):
        raise StateError(f"{path / ORIGIN}: modules must be the digest of each module")
    return digests


def _check_config(file: Path, signed: SignedManifest) -> None:
    """`transformers` goes by the config and we by the manifest; they must not be two models."""
    found, wanted = _read_json(file), model_config(signed.manifest, end_of_document=0)
    for key in wanted.keys() - _LEFT_TO_THE_TOKENIZER:
        if found.get(key) != wanted[key]:
            raise StateError(
                f"{file}: {key} is {str(found.get(key))[:80]}, the run's manifest has {wanted[key]}",
                hint="Export the model again; a changed config.json is another model than the run's.",
            )


def _read_json(file: Path) -> dict[str, Any]:
    text = _read(file, _MAX_JSON_BYTES)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptSnapshot(f"{file} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise CorruptSnapshot(f"{file} is not a JSON object")
    return table


def _read(file: Path, limit: int) -> bytes:
    try:
        with file.open("rb") as opened:
            text = opened.read(limit + 1)
    except OSError as error:
        raise ConfigError(
            f"{file.parent} is not a whole export: {file.name} cannot be read: {error.strerror}",
            hint="Name a folder that `skipstone export` has written.",
        ) from None
    if len(text) > limit:
        raise CorruptSnapshot(f"{file} is longer than {limit} bytes")
    return text
