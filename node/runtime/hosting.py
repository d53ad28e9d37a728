"""Hosts a node's modules: the first one, those of --stages, and unserved ones.

Each module is a peer of its own, with key, port, rounds and checkpoints; the process, the devices and the DHT process
are shared. Peers of one node pass microbatches to each other by a call (`protocol.transport.grpc_transport.LocalLink`).
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Final

import torch

from node.checkpoint.folder import CheckpointFolder
from node.checkpoint.saver import SaveRequests
from node.checkpoint.state import ResumedState
from node.concurrency.compute_thread import ComputeThread, DeviceThreads, Priority
from node.concurrency.task_groups import background, task_scope, unless
from node.context.module_context import ModuleContext
from node.context.options import MOST_HOSTED, NodeOptions
from node.experts.router import Router
from node.model.memory_need import free_memory_on, need_of
from node.network.local_peer import LocalPeer
from node.network.peer_files import router_given, tokenizer_given
from node.network.proofs import Proofs
from node.network.session import NetworkSession, Whereabouts, present
from node.observability.event_json import EventLog, Tee
from node.observability.events import Ended, EventSink, Note
from node.reachability.monitor import reachable
from node.runtime.credit_file import CreditFile, credit_folder
from node.runtime.limits import Limiter
from node.runtime.module_choice import FittingModules, Mover, NextModule, asked_modules, free_memory, stay_for_ever
from node.runtime.resume import find_own, saved_modules
from node.runtime.run_tokenizer import RunTokenizer
from node.runtime.serving import Moving, others_serve, serve_module
from node.start.cut_model import CutModel
from protocol.dht.directory import DirectorySettings
from protocol.identity.invitations import Grant
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySigner, Routes
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest
from protocol.transport.settings import host_of
from swarm.experts.routes import module_at, neediest_route
from swarm.membership.memory_fit import size_text
from swarm.vocabulary.errors import OutOfMemory, SkipstoneError
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, Reasoned, Route

WITHDRAW_S: Final = 2.0
LOOK_S: Final = 2.0
DATA_FIRST_S: Final = 6.0  # Time for the first module to stop: a data node's microbatches still need the others
# Seconds without a peer after which a module is hosted here too. Newcomers and moving nodes come before that.
ALONE_S: Final = 20.0
CHOOSE_S: Final = 8.0  # Longest wait before a node chooses a path
OWNER: Final = "owner"  # Pauses the node, as its limits do
LIMITS: Final = "limits"


class Pauses:
    """Whether its owner or the limits pause the node. A paused node stays in the run without a module."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self.reason = ""  # Of the latest pause, which may be over before the modules have stopped
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self._end: asyncio.TimerHandle | None = None

    def pause(self, reason: str, seconds: float | None = None, by: str = OWNER) -> None:
        """Pauses the node, for `seconds` if given. A later call replaces the reason and the end."""
        self._reasons[by] = reason
        self.reason = "; ".join(self._reasons.values())
        self.over.clear()
        self.begun.set()
        if by == OWNER:
            self._end_after(seconds)

    def resume(self, by: str = OWNER) -> None:
        if by == OWNER:
            self._end_after(None)
        self._reasons.pop(by, None)
        if not self._reasons:
            self.begun.clear()
            self.over.set()

    def _end_after(self, seconds: float | None) -> None:
        if self._end is not None:
            self._end.cancel()
        self._end = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.resume)


@dataclass(frozen=True, slots=True)
class Entered:
    """A run that the node has entered, with everything that its modules share."""

    options: NodeOptions
    identity: Identity  # Of the first module
    signed: SignedManifest
    grant: Grant | None
    router: Router | None
    tokenizer: RunTokenizer
    start: CutModel | None
    devices: Sequence[torch.device]
    events: EventSink
    stop: asyncio.Event
    pauses: Pauses
    limiter: Limiter | None


@dataclass(frozen=True, slots=True)
class Compute:
    """Devices that compute together, and their thread. The first device holds the module's state."""

    threads: DeviceThreads
    thread: ComputeThread


