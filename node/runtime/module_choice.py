"""Choice of a node's module, and of the module to move to, among modules that fit its memory."""

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import torch

from node.checkpoint.state import ResumedState
from node.context.options import NodeOptions
from node.data.local_paths import LocalPaths
from node.model.memory_need import free_memory_on, needs_of, none_fits, what_fits
from node.model.moments import MomentType
from node.network.local_peer import LocalPeer
from node.network.proofs import Proofs
from node.network.session import NetworkSession
from node.observability.events import EventSink, Note
from node.runtime.malloc import give_back_memory
from protocol.manifest.manifest import Manifest, block_parameters
from swarm.membership.memory_fit import FreeMemory, Need
from swarm.membership.placement import MoveRules, MoveWatch, SwarmView, Workload, choose_module, modules_that_fit
from swarm.vocabulary.errors import ConfigError, OutOfMemory
from swarm.vocabulary.types import ModuleId, Reasoned

LOOK_AROUND_S = 2.0  # Announcements of other newcomers should arrive before the choice


def free_memory(device: torch.device) -> None:
    """Returns the memory of tensors that nothing refers to any more."""
    gc.collect()
    give_back_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class FittingModules:
    """The modules that fit this machine's memory, now or after the hosted module is freed."""

    def __init__(
        self,
        manifest: Manifest,
        options: NodeOptions,
        device: torch.device,
        beside: Callable[[], Sequence[LocalPeer]] = tuple,
    ) -> None:
        """`beside`: the peers of this process that host other modules."""
        self.beside = beside
        self.needs = needs_of(manifest, options.slots_held, options.moments)
        # Needs as other peers assume them: with float32 moments.
        self._reckoned = needs_of(manifest, options.slots_held)
        self._manifest, self._options, self._device = manifest, options, device
        self._too_large: Need | None = None  # Smallest module that ran out of memory.
        self._seen = self.free_memory()

    def free_memory(self, held: ModuleId | None = None) -> FreeMemory:
        """Measures the free memory, plus the memory that module `held` would free."""
        free = free_memory_on(self._device)
        if held is not None:
            free = free.and_back(self.needs[held])
        # Modules allocate their optimizer state at the first step. A limit is for all modules together.
        others = [(peer.module, peer.steps) for peer in self.beside() if peer.module is not None]
        for module, steps in others:
            free = free if steps else free.beside(self.needs[module])
        limit = self._options.memory_limit_bytes
        if limit is not None:
            taken = sum(
                self.needs[module].all if free.device is None else self.needs[module].device for module, _ in others
            )
            limit = replace(limit, value=max(0, limit.value - taken))
        free = free.within(limit)
        if self._too_large is not None:
            tried = self._too_large.all if free.device is None else self._too_large.device
            free = free.within(Reasoned(tried - 1, "below the module that ran out of memory"))
        return free

    def of(self, modules: Iterable[ModuleId], held: ModuleId | None = None) -> list[ModuleId]:
        most = self._too_large
        untried = [module for module in modules if most is None or self.needs[module].all < most.all]
        self._seen = self.free_memory(held)
        return modules_that_fit(untried, self._seen, self.needs)

    def announced(self) -> tuple[int, int]:
        """Returns the free memory of machine and device to announce; zeros if every module fits."""
        modules = self._manifest.modules()
        fitting, free = self.of(modules), self.free_memory()
        if len(fitting) == len(modules):
            return 0, 0
        # Peers reckon with float32 moments: announce enough for all modules that fit with ours.
        if self._options.moments is not MomentType.FLOAT32:
            for module in fitting:
                free = free.reaching(self._reckoned[module])
        return free.announced

    def fitting_stages(self) -> Reasoned[tuple[int, ...]]:
        return what_fits(self._manifest, self.free_memory(), self._options.slots_held, self._options.moments)

    def _ran_out(self, module: ModuleId) -> None:
        """Records that a module ran out of memory, so that neither this module nor a larger one fits."""
        free_memory(self._device)  # before the memory is measured again
        known = (self.needs[module], *(() if self._too_large is None else (self._too_large,)))
        self._too_large = min(known, key=lambda need: need.all)

    def _refusal(self, modules: list[ModuleId]) -> OutOfMemory:
        held = self._options.allowance
        return none_fits(self._manifest, modules, self._seen, held.slots, held.moments)

    async def choose(
        self, session: NetworkSession, resumed: ResumedState, text: Reasoned[LocalPaths | None], events: EventSink
    ) -> Reasoned[ModuleId]:
        """Chooses --stage's module, the checkpoint's, or the one most in need. Raises ConfigError, OutOfMemory."""
        options, asked = self._options, asked_modules(self._options, self._manifest)
        wanted = asked or ([] if resumed.module is None else [resumed.module])
        if text.value is None and ModuleId(0) in wanted:
            raise ConfigError(f"this node cannot take stage 0: {text.reason}", hint="Or take another stage: --no-data.")
        if len(asked) == 1:
            return Reasoned(self._only(asked[0]), "set by --stage")
        if resumed.module is not None and (not asked or resumed.module in asked):
            if self.of([resumed.module]):
                return Reasoned(resumed.module, "resumed from the checkpoint")
            events.emit(Note("warning", f"cannot resume the checkpoint's module: {self._refusal([resumed.module])}"))
        reads_text = options.reads_text and text.value is not None
        if options.reads_text and not reads_text:
            events.emit(Note("warning", f"this node cannot take stage 0: {text.reason}"))
        if options.link is None and reads_text and not asked:  # a new run cannot start without stage 0
            return Reasoned(self._only(ModuleId(0)), "the first node of a run is a data node")
        allowed = asked or [module for module in self._manifest.modules() if module.stage > 0 or reads_text]
        if not allowed:
            why = text.reason if options.reads_text else "--no-data is set"
            hint = (
                "Every node of it trains the whole model on text. Ask for an invitation, or name the text with --text."
            )
            raise ConfigError(f"this run has one stage, and this node cannot take it: {why}", hint=hint)
        candidates = self.of(allowed)
        if not candidates:
            raise self._refusal(allowed)
        await asyncio.sleep(LOOK_AROUND_S)
        return await self._most_needed(session, candidates)

    async def choose_smaller(self, error: OutOfMemory, failed: ModuleId, session: NetworkSession) -> Reasoned[ModuleId]:
        """Chooses the module that most needs a replica, of those smaller than `failed`. Raises `error` if none fits."""
        self._ran_out(failed)
        asked = asked_modules(self._options, self._manifest)
        allowed = [module for module in asked or self._manifest.modules() if module.stage > 0]
        # The first node must stay the data node of its run.
        candidates = [] if self._options.link is None else self.of(allowed)
        if not candidates:
            raise error
        chosen = await self._most_needed(session, candidates)
        return Reasoned(chosen.value, f"module {failed} ran out of memory; among smaller ones: {chosen.reason}")

    def _only(self, module: ModuleId) -> ModuleId:
        if not self.of([module]):
            raise self._refusal([module])
        return module

    async def _most_needed(self, session: NetworkSession, candidates: list[ModuleId]) -> Reasoned[ModuleId]:
        alive = await session.membership_sync.alive(self._manifest.modules())
        return choose_module(session.own.peer, candidates, alive, workload_of(self._manifest), needs=self.needs)


