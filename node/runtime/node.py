"""A node from start to end: enters a run, takes one module after another, works until asked to stop, and leaves in good
order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Protocol

import torch

from node.checkpoint.folder import MANIFEST_NAME, CheckpointFolder
from node.checkpoint.saver import SaveRequests
from node.checkpoint.state import Resumed
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.device_threads import DeviceThreads
from node.concurrency.task_groups import unless
from node.context.module_context import ModuleContext
from node.context.options import NodeOptions
from node.data.places import Places, places
from node.experts.router import Router
from node.experts.router_file import load_router
from node.model.device import choose_devices
from node.model.memory_need import modules_that_fit, need_of, none_fits, room_on
from node.network.proofs import Proofs
from node.network.router_exchange import fetch_router, router_given
from node.network.session import NetworkSession, Whereabouts, present
from node.observability.event_log import Both, Watched, open_event_log
from node.observability.events import Ended, EventSink, Note
from node.reachability.monitor import reachable
from node.runtime.leave_socket import leave_requests, sole_use
from node.runtime.malloc import keep_freed_memory
from node.runtime.mover import MovePeriods, Mover, NextModule, stay_for_ever, workload_of
from node.runtime.resume import find_own
from node.runtime.serving import Moving, serve_module
from node.start.cut_model import open_start
from protocol.dht.directory import DirectorySettings
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.join_link import multiaddr_of
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.membership.placement import choose_module
from swarm.membership.rebalancing import MoveRules
from swarm.vocabulary.errors import ConfigError, Rejected, StateError
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned, RunId

LOOK_AROUND_S = 2.0
WITHDRAW_S = 2.0


class Consent(Protocol):
    """Describes the run to the person at this machine, and asks whether to join it."""

    async def __call__(self, signed: SignedManifest, text: Reasoned[Places | None], own: bool) -> bool:
        """`own`: whether this machine's identity is the manifest's author."""
        ...


async def run_node(
    options: NodeOptions,
    events: EventSink,
    stop: asyncio.Event,
    moving: Moving | None = None,
    consent: Consent | None = None,
) -> None:
    """Runs one node until `stop` is set, or, for a data node, until its steps are done.

    Args:
        moving: says for each module that the node takes when it moves on; `readiness_to_move` if not given.
        consent: asked before the node takes part; None for a node whose owner knows the run.

    Raises:
        Rejected: there is no consent.
        SkipstoneError: it could not start, or something it cannot do without broke.
    """
    keep_freed_memory()
    clock = SystemClock()
    identity = Identity.load_or_create(options.identity_path)
    signed = _read_manifest(options)
    run = signed.run if signed is not None else _run_of(options)
    devices = choose_devices(options.device)
    device = devices.value[0]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    initial = options.link.peers if options.link is not None else ()
    where = Whereabouts(options.listen, options.advertise, options.port, options.dht_port)
    settings = _directory(where, initial, identity, signed, options.relay_bytes_per_hour)
    with _logged(options, identity.peer, events) as logged:
        async with (
            sole_use(options.identity_path),
            leave_requests(options.identity_path, stop.set),
            present(identity, run, where, settings, clock, logged) as session,
        ):
            named = ", ".join(map(str, devices.value))
            logged.emit(Note("info", f"peer {identity.peer}, device {named} ({devices.reason})"))
            if signed is None:
                signed = await unless(stop, session.fetch_manifest(options.patience_s))
                if signed is None:
                    return
            text = await _joined(options, signed, identity.peer, consent, stop)
            start = await asyncio.to_thread(open_start, signed.manifest, options.model)
            router = await unless(stop, _router(options, session, signed.manifest))
            if router is None and signed.manifest.routing is not None:
                return
            async with reachable(options.reach, options.advertise, session, logged):
                with (
                    _manifest_given(session, signed),
                    router_given(session, router),
                    DeviceThreads(devices.value) as threads,
                    ComputeThread(set_up=threads.set_up, settle=threads.settle) as compute,
                ):
                    session.membership_sync.watch(signed.manifest.modules())
                    resumed = await _find_own(options, session, signed, logged)
                    chosen = await _choose(options, session, signed.manifest, resumed, device, text, logged)
                    logged.emit(Note("info", f"module {chosen.value}: {chosen.reason}"))
                    given = ModuleContext(
                        options=options,
                        session=session,
                        manifest=signed.manifest,
                        module=chosen.value,
                        device=device,
                        threads=threads,
                        compute=compute,
                        events=logged,
                        finished=stop.set,
                        saves=SaveRequests(),
                        proofs=Proofs(session),
                        resumed=resumed,
                        start=start,
                        router=router,
                        text=text,
                    )
                    await _serve(given, signed, moving or readiness_to_move, stop)


async def _joined(
    options: NodeOptions, signed: SignedManifest, peer: PeerId, consent: Consent | None, stop: asyncio.Event
) -> Reasoned[Places | None]:
    """Decides to take part in the run; returns the places of its text on this machine.

    Raises:
        ConfigError: no peers are needed for the run.
        Rejected: there is no consent.
    """
    if signed.manifest.stages.count < 2:
        raise ConfigError(
            "this run has one stage, which leaves nothing for other peers to do",
            hint="Train it with `skipstone solo`, or cut the model into at least two stages.",
        )
    own = signed.author == peer
    text = places(signed.manifest.data, options.told, own=own)
    if consent is not None and not await unless(stop, consent(signed, text, own)):
        raise Rejected("the run was not joined", hint="Say yes when asked, or beforehand with --yes.")
    return text


async def _serve(given: ModuleContext, signed: SignedManifest, moving: Moving, stop: asyncio.Event) -> None:
    """Serves one module after the other."""
    session, folder = given.session, None
    if given.options.checkpoint_dir is not None:
        router = b"" if given.router is None else given.router.to_bytes()
        folder = CheckpointFolder(given.options.checkpoint_dir, signed.run, signed.text, router=router)
    while not stop.is_set():
        module = await serve_module(given, moving, folder, stop)
        if module is None:
            break
        await given.compute.run(Priority.UPKEEP, given.compute.give_up_idle_work)
        given = replace(given, module=module, saves=SaveRequests(), proofs=Proofs(session), resumed=Resumed())
    await session.withdraw(WITHDRAW_S)


async def _router(options: NodeOptions, session: NetworkSession, manifest: Manifest) -> Router | None:
    """The run's router: the one beside the manifest or the checkpoint, else of a peer; None when it has none.

    Raises:
        ConfigError, StateError: the file beside the manifest is not there, or another one.
        Unreachable: no peer has given it.
    """
    if options.manifest_path is not None:
        return load_router(options.manifest_path, manifest)
    if options.checkpoint_dir is not None:
        with suppress(ConfigError, StateError):
            return load_router(options.checkpoint_dir / MANIFEST_NAME, manifest)
    return await fetch_router(session, manifest, options.patience_s)


def _manifest_given(session: NetworkSession, signed: SignedManifest) -> AbstractContextManager[None]:
    """Within it, whoever asks for the run's manifest gets it."""

    async def manifest(asker: PeerId, question: Question) -> bytes:
        return signed.text

    return session.dispatcher.registered(answers={QuestionAbout.MANIFEST: manifest})