@contextmanager
def computing(devices: Sequence[torch.device]) -> Iterator[Compute]:
    with DeviceThreads(devices) as threads, ComputeThread(set_up=threads.set_up, settle=threads.settle) as thread:
        yield Compute(threads, thread)


class Hosting:
    """The modules of one node, each served by a task."""

    def __init__(self, entered: Entered, moving: Moving | None) -> None:
        self._entered = entered
        self._moving = moving
        self._sessions: dict[int, NetworkSession] = {}  # By the number of the hosted module; the first has 0
        self._computes: list[Compute] = []
        self._stop_beside = asyncio.Event()

    async def run(self, session: NetworkSession, events: EventSink) -> None:
        """Hosts the first module until the node stops, and others beside it. `session`: of the first module."""
        entered = self._entered
        if (places := await unless(entered.stop, self._places(session, events))) is None:
            return
        first, *others = places
        groups = [(device,) for device in entered.devices] if others else [tuple(entered.devices)]
        with ExitStack() as stack:
            self._computes = [stack.enter_context(computing(group)) for group in groups]
            async with task_scope() as tasks:
                host = partial(self._host_beside, session, stop=self._stop_beside, moving=self._moving)
                for number, each in enumerate(others, 1):
                    tasks.create_task(host(each, number))
                if entered.options.may_host_more and not others:
                    tasks.create_task(self._host_unserved(session, first, events))
                hosting = tasks.create_task(self._host(session, events, first, 0, entered.stop, self._moving))
                if entered.limiter is not None:
                    tasks.create_task(unless(entered.stop, entered.limiter.run(self._compute_less)))
                await entered.stop.wait()
                await asyncio.wait((hosting,), timeout=DATA_FIRST_S)
                self._stop_beside.set()

    async def _places(self, session: NetworkSession, events: EventSink) -> list[NodeOptions]:
        """Returns the options of each module hosted from the start: those asked for, or a whole path."""
        entered, options, manifest = self._entered, self._entered.options, self._entered.signed.manifest
        places = options.of_each_module()
        asked, stages = [each.stage for each in places], list(map(str, range(manifest.stages.count)))
        reads = options.reads_text and entered.tokenizer.text.value is not None and options.modules is None
        wants_all = asked == stages or (asked == [None] and reads)
        if manifest.stages.workers == "modules" or not wants_all:
            return places
        need = need_of(manifest, map(ModuleId, range(len(stages))), options.slots_held, options.moments)
        lack = free_memory_on(entered.devices[0]).within(options.memory_limit_bytes).lacks(need)
        if lack is not None and asked == [None] and len(entered.devices) == 1:
            events.emit(Note("info", f"a whole path needs {size_text(need.all)}; this node hosts one module: {lack}"))
            return places
        path: Reasoned[Route] = Reasoned((), "this run has one")
        if manifest.stages.has_experts:
            path = await self._path(session, manifest)
            session.own.route = path.value
        events.emit(Note("info", f"a whole path: {path.reason}"))
        modules = [module_at(path.value, stage) for stage in range(len(stages))]
        session.own.home = {m: entered.identity.for_module(number).peer for number, m in enumerate(modules[1:], 1)}
        return [options.for_module(str(module), number) for number, module in enumerate(modules)]

    async def _path(self, session: NetworkSession, manifest: Manifest) -> Reasoned[Route]:
        """Chooses the path of the checkpoint, or the one with the fewest nodes."""
        stages = range(1, manifest.stages.count)
        if (folder := self._folder(self._entered.options)) is not None:
            peers = [self._entered.identity.for_module(stage).peer for stage in stages]
            saved = await asyncio.to_thread(saved_modules, folder, peers)
            if [module.stage for module in saved] == list(stages):
                return Reasoned(tuple(module.expert for module in saved), "resumed from the checkpoint")
        session.membership_sync.watch(manifest.modules())
        # Nodes that start together should see each other's choice.
        await asyncio.sleep(CHOOSE_S * random.random())  # noqa: S311 - not a secret
        await session.membership_sync.look()
        others = await session.membership_sync.alive(manifest.modules())
        return neediest_route(manifest.stages.experts_of_each, others, session.own.peer)

    def _compute_less(self, share: float) -> None:
        """Limits the share of the time in which the devices compute."""
        for compute in self._computes:
            compute.thread.share = share
        for session in self._sessions.values():
            session.own.share = share

    async def _host_unserved(self, first: NetworkSession, options: NodeOptions, events: EventSink) -> None:
        """Hosts modules without a peer, while they fit. Begins one at a time; each ends once another peer serves it."""
        entered, clock = self._entered, first.own.clock
        alone_since: dict[ModuleId, float] = {}
        more: list[asyncio.Task[None]] = []
        async with task_scope() as tasks:
            while await unless(entered.stop, asyncio.sleep(LOOK_S, result=True)):
                now, here = clock.monotonic(), [each.own for each in self._sessions.values()]
                others = {a.peer for a in first.others() if not first.membership.is_given_up(a.peer)}
                # If no other node is reachable, this one is probably partitioned, unless it is the first one.
                sees = not others <= {own.peer for own in here}
                unserved = self._unserved(first, now) if sees or options.link is None else set()
                jitter_s = ALONE_S * random.random() / 2  # noqa: S311 - other nodes look at the same time
                alone_since = {module: alone_since.get(module, now + jitter_s) for module in unserved}
                due = [module for module, since in alone_since.items() if now - since >= ALONE_S]
                if due:  # a newcomer may be known to the directory only
                    await first.membership_sync.look()
                    due = [module for module in due if module in self._unserved(first, clock.monotonic())]
                more = [task for task in more if not task.done()]
                # Free memory is known once all modules that were begun are loaded.
                all_serve = len(here) == 1 + len(more) and all(own.state is PeerState.SERVING for own in here)
                if not due or not all_serve or len(here) >= (options.modules or MOST_HOSTED):
                    continue
                module = random.choice(due)  # noqa: S311 - not a secret
                alone_since[module] = now  # If it does not fit, or fails, it waits again
                if self._fitting(options, self._computes[0]).of([module]):
                    number = next(number for number in range(1, MOST_HOSTED) if number not in self._sessions)
                    events.emit(Note("info", f"module {module}: nobody serves it, so this node hosts it as well"))
                    more.append(tasks.create_task(self._until_replaced(first, options, module, number, events)))

    def _unserved(self, first: NetworkSession, now: float) -> set[ModuleId]:
        """Returns the modules after stage 0 that no known peer announces."""
        known = {a.module for a in first.others() if not first.membership.is_given_up(a.peer)}
        hosted = {session.own.module for session in self._sessions.values()}
        return {module for module in self._entered.signed.manifest.modules() if module.stage > 0} - known - hosted

    async def _until_replaced(
        self, first: NetworkSession, options: NodeOptions, module: ModuleId, number: int, events: EventSink
    ) -> None:
        """Hosts a module until a peer that started later serves it, or the node stops."""
        stop = asyncio.Event()

        async def follow() -> None:
            await self._stop_beside.wait()
            stop.set()

        async with task_scope() as tasks:
            following = tasks.create_task(follow())
            try:
                place = options.for_module(str(module), number)
                await self._host_beside(first, place, number, stop, partial(_until_others_serve, stop))
            except SkipstoneError as error:  # the node goes on with its other modules
                events.emit(Note("warning", f"module {module} is not hosted as well: {error}"))
            following.cancel()

    async def _host_beside(
        self, first: NetworkSession, options: NodeOptions, number: int, stop: asyncio.Event, moving: Moving | None
    ) -> None:
        """Hosts one more module as a peer with a key and a port of its own, until `stop` is set."""
        entered = self._entered
        identity = entered.identity.for_module(number)
        host = host_of(first.own.addresses[0]) if first.own.addresses else options.advertise
        where = Whereabouts(options.listen, host, options.port)
        settings = DirectorySettings(options.listen, first.directory.port)
        with logged_to(options, identity.peer, entered.events) as events:
            async with present(identity, entered.signed.run, where, settings, SystemClock(), events, first) as session:
                session.own.home = first.own.home
                await self._host(session, events, options, number, stop, moving)

    async def _host(
        self,
        session: NetworkSession,
        events: EventSink,
        options: NodeOptions,
        number: int,
        stop: asyncio.Event,
        moving: Moving | None,
    ) -> None:
        """Hosts a module of this session, or one after another, until `stop` is set."""
        entered, identity = self._entered, session.identity
        signed, run = entered.signed, entered.signed.run
        guests, own = signed.guests(), session.own
        invitation = b"" if entered.grant is None else entered.grant.invitation(run, identity.peer)
        compute = self._compute(number)

        async def manifest(asker: PeerId, question: Question) -> bytes:
            return signed.text

        async with reachable(options.reach, options.advertise, session, events):
            with (
                session.dispatcher.registered(answers={QuestionAbout.MANIFEST: manifest}),
                router_given(session, entered.router),
                tokenizer_given(session, entered.tokenizer.content),
                self._linked(number, session),
            ):
                session.membership_sync.watch(signed.manifest.modules())
                folder = self._folder(options)
                asked = asked_modules(options, signed.manifest)
                resumed = await _find_own(folder, session, asked[0] if len(asked) == 1 else None, events)
                fitting = self._fitting(options, compute, session)
                own.memory_bytes, own.device_bytes = fitting.announced()
                chosen = await fitting.choose(session, resumed, entered.tokenizer.text, events)
                events.emit(Note("info", f"module {chosen.value}: {chosen.reason}"))
                credit = await asyncio.to_thread(CreditFile, credit_folder(options.identity_path), signed, own.peer)
                own.credit, own.name = credit.credit, options.name
                context = ModuleContext(
                    options=options,
                    session=session,
                    routes=Routes(identity, run, guests, invitation),
                    manifest=signed.manifest,
                    module=chosen.value,
                    device=compute.threads.devices[0],
                    threads=compute.threads,
                    compute=compute.thread,
                    events=events,
                    finished=entered.stop.set,
                    saves=SaveRequests(),
                    proofs=Proofs(session, chosen.value, EntrySigner(identity, run, guests, invitation), credit.add),
                    resumed=resumed if resumed.module == chosen.value else ResumedState(),
                    start=entered.start,
                    router=entered.router,
                    text=entered.tokenizer.text,
                )
                async with background(credit.keep()):
                    await self._serve(context, fitting, moving or partial(readiness_to_move, fitting), stop)

    async def _serve(
        self, context: ModuleContext, fitting: FittingModules, moving: Moving, stop: asyncio.Event
    ) -> None:
        """Serves one module after another; after OutOfMemory, serves a smaller module if possible."""
        session, folder = context.session, self._folder(context.options)
        while not stop.is_set():
            shortage, module, place, resumed = None, None, None, ResumedState()
            try:
                module, place = await self._serve_until_pause(context, moving, folder, stop)
            except OutOfMemory as error:
                shortage = OutOfMemory(str(error), hint=error.hint)  # the frames of `error` keep the module alive
            if len(self._sessions) == 1:
                # Deferred work holds tensors of the last module, so drop it before the free memory is measured.
                await context.compute.run(Priority.UPKEEP, context.compute.give_up_idle_work)
            if shortage is not None:
                chosen = await fitting.choose_smaller(shortage, context.module, session)
                session.own.memory_bytes, session.own.device_bytes = fitting.announced()
                context.events.emit(Note("warning", f"{shortage}; module {chosen.value}: {chosen.reason}"))
                module = chosen.value
            if place is not None:
                await self._paused(context, stop)
                module, resumed = context.module, await _find_own(place, session, context.module, context.events)
                if place is not folder:
                    rmtree(place.path, ignore_errors=True)
            if module is None:
                break
            proofs = Proofs(session, module, context.proofs.signer, context.proofs.heard)
            context = replace(context, module=module, saves=SaveRequests(), proofs=proofs, resumed=resumed)
        await session.withdraw(WITHDRAW_S)

    async def _serve_until_pause(
        self, context: ModuleContext, moving: Moving, folder: CheckpointFolder | None, stop: asyncio.Event
    ) -> tuple[ModuleId | None, CheckpointFolder | None]:
        """Returns the module to serve next, None after a stop or a pause; and the folder that keeps a paused state."""
        halt, places = asyncio.Event(), list[CheckpointFolder | None]()

        def kept() -> CheckpointFolder | None:
            if not places and halt.is_set() and not stop.is_set():
                places.append(folder or self._folder(context.options, Path(mkdtemp(prefix="skipstone-paused-"))))
            return places[0] if places else None

        async def halt_after(event: asyncio.Event) -> None:
            await event.wait()
            halt.set()

        async with background(halt_after(stop), halt_after(self._entered.pauses.begun)):
            return await serve_module(context, moving, folder, halt, kept), kept()

    async def _paused(self, context: ModuleContext, stop: asyncio.Event) -> None:
        """Frees the module's memory, and waits until the pause ends or the node stops."""
        session, pauses = context.session, self._entered.pauses
        await session.withdraw(WITHDRAW_S)
        await context.compute.run(Priority.UPKEEP, partial(free_memory, context.device))
        context.events.emit(Note("info", f"module {context.module} is paused: {pauses.reason}"))
        await unless(stop, pauses.over.wait())
        context.events.emit(Note("info", f"module {context.module} goes on"))

    def _folder(self, options: NodeOptions, path: Path | None = None) -> CheckpointFolder | None:
        """Returns the checkpoint folder at `path`, else at --checkpoint-dir; None if neither is given."""
        entered, path = self._entered, path or options.checkpoint_dir
        if path is None:
            return None
        router = b"" if entered.router is None else entered.router.to_bytes()
        return CheckpointFolder(path, entered.signed.run, entered.signed.text, router=router)

    @contextmanager
    def _linked(self, number: int, session: NetworkSession) -> Iterator[None]:
        """Links the session to the node's other sessions within the block."""
        for other in self._sessions.values():
            session.transport.link_locally(other.transport)
        self._sessions[number] = session
        try:
            yield
        finally:
            del self._sessions[number]
            for other in self._sessions.values():
                session.transport.unlink_locally(other.transport)

    def _compute(self, number: int) -> Compute:
        return self._computes[number % len(self._computes)]

    def _fitting(self, options: NodeOptions, compute: Compute, session: NetworkSession | None = None) -> FittingModules:
        def beside() -> list[LocalPeer]:
            others = [each for each in self._sessions.items() if each[1] is not session]
            there = compute.threads.devices
            return [each.own for number, each in others if self._compute(number).threads.devices == there]

        return FittingModules(self._entered.signed.manifest, options, compute.threads.devices[0], beside)


