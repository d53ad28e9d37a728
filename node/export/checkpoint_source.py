"""A checkpoint's folder as a source of modules.

It stands alone because each kind of source is a module of its own.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from node.checkpoint.folder import MANIFEST_NAME
from node.checkpoint.gather import gather_modules
from node.experts.router import Router, load_router
from node.export.source import Parameters
from protocol.manifest.signing import SignedManifest
from swarm.vocabulary.types import ModuleId

log = logging.getLogger(__name__)


class CheckpointSource:
    """A source of the newest state of each module that the folder has; implements `ModuleSource`.

    Raises:
        ConfigError, ManifestError, CorruptSnapshot, StateError: as `gather_modules`.
    """

    def __init__(self, path: Path) -> None:
        gathered = gather_modules(path)
        for problem in gathered.problems:
            log.warning("damaged snapshot passed over: %s", problem)
        self._parameters = gathered.modules
        self.signed: SignedManifest = gathered.signed
        self.modules = gathered.signed.manifest.modules()
        self._manifest_file = path / MANIFEST_NAME

    async def router(self) -> Router | None:
        return await asyncio.to_thread(load_router, self._manifest_file, self.signed.manifest)

    async def module(self, module: ModuleId) -> Parameters:
        return await asyncio.to_thread(self._parameters.__getitem__, module)