def readiness_to_move(given: ModuleContext) -> NextModule:
    """The mover of this assignment's node: by what it sees of the swarm, or never."""
    if given.module.stage == 0 or not given.options.may_move:
        return stay_for_ever
    manifest, slots = given.manifest, given.options.slots_held
    own = need_of(manifest, (given.module,), slots)

    def fitting(modules: Sequence[ModuleId]) -> Iterable[ModuleId]:
        return modules_that_fit(manifest, modules, room_on(given.device).and_back(own), slots)

    return Mover(given.session, manifest, given.proofs, fitting, MoveRules(), MovePeriods()).next_module


@contextmanager
def _logged(options: NodeOptions, peer: PeerId, stream: EventSink) -> Iterator[EventSink]:
    """Where the node's events go: what is to be watched to the stream, everything to the log if there is one.

    The log ends with Ended, unless something went wrong.
    """
    if options.log_dir is None:
        yield Watched(stream)
        return
    with open_event_log(options.log_dir, peer) as event_log:
        yield Both(Watched(stream), event_log)
        event_log.emit(Ended(peer, int(SystemClock().wall() * 1000)))


async def _choose(
    options: NodeOptions,
    session: NetworkSession,
    manifest: Manifest,
    resumed: Resumed,
    device: torch.device,
    text: Reasoned[Places | None],
    events: EventSink,
) -> Reasoned[ModuleId]:
    """The module asked for, else the one it had, else the one that needs a peer most after a short look around, of
    those that fit.

    Raises:
        ConfigError: that would be stage 0, and the run's text may not be opened; or there is no such stage.
        ResourceExhausted: no module that it may take fits into this machine.
    """
    asked = _asked(options, manifest)
    wanted = asked or ([] if resumed.module is None else [resumed.module])
    if text.value is None and ModuleId(0) in wanted:
        raise ConfigError(
            f"this node can not take stage 0: {text.reason}", hint="Or take another stage with --no-data."
        )
    if len(asked) == 1:
        return Reasoned(asked[0], "asked for")
    if resumed.module is not None and (not asked or resumed.module in asked):
        return Reasoned(resumed.module, "the one in its checkpoint")
    reads_text = options.reads_text and text.value is not None
    if options.reads_text and not reads_text:
        events.emit(Note("warning", f"this node takes no stage 0: {text.reason}"))
    if options.link is None and reads_text and not asked:
        return Reasoned(ModuleId(0), "the first node of a run is a data node")
    allowed = asked or [module for module in manifest.modules() if module.stage > 0 or reads_text]
    room = room_on(device)
    fitting = list(modules_that_fit(manifest, allowed, room, options.slots_held))
    if not fitting:
        raise none_fits(manifest, allowed, room, options.slots_held)
    await asyncio.sleep(LOOK_AROUND_S)
    alive = await session.membership_sync.alive(manifest.modules())
    return choose_module(session.own.peer, fitting, alive, workload_of(manifest))


