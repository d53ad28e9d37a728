"""The choice of a module source by what a person names. A new kind of source is one more case of `open_model`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from node.context.options import own_peer
from node.data.documents import Documents
from node.data.feed import open_documents
from node.data.places import NOTHING_TOLD, ToldPlaces, places, tokenizer_place
from node.data.tokenizers import Tokenizer, open_tokenizer
from node.export.checkpoint_source import CheckpointSource
from node.export.exported_source import ExportedSource, is_exported
from node.export.file_plan import TOKENIZER
from node.export.source import ModuleSource
from protocol.manifest.join_link import is_link, parse_link
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import ModuleId, Reasoned

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A source of modules, and what lies beside it."""

    source: ModuleSource
    told: ToldPlaces = NOTHING_TOLD
    """Where the person says that the run's text and tokenizer are; an export brings its tokenizer along."""

    @property
    def _own(self) -> bool:
        return self.source.signed.author == own_peer()

    def tokenizer_file(self) -> Path | None:
        """The place of the run's tokenizer file, if it has one. Raises ConfigError when nobody who may has said it."""
        data = self.source.signed.manifest.data
        if data.tokenizer == "bytes":
            return None
        return _granted(tokenizer_place(data, self.told.tokenizer, own=self._own))

    def tokenizer(self) -> Tokenizer:
        """Opens the run's tokenizer, as `node.data.tokenizers.open_tokenizer`, with the same errors."""
        return open_tokenizer(self.source.signed.manifest, self.tokenizer_file())

    async def documents(self) -> Documents:
        """Opens the run's text on this machine. Errors as `node.data.feed.open_documents`; ConfigError when it may not
        be opened.
        """
        manifest = self.source.signed.manifest
        where = _granted(places(manifest.data, self.told, own=self._own))
        return await asyncio.to_thread(open_documents, manifest, where, await self.source.router())


def unwatched(module: ModuleId, done: int, total: int) -> None:
    """Ignores a download's progress."""


@contextlib.asynccontextmanager
async def open_model(
    target: str, on_progress: Callable[[ModuleId, int, int], None] = unwatched, told: ToldPlaces = NOTHING_TOLD
) -> AsyncIterator[OpenedModel]:
    """Opens the model that `target` names; what is behind it is closed again at the end.

    Args:
        target: a folder, or the link of a running swarm.
        on_progress: told of downloads: the module, bytes here of all modules, bytes in all.
        told: where the person says that text and tokenizer are.

    Raises:
        ConfigError: it names no model.
        SkipstoneError: it does, and it cannot be used; as `CheckpointSource`, `ExportedSource` and `open_swarm`.
    """
    if is_link(target):
        from node.export.swarm_source import open_swarm  # brings in all of the network, which folders do without

        async with open_swarm(parse_link(target), on_progress) as source:
            yield OpenedModel(source, told)
        return
    yield await asyncio.to_thread(_open_folder, target, told)


def _open_folder(target: str, told: ToldPlaces) -> OpenedModel:
    folder = Path(target)
    if not folder.is_dir():
        raise ConfigError(
            f"{target!r} is no join link, and neither a checkpoint nor an exported folder",
            hint=(
                "A link begins with `skipstone:`; a checkpoint is written by --save DIR, an exported folder "
                "by `skipstone export`."
            ),
        )
    if is_exported(folder):
        return OpenedModel(ExportedSource(folder), replace(told, tokenizer=told.tokenizer or folder / TOKENIZER))
    return OpenedModel(CheckpointSource(folder), told)


def _granted(place: Reasoned[Place | None]) -> Place:
    if place.value is None:
        raise ConfigError(place.reason, hint="The run's author says where to get its text and tokenizer.")
    return place.value
