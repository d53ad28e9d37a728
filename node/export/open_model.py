"""Opens a model by path or link, and evaluates its held-out loss."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from node.checkpoint.folder import MANIFEST_NAME, gather_modules
from node.context.options import own_peer
from node.data.documents import Documents
from node.data.feed import held_out_microbatches, open_documents
from node.data.local_paths import NO_LOCAL_PATHS, LocalPathOptions, local_paths, tokenizer_path
from node.data.packing import Microbatch
from node.data.tokenizers import Tokenizer, open_tokenizer
from node.experts.router import Router, load_router
from node.export.hugging_face import TOKENIZER
from node.export.source import ExportedSource, ModuleSource, Parameters, RoutedModel, is_exported, routed_model
from node.network.loss_report import WHOLE_MODEL, AskedPaths, held_out_loss, loss_report
from protocol.manifest.join_link import link_in
from protocol.manifest.signing import SignedManifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import ModuleId, Reasoned
from swarm.workload.microbatch_sizes import summary_of

log = logging.getLogger(__name__)


class CheckpointSource:
    """ModuleSource of the newest state of each module in a checkpoint. Raises the errors of `gather_modules`."""

    def __init__(self, path: Path) -> None:
        gathered = gather_modules(path)
        for problem in gathered.problems:
            log.warning("ignoring a damaged snapshot: %s", problem)
        self._gathered = gathered
        self.signed: SignedManifest = gathered.signed
        self.modules = gathered.signed.manifest.modules()
        self._manifest_file = path / MANIFEST_NAME

    async def router(self) -> Router | None:
        return await asyncio.to_thread(load_router, self._manifest_file, self.signed.manifest)

    async def module(self, module: ModuleId) -> Parameters:
        return await asyncio.to_thread(self._gathered.module, module)


Place = TypeVar("Place")
Stages = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was opened: the source of its modules, and access to its tokenizer and text."""

    source: ModuleSource
    local_path_options: LocalPathOptions = NO_LOCAL_PATHS
    missing: Mapping[int, str] = field(default_factory=dict)  # Why the swarm lacks a stage

    def narrow(self, paths: AskedPaths) -> tuple[Stages, ...]:
        """Limits the source to the stages that `paths` visit. Returns `AskedPaths.of`, and raises as it does."""
        modules = self.source.modules
        subsets = paths.of(self.source.signed.manifest, {module.stage for module in modules} - {0}, self.missing)
        self.source.modules = tuple(module for module in modules if module.stage in {0}.union(*subsets))
        return subsets

    @property
    def _own(self) -> bool:
        return self.source.signed.author == own_peer()

    def tokenizer_file(self) -> Path | None:
        """Returns the path of the run's tokenizer file, None for bytes. Raises ConfigError if it may not be opened."""
        data = self.source.signed.manifest.data
        if data.tokenizer == "bytes":
            return None
        return _granted(tokenizer_path(data, self.local_path_options.tokenizer, own=self._own))

    def tokenizer(self) -> Tokenizer:
        """Opens the run's tokenizer. Raises the errors of `open_tokenizer`."""
        return open_tokenizer(self.source.signed.manifest, self.tokenizer_file())

    async def documents(self) -> Documents:
        """Opens the run's text. Raises the errors of `open_documents`, and ConfigError if it may not be opened."""
        manifest = self.source.signed.manifest
        where = _granted(local_paths(manifest.data, self.local_path_options, own=self._own))
        return await asyncio.to_thread(open_documents, manifest, where, await self.source.router())


@contextlib.asynccontextmanager
async def open_model(
    target: str,
    on_progress: Callable[[ModuleId, int, int], None] = lambda module, done, total: None,
    local_path_options: LocalPathOptions = NO_LOCAL_PATHS,
    stages_per_path: int | None = None,
) -> AsyncIterator[OpenedModel]:
    """Opens the model in a folder, or in a running swarm (by its link) during the block. Raises SkipstoneError."""
    if (link := link_in(target)) is not None:
        from node.export.swarm_source import open_swarm  # imports the network code, which folders do not need

        async with open_swarm(link, on_progress, stages_per_path=stages_per_path) as source:
            yield OpenedModel(source, local_path_options, source.missing)
        return
    yield await asyncio.to_thread(_open_folder, target, local_path_options)


def _open_folder(target: str, local_path_options: LocalPathOptions) -> OpenedModel:
    folder = Path(target)
    if not folder.is_dir():
        raise ConfigError(
            f"{target!r} is not a join link, a checkpoint or an exported folder",
            hint="Links start with `skipstone:`. --checkpoint-dir and `skipstone export` write folders.",
        )
    if is_exported(folder):
        return OpenedModel(
            ExportedSource(folder),
            replace(local_path_options, tokenizer=local_path_options.tokenizer or folder / TOKENIZER),
        )
    return OpenedModel(CheckpointSource(folder), local_path_options)


def _granted(place: Reasoned[Place | None]) -> Place:
    if place.value is None:
        raise ConfigError(place.reason, hint="Ask the run's author for its text and tokenizer.")
    return place.value


CPU = torch.device("cpu")


async def evaluate_model(
    target: str,
    microbatches: int,
    device: torch.device = CPU,
    paths: AskedPaths = WHOLE_MODEL,
    local_path_options: LocalPathOptions = NO_LOCAL_PATHS,
) -> dict[str, Any]:
    """Computes a model's mean held-out loss, as a `loss_report`. Raises ConfigError, ManifestError, StateError."""
    async with open_model(target, local_path_options=local_path_options) as opened:
        subsets, documents = opened.narrow(paths), await opened.documents()
        manifest, model = opened.source.signed.manifest, await routed_model(opened.source, device)
        texts = await asyncio.to_thread(lambda: list(held_out_microbatches(manifest, microbatches, documents)))
        sizes = summary_of([text.workload for text in texts], manifest.microbatch_tokens)
        losses = await _losses(model, texts, subsets)
    routes = [text.route for text in texts]
    return loss_report([(stages, held_out_loss(routes, losses[stages], sizes)) for stages in subsets])


async def _losses(
    model: RoutedModel, texts: Sequence[Microbatch], subsets: Sequence[Stages]
) -> dict[Stages, list[tuple[float, int]]]:
    """Computes the loss and number of labels of each text, for each subset of stages to visit."""
    losses = {stages: [(0.0, 0)] * len(texts) for stages in subsets}
    for route in sorted({text.route for text in texts}):  # route by route, so that each route's modules are read once
        decoder = await model.decoder(None if model.router is None else route)
        for number, text in enumerate(texts):
            if text.route == route:
                for stages in subsets:
                    loss = await asyncio.to_thread(decoder.through(stages).loss, text)
                    losses[stages][number] = (loss, text.scored)
    return losses
