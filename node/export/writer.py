"""Exports a run's model as the folder of `node.export.hugging_face`, in a temporary folder that is then renamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from node.checkpoint.folder import Storage
from node.data.tokenizers import FileTokenizer, open_tokenizer, tokenizer_bytes
from node.experts.router import router_file
from node.export import hugging_face as layout
from node.export.hugging_face import (
    BYTES_END_OF_DOCUMENT,
    byte_tokenizer,
    generation_config,
    model_config,
    tokenizer_config,
)
from node.export.source import ModuleSource, checked_module, is_exported, path_modules
from node.model.initialization import digest_of_tensors
from node.model.shapes import parameter_bytes
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, StateError
from swarm.vocabulary.types import ModuleId, Route

_WRITE_HINT: Final = "Check the folder's free space and permissions."


@dataclass(frozen=True, slots=True)
class Export:
    """Result of an export: its folder and run, and the number and size of its parameter files."""

    path: Path
    run: str
    files: int
    size_bytes: int


async def export(
    source: ModuleSource,
    target: Path,
    *,
    tokenizer_file: Path | None = None,
    route: Route | None = None,
    replace: bool = False,
    shard_bytes: int = layout.SHARD_BYTES,
) -> Export:
    """Exports a model to a folder, with one module and one shard in memory. Raises ConfigError, StateError."""
    manifest = source.signed.manifest
    modules = path_modules(source, route)
    require_free(target, replace=replace)
    shards = layout.plan_shards(manifest, modules, shard_bytes)
    with _written_beside(target) as beside:
        await asyncio.to_thread(_write_tokenizer, beside, manifest, tokenizer_file)
        digests = await _write_parameters(beside, source, modules, shards)
        if len(shards) > 1:
            _write_json(beside / layout.INDEX, layout.index_json(shards))
        await _finish(beside, source, digests, shards)
    size = sum(parameter_bytes(shard.shapes) for shard in shards)
    return Export(target, source.signed.run, len(shards), size)


async def export_all(
    source: ModuleSource, target: Path, *, tokenizer_file: Path | None = None, replace: bool = False
) -> Export:
    """Exports every module of a run with experts to a separate file, and the router. Raises the errors of `export`."""
    manifest = source.signed.manifest
    if not manifest.stages.has_experts:
        raise ConfigError(f"run {manifest.name} has a single path", hint="Omit --all to export the whole model.")
    require_free(target, replace=replace)
    digests: dict[ModuleId, bytes] = {}
    size = 0
    with _written_beside(target) as beside:
        await asyncio.to_thread(_write_tokenizer, beside, manifest, tokenizer_file)
        # Tensors get the same mode as the other files.
        mode = (beside / layout.CONFIG).stat().st_mode
        (beside / layout.CONFIG).unlink()  # `transformers` must not load this folder
        for module in source.modules:
            parameters = dict(await checked_module(source, module))
            digests[module] = await asyncio.to_thread(digest_of_tensors, parameters)
            size += sum(4 * tensor.numel() for tensor in parameters.values())
            tensors = {name: tensor.contiguous() for name, tensor in parameters.items()}
            await asyncio.to_thread(_write_tensors, beside / layout.module_file(module), tensors, mode)
        await _finish(beside, source, digests, ())
    return Export(target, source.signed.run, len(digests), size)


async def _finish(
    folder: Path, source: ModuleSource, digests: Mapping[ModuleId, bytes], shards: tuple[layout.Shard, ...]
) -> None:
    """Writes router, manifest and `skipstone.json` to the folder, and flushes the folder to disk."""
    router = await source.router()
    if router is not None:
        router_file(folder / layout.MANIFEST).write_bytes(router.to_bytes())
    (folder / layout.MANIFEST).write_bytes(source.signed.text)
    _write_json(folder / layout.ORIGIN, layout.origin_json(source.signed, digests, shards))
    await asyncio.to_thread(_make_durable, folder)


def _make_durable(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        Storage().sync(path)


def require_free(target: Path, *, replace: bool) -> None:
    """Raises ConfigError unless the target is missing, empty, or an older export that may be replaced."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target} is not a folder", hint="Choose a new or an empty folder.")
    if not any(target.iterdir()):
        return
    if not is_exported(target):
        raise ConfigError(f"{target} is not empty and not an export", hint="Choose a new or an empty folder.")
    if not replace:
        raise ConfigError(f"{target} already has an export", hint="Choose another folder, or replace it with --force.")


@contextlib.contextmanager
def _written_beside(target: Path) -> Iterator[Path]:
    """Yields a new folder that replaces the target after success and is deleted after a failure."""
    target = target.resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        beside.mkdir(parents=True)
        yield beside
        _take_place(beside, target)
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot write the export to {target}: {error}", hint=_WRITE_HINT) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _take_place(beside: Path, target: Path) -> None:
    """Renames the new folder to the target, and deletes an older export only afterwards."""
    older = None
    if target.exists() and any(target.iterdir()):
        older = target.with_name(f".{target.name}.older-{secrets.token_hex(4)}")
        target.rename(older)
    try:
        beside.rename(target)
    except OSError:
        if older is not None:
            older.rename(target)
        raise
    Storage().sync(target.parent)
    if older is not None:
        shutil.rmtree(older, ignore_errors=True)


async def _write_parameters(
    folder: Path, source: ModuleSource, modules: Sequence[ModuleId], shards: tuple[layout.Shard, ...]
) -> Mapping[ModuleId, bytes]:
    """Writes the shards module by module, each shard once it is complete. Returns each module's digest."""
    digests: dict[ModuleId, bytes] = {}
    waiting: dict[str, Tensor] = {}
    to_write = list(shards)
    for module in modules:
        parameters = dict(await checked_module(source, module))
        digests[module] = await asyncio.to_thread(digest_of_tensors, parameters)
        waiting |= parameters
        # Free the module's dict, so that written tensors do not stay in memory.
        del parameters
        while to_write and to_write[0].shapes.keys() <= waiting.keys():
            shard = to_write.pop(0)
            tensors = {name: waiting.pop(name).contiguous() for name in shard.shapes}
            mode = (folder / layout.CONFIG).stat().st_mode
            await asyncio.to_thread(_write_tensors, folder / shard.file, tensors, mode)
    return digests


def _write_tensors(file: Path, tensors: dict[str, Tensor], mode: int) -> None:
    """Writes a shard and sets its file mode, because safetensors makes files readable by the owner only."""
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def _write_tokenizer(folder: Path, manifest: Manifest, file: Path | None) -> None:
    """Writes the tokenizer, and the configs that name its end-of-document token."""
    tokenizer = open_tokenizer(manifest, file)
    if isinstance(tokenizer, FileTokenizer):
        name = tokenizer.end_of_document_name
        assert file is not None, "a tokenizer was opened"
        assert manifest.data.tokenizer_sha256 is not None, "the manifest's schema asks for it"
        content = tokenizer_bytes(
            file, manifest.data.tokenizer_sha256
        )  # read and checked again: the file may have changed
        (folder / layout.TOKENIZER).write_bytes(content)
    else:
        name = BYTES_END_OF_DOCUMENT
        _write_json(folder / layout.TOKENIZER, byte_tokenizer())
    _write_json(folder / layout.TOKENIZER_CONFIG, tokenizer_config(manifest, name))
    _write_json(folder / layout.CONFIG, model_config(manifest, tokenizer.end_of_document))
    _write_json(folder / layout.GENERATION_CONFIG, generation_config(tokenizer.end_of_document))


def _write_json(file: Path, table: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