def asked_modules(options: NodeOptions, manifest: Manifest) -> list[ModuleId]:
    """Returns the modules that `--stage` allows; empty if not given. Raises ConfigError."""
    if options.asked_stage is None:
        return []
    stage, expert = options.asked_stage, options.asked_expert
    hint = "Name another one with --stage, or leave the option out."
    modules = [module for module in manifest.modules() if module.stage == stage and expert in (None, module.expert)]
    if not modules and stage >= manifest.stages.count:
        last = manifest.stages.count - 1
        raise ConfigError(f"stage {stage} does not exist: this run has stages 0 to {last}", hint=hint)
    if not modules:
        last = manifest.stages.experts_at(stage) - 1
        what = f"module {options.stage} does not exist: the last expert of stage {stage} is {last}"
        raise ConfigError(what, hint=hint)
    return modules


STATE_BYTES_PER_PARAMETER = 8  # Anchor and outer momentum, both float32.
UNMEASURED_BYTES_PER_S = 4e6
LOOK_S = 30.0  # Interval between looks at the swarm, with 20 % jitter.
LOOK_FOR_EMPTY_S = 2.0
SETTING_UP_S = 10.0  # Time of a move without the download, in seconds.


# Waits until the node should move; returns the target and the reason.
NextModule = Callable[[], Awaitable[Reasoned[ModuleId]]]


