"""Exports a run's model as the folder of `node.export.hugging_face`, in a temporary folder that is then renamed."""

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
from node.export.hugging_face import byte_tokenizer, token_files
from node.export.source import ModuleSource, checked_module, is_exported, path_modules
from node.model.initialization import digest_of_tensors
from node.model.shapes import names_in_part, parameter_bytes, parameter_shapes
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
    every: bool = False,
    replace: bool = False,
    shard_bytes: int = layout.SHARD_BYTES,
) -> Export:
    """Exports a route of a model, or `every` module, to a folder, a shard at a time. Raises ConfigError, StateError."""
    manifest = source.signed.manifest
    if every and not manifest.stages.has_experts:
        raise ConfigError(f"run {manifest.name} has a single path", hint="Omit --all to export the whole model.")
    modules = source.modules if every else path_modules(source, route)
    require_free(target, replace=replace)
    whole = layout.full_width(manifest)
    if every:
        shards = tuple(layout.Shard(layout.module_file(each), parameter_shapes(whole, each)) for each in modules)
    else:
        shards = layout.plan_shards(whole, modules, shard_bytes)
    with _written_beside(target) as beside:
        await asyncio.to_thread(_write_tokenizer, beside, manifest, modules, tokenizer_file)
        digests = await _write_parameters(beside, source, modules, shards)
        if every:
            (beside / layout.CONFIG).unlink()  # `transformers` must not load this folder
        elif len(shards) > 1:
            _write_json(beside / layout.INDEX, layout.index_json(shards))
        router = await source.router()
        if router is not None:
            router_file(beside / layout.MANIFEST).write_bytes(router.to_bytes())
        (beside / layout.MANIFEST).write_bytes(source.signed.text)
        origin = layout.origin_json(source.signed, digests, 0 if every else len(shards))
        _write_json(beside / layout.ORIGIN, origin)
        await asyncio.to_thread(lambda: [*map(Storage().sync, (*beside.rglob("*"), beside))])
    size = sum(parameter_bytes(shard.shapes) for shard in shards)
    return Export(target, source.signed.run, len(shards), size)


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
    names = names_in_part(source.signed.manifest, modules)
    waiting: dict[str, Tensor] = {}
    to_write = list(shards)
    for module in modules:
        parameters = dict(await checked_module(source, module))
        digests[module] = await asyncio.to_thread(digest_of_tensors, parameters)
        waiting |= {names[name]: tensor for name, tensor in parameters.items()}
        del parameters  # free the module's dict, so that written tensors do not stay in memory
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


def _write_tokenizer(folder: Path, manifest: Manifest, modules: Sequence[ModuleId], file: Path | None) -> None:
    """Writes the tokenizer, and the files that describe its special tokens."""
    tokenizer = open_tokenizer(manifest, file)
    if isinstance(tokenizer, FileTokenizer):
        assert file is not None, "a tokenizer was opened"
        assert manifest.data.tokenizer_sha256 is not None, "the manifest's schema asks for it"
        content = tokenizer_bytes(file, manifest.data.tokenizer_sha256)  # checked again, because it may have changed
        (folder / layout.TOKENIZER).write_bytes(content)
    else:
        _write_json(folder / layout.TOKENIZER, byte_tokenizer())
    for name, content in token_files(manifest, modules, tokenizer).items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            (folder / name).write_bytes(content.encode())
        else:
            _write_json(folder / name, content)


def _write_json(file: Path, table: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
