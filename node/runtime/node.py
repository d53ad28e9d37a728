"""One node from start to end: enters a run, serves one module after another, and leaves cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from node.checkpoint.folder import MANIFEST_NAME, CheckpointFolder
from node.checkpoint.saver import SaveRequests
from node.checkpoint.state import ResumedState
from node.concurrency.compute_thread import ComputeThread, DeviceThreads, Priority
from node.concurrency.task_groups import unless
from node.context.module_context import ModuleContext
from node.context.options import NodeOptions, is_default_identity
from node.data.local_paths import LocalPaths, local_paths
from node.experts.router import Router, load_router
from node.model.device import choose_devices
from node.network.peer_files import fetch_router, router_given, tokenizer_given
from node.network.proofs import Proofs
from node.network.session import NetworkSession, Whereabouts, full_link, present
from node.observability.event_json import EventLog, Tee
from node.observability.events import Ended, EventSink, Note
from node.reachability.monitor import reachable
from node.runtime.leave_socket import leave_requests, sole_use
from node.runtime.malloc import keep_freed_memory
from node.runtime.module_choice import FittingModules, Mover, NextModule, asked_modules, stay_for_ever
from node.runtime.resume import find_own
from node.runtime.run_tokenizer import run_tokenizer
from node.runtime.serving import Moving, serve_module
from node.start.cut_model import open_start
from protocol.dht.directory import DirectorySettings
from protocol.identity.invitations import HOW_TO_BE_INVITED, Grant
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySigner, Routes
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.join_link import JoinLink, multiaddr_of
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.vocabulary.errors import ConfigError, Declined, OutOfMemory, StateError
from swarm.vocabulary.types import PeerId, Reasoned

WITHDRAW_S = 2.0
OWN_INVITATION_S = 10 * 365 * 86_400.0


# Asks the person about a run: the text to read, the stages that fit, and whether it is their own run.
Consent = Callable[[SignedManifest, Reasoned[LocalPaths | None], Reasoned[tuple[int, ...]], bool], Awaitable[bool]]


async def run_node(
    options: NodeOptions,
    events: EventSink,
    stop: asyncio.Event,
    moving: Moving | None = None,
    consent: Consent | None = None,
) -> None:
    """Runs one node until `stop` is set or its steps are done. Raises Rejected without consent, SkipstoneError."""
    keep_freed_memory()
    clock = SystemClock()
    named = Identity.load_or_create(options.identity_path)
    signed = _read_manifest(options)
    link = None if options.link is None else await unless(stop, full_link(options.link, options.patience_s))
    if signed is None and link is None:
        return
    run = signed.run if signed is not None else cast(JoinLink, link).run
    identity = named.for_run(run) if is_default_identity(options.identity_path) else named
    devices = choose_devices(options.device)
    device = devices.value[0]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    where = Whereabouts(options.listen, options.advertise, options.port)
    settings = _directory(options, identity, link, signed)
    with _logged(options, identity.peer, events) as logged:
        async with (
            sole_use(options.identity_path),
            leave_requests(options.identity_path, stop.set),
            present(identity, run, where, settings, clock, logged) as session,
        ):
            used = ", ".join(map(str, devices.value))
            logged.emit(Note("info", f"peer {identity.peer}, device {used} ({devices.reason})"))
            if signed is None:
                signed = await unless(stop, session.fetch_manifest(options.patience_s))
                if signed is None:
                    return
            fitting = FittingModules(signed.manifest, options, device)
            guests = signed.guests()
            grant, own = options.grant, signed.author == named.peer
            if named.peer in guests.hosts and identity is not named:
                grant = Grant.issue(named, run, 1, int(clock.wall() + OWN_INVITATION_S))
            invitation = b"" if grant is None else grant.invitation(run, identity.peer)
            uninvited = guests.fault(identity.peer, invitation, clock.wall())
            text = await _joined(options, signed, fitting, uninvited, consent, stop, own=own)
            start = await asyncio.to_thread(open_start, signed.manifest, options.model)
            router = await unless(stop, _router(options, session, signed.manifest))
            if router is None and signed.manifest.routing is not None:
                return
            text_of_manifest = signed.text

            async def manifest(asker: PeerId, question: Question) -> bytes:
                return text_of_manifest

            tokenizer = await unless(stop, run_tokenizer(options, session, signed.manifest.data, text, own=own))
            if tokenizer is None:
                return
            text = tokenizer.text
            async with reachable(options.reach, options.advertise, session, logged):
                with (
                    session.dispatcher.registered(answers={QuestionAbout.MANIFEST: manifest}),
                    router_given(session, router),
                    tokenizer_given(session, tokenizer.content),
                    DeviceThreads(devices.value) as threads,
                    ComputeThread(set_up=threads.set_up, settle=threads.settle) as compute,
                ):
                    session.membership_sync.watch(signed.manifest.modules())
                    resumed = await _find_own(options, session, signed, logged)
                    session.own.memory_bytes, session.own.device_bytes = fitting.announced()
                    chosen = await fitting.choose(session, resumed, text, logged)
                    logged.emit(Note("info", f"module {chosen.value}: {chosen.reason}"))
                    context = ModuleContext(
                        options=options,
                        session=session,
                        routes=Routes(identity, run, guests, invitation),
                        manifest=signed.manifest,
                        module=chosen.value,
                        device=device,
                        threads=threads,
                        compute=compute,
                        events=logged,
                        finished=stop.set,
                        saves=SaveRequests(),
                        proofs=Proofs(session, chosen.value, EntrySigner(identity, run, guests, invitation)),
                        resumed=resumed if resumed.module == chosen.value else ResumedState(),
                        start=start,
                        router=router,
                        text=text,
                    )
                    await _serve(context, signed, fitting, moving or partial(readiness_to_move, fitting), stop)


async def _joined(
    options: NodeOptions,
    signed: SignedManifest,
    fitting: FittingModules,
    uninvited: str | None,
    consent: Consent | None,
    stop: asyncio.Event,
    *,
    own: bool,
) -> Reasoned[LocalPaths | None]:
    """Asks for consent; returns the text's path. Raises ConfigError for a one-stage run, Rejected without consent."""
    if signed.manifest.stages.count < 2:
        raise ConfigError(
            "this run has only one stage, so it cannot be shared",
            hint="Train it with `skipstone solo`, or cut the model into at least two stages.",
        )
    text = local_paths(signed.manifest.data, options.local_path_options, own=own)
    if uninvited is not None:
        text = Reasoned(None, f"{uninvited}. {HOW_TO_BE_INVITED}")
    if consent is not None and not await unless(stop, consent(signed, text, fitting.fitting_stages(), own)):
        raise Declined("the run was not joined")
    return text