def _until_others_serve(stop: asyncio.Event, context: ModuleContext) -> NextModule:
    """Returns a wait that sets `stop` once a peer that started later serves the module, and never returns."""

    async def wait() -> Reasoned[ModuleId]:
        session = context.session
        while True:
            await asyncio.sleep(LOOK_S)
            replicas = session.membership.replicas(context.module, session.own.clock.monotonic())
            # Only the node that started first gives the module up, so that one of two keeps it. Our own data node sends
            # other replicas little work, as calls within the process are free, so a round together is proof enough.
            is_newer = any(a.incarnation > session.own.incarnation for a in replicas)
            if is_newer and await others_serve(context, context.proofs.in_round):
                stop.set()

    return wait


def readiness_to_move(fitting: FittingModules, context: ModuleContext) -> NextModule:
    if context.module.stage == 0 or not context.options.may_move:
        return stay_for_ever
    return Mover(context.session, context.manifest, context.proofs, fitting).next_module


@contextmanager
def logged_to(options: NodeOptions, peer: PeerId, stream: EventSink) -> Iterator[EventSink]:
    """Yields an event sink that writes to `stream` and, with --log-dir, to a log file of the peer."""
    if options.log_dir is None:
        yield Tee(stream, None)
        return
    with EventLog(options.log_dir, peer) as event_log:
        yield Tee(stream, event_log)
        # Reached only after a clean end; `skipstone check` relies on it.
        event_log.emit(Ended(peer, int(SystemClock().wall() * 1000)))


async def _find_own(
    folder: CheckpointFolder | None, session: NetworkSession, module: ModuleId | None, events: EventSink
) -> ResumedState:
    if folder is None:
        return ResumedState()
    resumed, notes = await asyncio.to_thread(find_own, folder, session.own.peer, module)
    for note in notes:
        events.emit(note)
    return resumed