def workload_of(manifest: Manifest) -> Workload:
    """Returns the run's modules with their costs, in blocks. Stage 0, with embedding and head, costs one."""
    cost = tuple(float(max(1, blocks)) for blocks in manifest.stages.blocks)
    return Workload(manifest.modules(), cost, manifest.stages.visited_per_path)


async def stay_for_ever() -> Reasoned[ModuleId]:
    """Never returns: the `NextModule` of a data node, or of a node with a fixed stage."""
    await asyncio.Event().wait()
    raise AssertionError("this event is never set")


class Mover:
    """Decides when a node moves to another module, and to which."""

    def __init__(self, session: NetworkSession, manifest: Manifest, proofs: Proofs, fitting: FittingModules) -> None:
        self._session, self._manifest, self._clock = session, manifest, session.own.clock
        self._proofs, self._fitting = proofs, fitting
        self._watch = MoveWatch(workload_of(manifest), MoveRules())
        self._since = self._clock.monotonic()

    async def next_module(self) -> Reasoned[ModuleId]:
        looked = self._clock.monotonic()
        while True:
            jitter = random.uniform(0.8, 1.2)  # noqa: S311 - nodes should not look at the same moment
            await asyncio.sleep(LOOK_FOR_EMPTY_S * jitter)
            now = self._clock.monotonic()
            due = now - looked >= LOOK_S * jitter
            if not due and not self._some_module_is_empty(now):
                continue
            looked = now if due else looked
            await self._proofs.refresh()
            goal = self._watch.consider(self._standing(now), now)
            if goal.value is not None:  # another peer may have gone there already
                await self._session.membership_sync.look()
                goal = self._watch.consider(self._standing(now), now)
            if goal.value is not None:
                return Reasoned(goal.value, goal.reason)

    def _some_module_is_empty(self, now: float) -> bool:
        """Whether a module seems to have no peer. Only a hint, because joining peers are ignored."""
        others = (m for m in self._manifest.modules() if m.stage > 0 and m != self._session.own.module)
        return not all(self._session.membership.is_served(module, now) for module in others)

    def _standing(self, now: float) -> SwarmView:
        membership, own = self._session.membership, self._session.own
        others = tuple(a for a in membership.peers() if not membership.is_given_up(a.peer))
        hosted = {own.module, *(peer.module for peer in self._fitting.beside())}
        goals = [m for m in self._manifest.modules() if m.stage > 0 and m not in hosted]
        rates = (link.goodput_bytes_per_s for link in self._session.transport.figures().values())
        # Estimate the download of the new module by our fastest link.
        rate = max(rates, default=0.0) or UNMEASURED_BYTES_PER_S
        block_s = STATE_BYTES_PER_PARAMETER * block_parameters(self._manifest.model) / rate
        fitting, blocks = self._fitting.of(goals, held=own.module), self._manifest.stages.blocks
        move_s = {module: SETTING_UP_S + block_s * blocks[module.stage] for module in fitting}
        proven, needs = self._proofs.proven, self._fitting.needs
        return SwarmView(own.announcement(), others, now - self._since, move_s, proven, needs)