async def _serve(
    context: ModuleContext, signed: SignedManifest, fitting: FittingModules, moving: Moving, stop: asyncio.Event
) -> None:
    """Serves one module after another; after OutOfMemory, serves a smaller module if possible."""
    session, folder = context.session, None
    if context.options.checkpoint_dir is not None:
        router = b"" if context.router is None else context.router.to_bytes()
        folder = CheckpointFolder(context.options.checkpoint_dir, signed.run, signed.text, router=router)
    while not stop.is_set():
        shortage = None
        module = None
        try:
            module = await serve_module(context, moving, folder, stop)
        except OutOfMemory as error:
            shortage = OutOfMemory(str(error), hint=error.hint)  # the frames of `error` keep the module alive
        # Deferred work holds tensors of the last module, so drop it before the free memory is measured.
        await context.compute.run(Priority.UPKEEP, context.compute.give_up_idle_work)
        if shortage is not None:
            chosen = await fitting.choose_smaller(shortage, context.module, session)
            session.own.memory_bytes, session.own.device_bytes = fitting.announced()
            context.events.emit(Note("warning", f"{shortage}; module {chosen.value}: {chosen.reason}"))
            module = chosen.value
        if module is None:
            break
        proofs = Proofs(session, module, context.proofs.signer)
        context = replace(context, module=module, saves=SaveRequests(), proofs=proofs, resumed=ResumedState())
    await session.withdraw(WITHDRAW_S)


async def _router(options: NodeOptions, session: NetworkSession, manifest: Manifest) -> Router | None:
    """Loads the expert router, from a file or from peers. Raises ConfigError, StateError, Unreachable."""
    if options.manifest_path is not None:
        return load_router(options.manifest_path, manifest)
    if options.checkpoint_dir is not None:
        with suppress(ConfigError, StateError):
            return load_router(options.checkpoint_dir / MANIFEST_NAME, manifest)
    return await fetch_router(session, manifest, options.patience_s)


def readiness_to_move(fitting: FittingModules, context: ModuleContext) -> NextModule:
    if context.module.stage == 0 or not context.options.may_move:
        return stay_for_ever
    return Mover(context.session, context.manifest, context.proofs, fitting).next_module


@contextmanager
def _logged(options: NodeOptions, peer: PeerId, stream: EventSink) -> Iterator[EventSink]:
    """Yields an event sink that writes to `stream` and, with --log-dir, to a log file."""
    if options.log_dir is None:
        yield Tee(stream, None)
        return
    with EventLog(options.log_dir, peer) as event_log:
        yield Tee(stream, event_log)
        # Reached only after a clean end; `skipstone check` relies on it.
        event_log.emit(Ended(peer, int(SystemClock().wall() * 1000)))


async def _find_own(
    options: NodeOptions, session: NetworkSession, signed: SignedManifest, events: EventSink
) -> ResumedState:
    if options.checkpoint_dir is None:
        return ResumedState()
    folder = CheckpointFolder(options.checkpoint_dir, signed.run, signed.text)
    asked = asked_modules(options, signed.manifest)
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
    signed = read_signed_manifest(text, None)
    asked_modules(options, signed.manifest)  # refuses an unknown --stage before the network starts
    return signed


def _directory(
    options: NodeOptions, identity: Identity, link: JoinLink | None, signed: SignedManifest | None
) -> DirectorySettings:
    host, port, initial = options.advertise, options.dht_port, () if link is None else link.peers
    settings = DirectorySettings(
        options.listen,
        port,
        (multiaddr_of(host, port),) if host and port else (),
        # A restarted first node finds its own address in the link.
        tuple(address for address in initial if not address.endswith(f"/{identity.peer}")),
        relay_bytes_per_hour=options.relay_bytes_per_hour,
    )
    return settings if signed is None else replace(settings, experts=signed.manifest.stages.experts_of_each)
