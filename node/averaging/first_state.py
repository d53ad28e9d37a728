"""The first state of a new replica in a run that starts from an existing model: the anchor, or a part of the model."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from random import Random
from typing import Final

from node.averaging.anchor.anchor import Anchor, initial_anchor
from node.averaging.module_rounds import RoundNews
from node.averaging.state_sync.download import MOST_ASKED, StateDownloads
from node.averaging.state_sync.partial_state import STATE_CODECS, FreshSpace
from node.context.module_context import ModuleContext
from node.model.memory_need import require_room
from node.observability.events import Note
from node.start.cut_model import first_version, module_layout
from swarm.averaging.schedule import choose_version
from swarm.vocabulary.errors import NoQuorum, Stalled

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class FirstState:
    """Initial anchor, or None to keep the weights of the seed or checkpoint."""

    anchor: Anchor | None = None


async def first_state(given: ModuleContext) -> FirstState:
    """Gets the anchor for the node's replica, however long that takes. Raises ConfigError, ResourceExhausted."""
    if given.manifest.start is None or given.resumed.state is not None:
        return FirstState()
    allowance = given.options.allowance
    require_room(given.manifest, (given.module,), given.device, allowance.slots, allowance.moments)
    if given.start is not None:
        return FirstState(await asyncio.to_thread(given.start.anchor, given.module))
    return FirstState(await _Fetch(given).anchor())


class _Fetch:
    """The download of a replica's first anchor."""

    def __init__(self, given: ModuleContext) -> None:
        session, manifest, module = given.session, given.manifest, given.module
        self._given = given
        self._layout = module_layout(manifest, module)
        self._first = first_version(manifest, module)
        self._news = RoundNews(session.own.peer, module, session.own.clock, given.events)
        self._random = Random()  # noqa: S311 - spreads the load over donors; no secret
        folder = given.options.checkpoint_dir
        self._downloads = StateDownloads(
            session,
            module,
            FreshSpace(self._layout),
            STATE_CODECS[manifest.codecs.state],
            None if folder is None else folder / session.own.peer / "download",
            self._news.progressed,
        )

    async def anchor(self) -> Anchor:
        await self._given.session.membership_sync.looked.wait()
        pause_s = PAUSE_S
        while True:
            try:
                return await self._agreed() or await self._from_the_start()
            except (NoQuorum, Stalled) as error:
                log.info("module %s: %s", self._given.module, error)
                if pause_s == PAUSE_S:
                    self._given.events.emit(Note("info", f"waits for the weights of module {self._given.module}"))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _agreed(self) -> Anchor | None:
        membership, module = self._given.session.membership, self._given.module
        announced = {a.peer: a.anchor for a in membership.with_state(module) if a.anchor is not None}
        version = choose_version(announced).value
        if version is None or version.round == 0:
            return None
        donors = tuple(peer for peer, stands in announced.items() if stands == version)
        self._news.fetching(version)
        try:
            return await self._downloads.catch_up(version, donors)
        except (NoQuorum, Stalled) as error:  # they may have gone on, or may never have had it
            log.info("module %s: %s", module, error)
            return None
        finally:
            self._news.ended()

    async def _from_the_start(self) -> Anchor:
        """The module's part of the existing model. Raises NoQuorum or Stalled."""
        self._news.fetching(self._first)
        known = list(self._given.session.membership.peers())
        self._random.shuffle(known)  # more than are asked at once are asked in turns
        # Peers that announce it, then data nodes (the author runs one), then all others.
        known.sort(key=lambda a: (a.anchor != self._first, a.module is None or a.module.stage > 0))
        try:
            parameters = await self._downloads.parameters(self._first, [a.peer for a in known][:MOST_ASKED])
        finally:
            self._news.ended()
        return await asyncio.to_thread(initial_anchor, self._layout, parameters)
