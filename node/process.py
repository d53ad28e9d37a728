"""A node from start to end: enters a run, takes a module, works until asked to stop, and leaves in good order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import torch

from node.checkpoint import CheckpointFolder
from node.clock import SystemClock
from node.compute import ComputeThread, Priority
from node.device import choose_device
from node.duty import Assignment, Duty, data_duty, hop_duty
from node.event_log import Both, Watched, open_event_log
from node.events import Ended, EventSink, NodeStatus, Note
from node.options import NodeOptions
from node.presence import Presence, Whereabouts, present
from node.report import node_summary, status_json
from node.task_scope import task_scope
from protocol.directory import DirectorySettings
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.memory import keep_freed_memory
from protocol.seams import Question, QuestionAbout
from protocol.signed_manifest import SignedManifest, read_signed_manifest
from swarm.errors import ConfigError
from swarm.placement import choose_module
from swarm.vocabulary import ModuleId, PeerId, PeerState, Reasoned, RunId

log = logging.getLogger(__name__)

DRAIN_S = 15.0
"""Less than whoever asked for the stop waits before using force: there is still something to save."""
LOOK_AROUND_S = 2.0
REPORT_S = 2.0


async def run_node(options: NodeOptions, events: EventSink, stop: asyncio.Event) -> None:
    """Runs one node until `stop` is set, or, for a data node, until its steps are done.

    Raises:
        SkipstoneError: it could not start, or something it cannot do without broke.
    """
    keep_freed_memory()
    clock = SystemClock()
    identity = Identity.load_or_create(options.identity_path)
    signed = _read_manifest(options)
    run = signed.run if signed is not None else _run_of(options)
    device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    initial = options.link.peers if options.link is not None else ()
    where = Whereabouts(options.listen, options.advertise, options.port, options.dht_port)
    settings = _directory(where, initial, identity, signed)
    with _logged(options, identity.peer, events) as events:
        async with present(identity, run, where, settings, clock, events) as presence:
            events.emit(Note("info", f"peer {identity.peer}, device {device.value} ({device.reason})"))
            if signed is None:
                signed = await _or_stopped(presence.fetch_manifest(options.patience_s), stop)
                if signed is None:
                    return
            await _serve(options, presence, signed, device.value, events, stop)


async def _serve(
    options: NodeOptions,
    presence: Presence,
    signed: SignedManifest,
    device: torch.device,
    events: EventSink,
    stop: asyncio.Event,
) -> None:
    if signed.manifest.stages.count < 2:
        raise ConfigError(
            "this run has one stage, which leaves nothing for other peers to do",
            hint="Train it with `skipstone solo`, or cut the model into at least two stages.",
        )
    presence.neighbourhood.watch(signed.manifest.modules())
    presence.reception.answers[QuestionAbout.MANIFEST] = _always(signed.text)
    module = await _choose(options, presence, signed.manifest)
    events.emit(Note("info", f"module {module.value}: {module.reason}"))
    _become(presence, PeerState.JOINING, module.value, events)
    with ComputeThread() as compute:
        make = data_duty if module.value.stage == 0 else hop_duty
        given = Assignment(options, presence, signed.manifest, module.value, device, compute, events, stop.set)
        async with make(given) as duty:
            presence.reception.carrier = duty.carrier
            presence.reception.answers |= duty.answers
            presence.reception.answers[QuestionAbout.STATUS] = _status(presence, duty)
            _become(presence, PeerState.SERVING, module.value, events)
            async with _at_work(duty, presence, events):
                await stop.wait()
                _become(presence, PeerState.DRAINING, module.value, events)
                await duty.drain(DRAIN_S)
            await _save(options, signed, duty, compute)
            events.emit(node_summary(presence.own, duty, compute))


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


@asynccontextmanager
async def _at_work(duty: Duty, presence: Presence, events: EventSink) -> AsyncIterator[None]:
    """The duty's tasks, for as long as the block lasts."""
    async with task_scope() as tasks:
        running = [
            tasks.create_task(duty.carrier.run(presence.transport)),
            tasks.create_task(duty.run()),
            tasks.create_task(_report(duty, events)),
        ]
        try:
            await asyncio.sleep(0)  # the carrier takes work only when it runs
            yield
        finally:
            for task in running:
                task.cancel()


async def _report(duty: Duty, events: EventSink) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        events.emit(duty.load())


async def _choose(options: NodeOptions, presence: Presence, manifest: Manifest) -> Reasoned[ModuleId]:
    """The module asked for, or the one that needs a peer most after a short look around."""
    if options.stage is not None:
        if options.stage >= manifest.stages.count:
            raise ConfigError(
                f"stage {options.stage} does not exist: this run has the stages 0 to {manifest.stages.count - 1}"
            )
        return Reasoned(ModuleId(options.stage), "asked for")
    if options.link is None:
        return Reasoned(ModuleId(0), "the first node of a run is a data node")
    await asyncio.sleep(LOOK_AROUND_S)
    cost = [max(1, blocks) for blocks in manifest.stages.blocks]
    alive = await presence.neighbourhood.alive(manifest.modules())
    return choose_module(presence.own.peer, manifest.modules(), alive, cost)


def _become(presence: Presence, state: PeerState, module: ModuleId, events: EventSink) -> None:
    presence.own.state, presence.own.module = state, module
    presence.neighbourhood.announce()
    address = presence.own.addresses[0]
    events.emit(NodeStatus(presence.own.peer, str(module), state.name.lower(), address, str(presence.link)))


async def _save(options: NodeOptions, signed: SignedManifest, duty: Duty, compute: ComputeThread) -> None:
    if options.checkpoint_dir is not None:
        folder = CheckpointFolder(options.checkpoint_dir, signed.run, signed.text)
        await compute.run(Priority.UPKEEP, lambda: duty.save(folder))


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
    where: Whereabouts, initial: tuple[str, ...], identity: Identity, signed: SignedManifest | None
) -> DirectorySettings:
    others = tuple(address for address in initial if not address.endswith(f"/{identity.peer}"))
    announce = (f"/ip4/{where.advertise}/tcp/{where.dht_port}",) if where.advertise and where.dht_port else ()
    if signed is None:
        return DirectorySettings(where.listen, where.dht_port, announce, others)
    stages = signed.manifest.stages
    return DirectorySettings(
        where.listen, where.dht_port, announce, others, stages=stages.count, experts=stages.experts
    )


async def _or_stopped(wanted: Awaitable[SignedManifest], stop: asyncio.Event) -> SignedManifest | None:
    """What is wanted, or None when `stop` comes first."""
    async with task_scope() as tasks:
        getting, stopping = tasks.create_task(_await(wanted)), tasks.create_task(stop.wait())
        await asyncio.wait((getting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not getting.done():
            getting.cancel()
            return None
    return getting.result()


async def _await(wanted: Awaitable[SignedManifest]) -> SignedManifest:
    return await wanted


def _always(text: bytes) -> Callable[[Question], Awaitable[bytes]]:
    async def answer(question: Question) -> bytes:
        return text

    return answer


def _status(presence: Presence, duty: Duty) -> Callable[[Question], Awaitable[bytes]]:
    async def answer(question: Question) -> bytes:
        return status_json(presence.own, duty)

    return answer