def _asked(options: NodeOptions, manifest: Manifest) -> list[ModuleId]:
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


async def _find_own(
    options: NodeOptions, session: NetworkSession, signed: SignedManifest, events: EventSink
) -> Resumed:
    if options.checkpoint_dir is None:
        return Resumed()
    folder = CheckpointFolder(options.checkpoint_dir, signed.run, signed.text)
    asked = _asked(options, signed.manifest)
    wanted = asked[0] if len(asked) == 1 else None
    resumed, notes = await asyncio.to_thread(find_own, folder, session.own.peer, wanted)
    for note in notes:
        events.emit(note)
    return resumed


def _read_manifest(options: NodeOptions) -> SignedManifest | None:
    if options.manifest_path is None:
        return None
    try:
        text = options.manifest_path.read_bytes()
    except OSError as error:
        raise ConfigError(f"manifest {options.manifest_path}: {error.strerror}") from None
    return read_signed_manifest(text, None if options.link is None else options.link.run)


def _run_of(options: NodeOptions) -> RunId:
    assert options.link is not None, "NodeOptions has a link or a manifest"
    return options.link.run


def _directory(
    where: Whereabouts,
    initial: tuple[str, ...],
    identity: Identity,
    signed: SignedManifest | None,
    relay_bytes_per_hour: int,
) -> DirectorySettings:
    others = tuple(address for address in initial if not address.endswith(f"/{identity.peer}"))
    announce = (multiaddr_of(where.advertise, where.dht_port),) if where.advertise and where.dht_port else ()
    settings = DirectorySettings(
        where.listen, where.dht_port, announce, others, relay_bytes_per_hour=relay_bytes_per_hour
    )
    if signed is None:
        return settings
    return replace(settings, experts=signed.manifest.stages.experts_of_each)
