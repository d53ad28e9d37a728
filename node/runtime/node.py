"""One node from start to end: enters a run, serves one module after another, and leaves cleanly."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from node.checkpoint.folder import MANIFEST_NAME
from node.concurrency.task_groups import background, unless
from node.context.options import NodeOptions, is_default_identity
from node.data.local_paths import LocalPaths, local_paths
from node.experts.router import Router, load_router
from node.model.device import choose_devices, use_cores
from node.network.client import Statuses, statuses_of
from node.network.peer_files import fetch_router
from node.network.session import NetworkSession, Whereabouts, full_link, present
from node.observability.event_json import Tee
from node.observability.events import EventSink, Note
from node.runtime.hosting import LIMITS, Entered, Hosting, Pauses, logged_to
from node.runtime.leave_socket import leave_requests, sole_use
from node.runtime.limits import Limiter, Standing, read_limits, settings_path
from node.runtime.malloc import keep_freed_memory
from node.runtime.module_choice import FittingModules, asked_modules
from node.runtime.run_tokenizer import run_tokenizer
from node.runtime.serving import Moving
from node.start.cut_model import open_start
from protocol.dht.directory import DirectorySettings
from protocol.identity.invitations import HOW_TO_BE_INVITED, Grant
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.libp2p.child_process import set_open_files
from protocol.manifest.join_link import JoinLink, multiaddr_of
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.vocabulary.errors import ConfigError, Declined, StateError
from swarm.vocabulary.types import Reasoned

SAMPLE = 1  # Other peers whose status the screen needs: a data node for the loss
OWN_INVITATION_S = 10 * 365 * 86_400.0


# Shows the run until cancelled: its statuses, the peers of this node, and the node's limits.
Show = Callable[[Statuses, Callable[[], tuple[str, ...]], Callable[[], Standing | None]], Coroutine[None, None, None]]


# Asks the person about a run: the text to read, the stages that fit, and whether it is their own run.
Consent = Callable[[SignedManifest, Reasoned[LocalPaths | None], Reasoned[tuple[int, ...]], bool], Awaitable[bool]]


async def run_node(
    options: NodeOptions,
    events: EventSink,
    stop: asyncio.Event,
    moving: Moving | None = None,
    consent: Consent | None = None,
    show: Show | None = None,
) -> None:
    """Runs one node until `stop` is set or its steps are done. Raises Rejected without consent, SkipstoneError."""
    keep_freed_memory()
    set_open_files(at_most=False)
    pauses, page, stream = Pauses(), None, events
    if options.dashboard is not None:
        from node.web.server import RunPage, served  # they need libraries of the command line

        page = RunPage(leave=stop.set, pause=partial(pauses.pause, "at the page"), resume=pauses.resume)
        events = Tee(events, page)
    verbs: dict[str, Callable[[float | None], None]] = {"resume": lambda _: pauses.resume()}
    verbs["pause"] = partial(pauses.pause, "by `skipstone pause`")
    named = Identity.load_or_create(options.identity_path)
    signed = _read_manifest(options)
    link = None if options.link is None else await unless(stop, full_link(options.link, options.patience_s))
    if signed is None and link is None:
        return
    run = signed.run if signed is not None else cast(JoinLink, link).run
    identity = named.for_run(run) if is_default_identity(options.identity_path) else named
    devices = choose_devices(options.device)
    use_cores(options.threads)
    where = Whereabouts(options.listen, options.advertise, options.port)
    settings = _directory(options, identity, link, signed)
    with logged_to(options, identity.peer, events) as logged:
        async with (
            sole_use(options.identity_path),
            leave_requests(options.identity_path, stop.set, verbs),
            present(identity, run, where, settings, SystemClock(), logged) as session,
        ):
            used = ", ".join(map(str, devices.value))
            logged.emit(Note("info", f"peer {identity.peer}, device {used} ({devices.reason})"))
            if signed is None:
                signed = await unless(stop, session.fetch_manifest(options.patience_s))
                if signed is None:
                    return
            guests = signed.guests()
            grant, own = options.grant, signed.author == named.peer
            if named.peer in guests.hosts and identity is not named:
                grant = Grant.issue(named, run, 1, int(session.own.clock.wall() + OWN_INVITATION_S))
            invitation = b"" if grant is None else grant.invitation(run, identity.peer)
            uninvited = guests.fault(identity.peer, invitation, session.own.clock.wall())
            text = await _joined(options, signed, devices.value[0], uninvited, consent, stop, own=own)
            start = await asyncio.to_thread(open_start, signed.manifest, options.model)
            router = await unless(stop, _router(options, session, signed.manifest))
            if router is None and signed.manifest.routing is not None:
                return
            tokenizer = await unless(stop, run_tokenizer(options, session, signed.manifest.data, text, own=own))
            if tokenizer is None:
                return
            limiter = _limiter(options, session, logged, pauses)
            shared = identity, signed, grant, router, tokenizer, start, devices.value, events, stop, pauses, limiter
            entered = Entered(options, *shared)
            async with AsyncExitStack() as stack:
                standing = (lambda: None) if limiter is None else limiter.standing
                if show is not None:
                    sampled = partial(statuses_of, session, signed.manifest, SAMPLE)
                    await stack.enter_async_context(background(show(sampled, session.transport.here, standing)))
                if page is not None and options.dashboard is not None:
                    page.standing, page.limit = standing, None if limiter is None else limiter.change
                    page.link = lambda: str(session.link)
                    statuses = partial(statuses_of, session, signed.manifest)
                    shown = served(page, options.dashboard, statuses, session.transport.here)
                    at = await stack.enter_async_context(shown)
                    # Not to the log: the link has a secret.
                    stream.emit(Note("info", f"the run's page, for this machine only: {at}"))
                await Hosting(entered, moving).run(session, logged)


def _limiter(options: NodeOptions, session: NetworkSession, events: EventSink, pauses: Pauses) -> Limiter | None:
    """Returns the limiter of a node, None for one of a local swarm without --settings. Raises ConfigError."""
    if options.settings is None and options.stop_on_eof:
        return None
    path = options.settings or settings_path()
    read_limits(path)  # malformed ones must not be ignored at the start
    usage = options.identity_path.with_name(options.identity_path.name + ".usage")
    pause, resume = partial(pauses.pause, by=LIMITS), partial(pauses.resume, LIMITS)
    return Limiter(path, usage, session.transport.traffic, events, pause, resume)


async def _joined(
    options: NodeOptions,
    signed: SignedManifest,
    device: torch.device,
    uninvited: str | None,
    consent: Consent | None,
    stop: asyncio.Event,
    *,
    own: bool,
) -> Reasoned[LocalPaths | None]:
    """Asks for consent; returns the text's path. Raises Rejected without consent."""
    text = local_paths(signed.manifest.data, options.local_path_options, own=own)
    if uninvited is not None:
        text = Reasoned(None, f"{uninvited}. {HOW_TO_BE_INVITED}")
    if consent is not None:
        fitting = FittingModules(signed.manifest, options, device).fitting_stages()
        if not await unless(stop, consent(signed, text, fitting, own)):
            raise Declined("the run was not joined")
    return text


async def _router(options: NodeOptions, session: NetworkSession, manifest: Manifest) -> Router | None:
    """Loads the expert router, from a file or from peers. Raises ConfigError, StateError, Unreachable."""
    if options.manifest_path is not None:
        return load_router(options.manifest_path, manifest)
    if options.checkpoint_dir is not None:
        with suppress(ConfigError, StateError):
            return load_router(options.checkpoint_dir / MANIFEST_NAME, manifest)
    return await fetch_router(session, manifest, options.patience_s)


def _read_manifest(options: NodeOptions) -> SignedManifest | None:
    if options.manifest_path is None:
        return None
    try:
        text = options.manifest_path.read_bytes()
    except OSError as error:
        raise ConfigError(f"manifest {options.manifest_path}: {error.strerror}") from None
    signed = read_signed_manifest(text, None)
    for each in options.of_each_module():
        asked_modules(each, signed.manifest)  # refuses an unknown stage before the network starts
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
