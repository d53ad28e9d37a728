"""The choice of the module that a node takes: the one asked for, the one it had, or the one that needs it most; of
those that this machine has room for.

A module that ran out of memory all the same is not taken again, nor is one as large: every such failure leaves fewer,
so it ends in a smaller module or in a message.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable

import torch

from node.checkpoint.state import Resumed
from node.context.options import NodeOptions
from node.data.places import Places
from node.model.memory_need import needs_of, none_fits, room_on, what_fits
from node.model.moments import MomentType
from node.network.session import NetworkSession
from node.observability.events import EventSink, Note
from node.runtime.mover import workload_of
from protocol.manifest.manifest import Manifest
from swarm.membership.placement import choose_module, modules_that_fit
from swarm.membership.room import Need, Room
from swarm.vocabulary.errors import ConfigError, OutOfMemory
from swarm.vocabulary.types import ModuleId, Reasoned

LOOK_AROUND_S = 2.0


class FittingModules:
    """The modules of a run that this machine has room for, now or when it has let go of the one that it holds."""

    def __init__(self, manifest: Manifest, options: NodeOptions, device: torch.device) -> None:
        self.needs = needs_of(manifest, options.slots_held, options.moments)
        self._reckoned = needs_of(manifest, options.slots_held)
        """What others take the needs to be, who know nothing of this node's moments."""
        self._manifest = manifest
        self._options = options
        self._device = device
        self._too_large: Need | None = None
        """With which a module ran out of memory."""
        self._seen = self.room()

    def room(self, held: ModuleId | None = None) -> Room:
        """The room that there is, or would be without what is held."""
        room = room_on(self._device)
        if held is not None:
            room = room.and_back(self.needs[held])
        room = room.within(self._options.memory_limit_bytes)
        if self._too_large is not None:
            tried = self._too_large.all if room.device is None else self._too_large.device
            room = room.within(Reasoned(tried - 1, "as far as has been tried"))
        return room

    def of(self, modules: Iterable[ModuleId], held: ModuleId | None = None) -> list[ModuleId]:
        """Those of the modules that fit."""
        most = self._too_large
        untried = [module for module in modules if most is None or self.needs[module].all < most.all]
        self._seen = self.room(held)
        return modules_that_fit(untried, self._seen, self.needs)

    def announced(self) -> tuple[int, int]:
        """The room to be announced, of the machine's memory and of the device's own. A node that has room for every
        module says nothing: others take that for granted, and older ones could not read it."""
        modules = self._manifest.modules()
        fitting, room = self.of(modules), self.room()
        if len(fitting) == len(modules):
            return 0, 0
        if self._options.moments is not MomentType.FLOAT32:
            for module in fitting:
                room = room.reaching(self._reckoned[module])
        return room.announced

    def told(self) -> Reasoned[tuple[int, ...]]:
        """The stages that fit, with a clause for the person at this machine."""
        return what_fits(self._manifest, self.room(), self._options.slots_held, self._options.moments)

    def ran_out(self, module: ModuleId) -> None:
        """Notes that there was too little memory for the module, which has been let go of: neither it nor one as large
        fits from now on. Frees what is only kept for later, which the system would count as taken."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        known = (self.needs[module], *(() if self._too_large is None else (self._too_large,)))
        self._too_large = min(known, key=lambda need: need.all)

    def refusal(self, modules: list[ModuleId]) -> OutOfMemory:
        """The error that says why none of these, at least one, can be taken, by the room that `of` has just seen."""
        held = self._options.allowance
        return none_fits(self._manifest, modules, self._seen, held.slots, held.moments)


async def choose(
    options: NodeOptions,
    session: NetworkSession,
    fitting: FittingModules,
    manifest: Manifest,
    resumed: Resumed,
    text: Reasoned[Places | None],
    events: EventSink,
) -> Reasoned[ModuleId]:
    """The module asked for, else the one it had, else the one that needs a peer most after a short look around, of
    those that fit.

    Raises:
        ConfigError: that would be stage 0, and the run's text may not be opened; or there is no such stage.
        OutOfMemory: no module that it may take fits into this machine.
    """
    asked = asked_modules(options, manifest)
    wanted = asked or ([] if resumed.module is None else [resumed.module])
    if text.value is None and ModuleId(0) in wanted:
        raise ConfigError(
            f"this node can not take stage 0: {text.reason}", hint="Or take another stage with --no-data."
        )
    if len(asked) == 1:
        return Reasoned(_only(asked[0], fitting), "asked for")
    if resumed.module is not None and (not asked or resumed.module in asked):
        if fitting.of([resumed.module]):
            return Reasoned(resumed.module, "the one in its checkpoint")
        events.emit(Note("warning", f"not the module in its checkpoint: {fitting.refusal([resumed.module])}"))
    reads_text = options.reads_text and text.value is not None
    if options.reads_text and not reads_text:
        events.emit(Note("warning", f"this node takes no stage 0: {text.reason}"))
    if options.link is None and reads_text and not asked:
        return Reasoned(_only(ModuleId(0), fitting), "the first node of a run is a data node")
    allowed = asked or [module for module in manifest.modules() if module.stage > 0 or reads_text]
    candidates = fitting.of(allowed)
    if not candidates:
        raise fitting.refusal(allowed)
    await asyncio.sleep(LOOK_AROUND_S)
    return await _most_needed(session, fitting, manifest, candidates)


async def choose_smaller(
    error: OutOfMemory,
    failed: ModuleId,
    options: NodeOptions,
    session: NetworkSession,
    fitting: FittingModules,
    manifest: Manifest,
) -> Reasoned[ModuleId]:
    """The module to take after one ran out of memory: one that needs less, of those that the node may take and that are
    not stage 0, for which it has not been asked.

    Raises:
        OutOfMemory: the same, when there is none.
    """
    fitting.ran_out(failed)
    asked = asked_modules(options, manifest)
    allowed = [module for module in asked or manifest.modules() if module.stage > 0]
    candidates = [] if options.link is None else fitting.of(allowed)
    if not candidates:
        raise error
    chosen = await _most_needed(session, fitting, manifest, candidates)
    return Reasoned(chosen.value, f"module {failed} ran out of memory; of the smaller ones, {chosen.reason}")


def asked_modules(options: NodeOptions, manifest: Manifest) -> list[ModuleId]:
    """The modules among which the node was told to choose; none where it was told nothing.

    Raises:
        ConfigError: there is no such stage, or no such expert of it.
    """
    if options.asked_stage is None:
        return []
    stage, expert = options.asked_stage, options.asked_expert
    modules = [module for module in manifest.modules() if module.stage == stage and expert in (None, module.expert)]
    if not modules and stage >= manifest.stages.count:
        raise ConfigError(f"stage {stage} does not exist: this run has the stages 0 to {manifest.stages.count - 1}")
    if not modules:
        last = manifest.stages.experts_at(stage) - 1
        raise ConfigError(f"module {options.stage} does not exist: the last expert of stage {stage} is {last}")
    return modules


def _only(module: ModuleId, fitting: FittingModules) -> ModuleId:
    """Raises OutOfMemory when there is no room for the one module that is to be taken."""
    if not fitting.of([module]):
        raise fitting.refusal([module])
    return module


async def _most_needed(
    session: NetworkSession, fitting: FittingModules, manifest: Manifest, candidates: list[ModuleId]
) -> Reasoned[ModuleId]:
    alive = await session.membership_sync.alive(manifest.modules())
    return choose_module(session.own.peer, candidates, alive, workload_of(manifest), needs=fitting.needs)
