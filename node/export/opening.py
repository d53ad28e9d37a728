"""From what a person names to where modules come from. A new kind of source is one more case of `open_model`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from node.data.tokenizers import Tokenizer, open_tokenizer
from node.export.checkpoint_source import CheckpointSource
from node.export.exported_source import ExportedSource, is_exported
from node.export.layout import TOKENIZER
from node.export.source import ModuleSource
from protocol.join_link import is_link, parse_link
from swarm.errors import ConfigError
from swarm.vocabulary import ModuleId


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A source of modules, and what lies beside it."""

    source: ModuleSource
    tokenizer_file: Path | None = None
    """None when the run's tokenizer lies where the manifest says."""

    def tokenizer(self) -> Tokenizer:
        """As `node.data.tokenizers.open_tokenizer`, with the same errors."""
        return open_tokenizer(self.source.signed.manifest, self.tokenizer_file)


def unwatched(module: ModuleId, done: int, total: int) -> None:
    """For whoever does not want to know how far a download is."""


@contextlib.asynccontextmanager
async def open_model(
    target: str, on_progress: Callable[[ModuleId, int, int], None] = unwatched
) -> AsyncIterator[OpenedModel]:
    """The model that `target` names; what is behind it is closed again at the end.

    Args:
        target: a folder, or the link of a running swarm.
        on_progress: told of downloads: the module, bytes here of all modules, bytes in all.

    Raises:
        ConfigError: it names no model.
        SkipstoneError: it does, and it cannot be used; as `CheckpointSource`, `ExportedSource` and `open_swarm`.
    """
    if is_link(target):
        from node.export.swarm_source import open_swarm  # brings in all of the network, which folders do without

        async with open_swarm(parse_link(target), on_progress) as source:
            yield OpenedModel(source)
        return
    yield await asyncio.to_thread(_open_folder, target)


def _open_folder(target: str) -> OpenedModel:
    folder = Path(target)
    if not folder.is_dir():
        raise ConfigError(
            f"{target!r} is no join link, and neither a checkpoint nor an exported folder",
            hint="A link begins with `skipstone:`; a checkpoint is written by --save DIR, an exported folder by `skipstone export`.",
        )
    if is_exported(folder):
        return OpenedModel(ExportedSource(folder), folder / TOKENIZER)
    return OpenedModel(CheckpointSource(folder))
