"""From what a person names to where modules come from. A new kind of source is one more case of `open_model`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from node.data.tokenizers import Tokenizer, open_tokenizer
from node.export.checkpoint_source import CheckpointSource
from node.export.exported_source import ExportedSource, is_exported
from node.export.layout import TOKENIZER
from node.export.source import ModuleSource
from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A source of modules, and what lies beside it."""

    source: ModuleSource
    tokenizer_file: Path | None = None
    """None when the run's tokenizer lies where the manifest says."""

    def tokenizer(self) -> Tokenizer:
        """As `node.data.tokenizers.open_tokenizer`, with the same errors."""
        return open_tokenizer(self.source.signed.manifest, self.tokenizer_file)


@contextlib.asynccontextmanager
async def open_model(target: str) -> AsyncIterator[OpenedModel]:
    """The model that `target` names; what is behind it is closed again at the end.

    Raises:
        ConfigError: it names no model.
        SkipstoneError: it does, and it cannot be used; as `CheckpointSource` and `ExportedSource`.
    """
    yield await asyncio.to_thread(_open_folder, target)


def _open_folder(target: str) -> OpenedModel:
    folder = Path(target)
    if not folder.is_dir():
        raise ConfigError(
            f"{target!r} is neither a checkpoint nor an exported folder",
            hint="A checkpoint is written by --save DIR, an exported folder by `skipstone export`.",
        )
    if is_exported(folder):
        return OpenedModel(ExportedSource(folder), folder / TOKENIZER)
    return OpenedModel(CheckpointSource(folder))
