"""A node's service in one module: prepares, serves, and completes its work in order to stop or to move."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from itertools import islice

from node.averaging.module_rounds import first_state
from node.checkpoint.folder import CheckpointFolder, save_state
from node.checkpoint.saver import Saver
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import background, unless
from node.context.module_context import ModuleContext
from node.network.local_peer import LocalPeer
from node.network.session import NetworkSession
from node.observability import events
from node.observability import status as statuses
from node.observability.failpoints import crash_point
from node.observability.typed_json import to_json
from node.runtime.module_choice import NextModule
from node.runtime.role import DataRole, StageRole, data_role, stage_role
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState

log = logging.getLogger(__name__)

DRAIN_S = 12.0  # Limit of a drain, in seconds. Below the 20 s after which a stop is forced.
HAND_OVER_S = 3.0
MAX_ASKED = 16

Moving = Callable[[ModuleContext], NextModule]
NodeRole = DataRole | StageRole


async def serve_module(
    context: ModuleContext,
    moving: Moving,
    folder: CheckpointFolder | None,
    stop: asyncio.Event,
    kept: Callable[[], CheckpointFolder | None] = lambda: None,
) -> ModuleId | None:
    """Joins, serves and leaves a module. Returns the next one, None after a stop. `kept`: folder of a paused state."""
    session, own = context.session, context.session.own
    own.take(context.module)
    tell_state(session, context.events)
    make = data_role if context.module.stage == 0 else stage_role
    first = await unless(stop, first_state(context))
    if first is None:
        return None
    async with make(context, first.anchor) as role:
        # Free the state on disk and the first anchor: the replica holds its own copies now.
        context.resumed.state = None
        del first

        async def status(asker: PeerId, question: Question) -> bytes:
            return status_json(session, role, context.compute)

        answers = {QuestionAbout.STATUS: status, QuestionAbout.WORK: context.proofs.answer}
        with session.dispatcher.registered(answers=answers):
            if await unless(stop, _prepared(role)) is None:
                return None
            with _saver(context, role, folder) as saver:
                async with _at_work(role, context, saver):
                    goal = await _serve(role, context, moving(context), stop)
                    await hand_over(role.rounds.finish_round, HAND_OVER_S)
                # A node that moves leaves the module to its other replicas, so only a stop or a pause saves.
                if goal is None and (place := kept()) is not None:
                    with _saver(context, role, place) as last:
                        await save_at_the_end(context, last, pauses=True)
                elif goal is None:
                    await save_at_the_end(context, saver)
                context.events.emit(node_summary(own, role, context.compute))
                return goal


def tell_state(session: NetworkSession, sink: events.EventSink) -> None:
    own = session.own
    session.membership_sync.announce()
    module = None if own.state is PeerState.VISITING else str(own.module)
    state, addresses = own.state.name.lower(), ", ".join(own.addresses)
    sink.emit(events.NodeStatus(own.peer, module, state, addresses, str(session.link)))


async def hand_over(finish: Callable[[], Awaitable[None]], limit_s: float) -> None:
    """Awaits `finish`, the end of a round that other replicas wait for, for at most `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            await finish()
    except TimeoutError:
        log.warning("gave up handing over after %.0f s", limit_s)


async def _prepared(role: NodeRole) -> bool:
    await role.prepare()
    return True


async def _serve(
    role: NodeRole, context: ModuleContext, next_module: NextModule, stop: asyncio.Event
) -> ModuleId | None:
    """Serves until a stop or a move, then drains. Cancels a move that would leave the module without a peer."""
    own, emit = context.session.own, context.events.emit
    while True:
        _become(PeerState.SERVING, context)
        role.runner.take_new_work(True)
        goal = await unless(stop, next_module())
        if goal is not None and not await others_serve(context):
            continue
        if goal is not None:
            emit(events.Move(own.peer, str(context.module), str(goal.value), goal.reason))
        # Announce first. Refuse late work if another replica can take it, else finish it.
        _become(PeerState.DRAINING, context)
        crash_point("draining")
        role.runner.take_new_work(not _replicas(context))
        await role.drain(DRAIN_S)
        if stop.is_set():
            return None
        assert goal is not None, "without a stop there was a goal"
        if await others_serve(context):  # another replica may have left meanwhile
            return goal.value
        emit(events.Note("info", f"stays in module {context.module}: no other peer serves it now"))


async def save_at_the_end(context: ModuleContext, saver: Saver | None, *, pauses: bool = False) -> None:
    """Writes the last snapshot, and reports where the state is if no other peer has it. Raises as the saver."""
    is_last = not _replicas(context)
    try:
        if saver is not None:
            await saver.save_at_the_end()
    finally:
        if is_last and not pauses:
            is_saved = saver is not None and (saver.saved_steps is not None or context.resumed.module is not None)
            folder = str(context.options.checkpoint_dir) if is_saved else None
            context.events.emit(events.LastPeer(context.session.own.peer, str(context.module), folder))


async def others_serve(context: ModuleContext, also: Collection[PeerId] = ()) -> bool:
    """Whether a replica with proven work, or one in `also`, answers that it serves the module."""
    # Without the proof, a liar could announce itself and so empty the module of all that it learned.
    await context.proofs.refresh()
    session, trusted = context.session, {*context.proofs.proven, *also}
    asked = [a.peer for a in _replicas(context) if a.peer in trusted or session.own.steps == 0][:MAX_ASKED]
    answers = await asyncio.gather(*(session.membership_sync.serves(peer, context.module) for peer in asked))
    return any(answers)


def _replicas(context: ModuleContext) -> list[Announcement]:
    session = context.session
    return session.membership.replicas(context.module, session.own.clock.monotonic())


def _become(state: PeerState, context: ModuleContext) -> None:
    context.session.own.state = state
    tell_state(context.session, context.events)


@asynccontextmanager
async def _at_work(role: NodeRole, context: ModuleContext, saver: Saver | None) -> AsyncIterator[None]:
    work = [role.runner.run(), role.run(), _report(role, context), *([] if saver is None else [saver.run()])]
    async with background(*work):
        await asyncio.sleep(0)  # the runner must run before it can take work
        with role.runner.receiving(context.session.dispatcher):
            yield


async def _report(role: NodeRole, context: ModuleContext) -> None:
    while True:
        await asyncio.sleep(2.0)
        context.events.emit(role.load())


def _saver(
    context: ModuleContext, role: NodeRole, folder: CheckpointFolder | None
) -> AbstractContextManager[Saver | None]:
    if folder is None:
        return nullcontext()
    write = partial(save_state, folder, context.session.own.peer, context.module)
    capture = partial(role.capture, partial(context.compute.post, Priority.UPKEEP))
    return Saver(capture, write, context.compute, context.saves, context.events, context.options.checkpoint_every_s)


def node_summary(own: LocalPeer, role: NodeRole, compute: ComputeThread) -> events.NodeSummary:
    """Sums up the work of a node that leaves its module."""
    account = role.account()
    busy = events.BusySeconds(compute.busy_s, account.codec_s, role.runner.wire_s, compute.idle_s, compute.idle_work_s)
    return events.NodeSummary(
        peer=own.peer,
        module=str(own.module),
        steps=account.steps,
        loss_first=account.loss_first,
        loss_last=account.loss_last,
        tokens=account.tokens,
        tokens_per_s=account.tokens_per_s,
        microbatches=account.counts,
        accumulated=account.accumulated,
        busy_s=busy,
    )


def status_json(session: NetworkSession, role: NodeRole, compute: ComputeThread) -> bytes:
    """Encodes the node's status as JSON."""
    own, tunnels, links = session.own, session.tunnels, session.transport.figures()
    account, custody, rounds = role.account(), role.runner.custody, role.rounds
    status = statuses.Status(
        **{field.name: getattr(account, field.name) for field in dataclasses.fields(account)},
        peer=own.peer,
        name=own.name or None,
        module=str(own.module),
        state=own.state.name.lower(),
        addresses=own.addresses,
        via=own.via,
        reach=statuses.ReachStatus(own.reach.step.value, own.reach.reason),
        relay=statuses.RelayStatus(own.relay, **tunnels.carried()),
        relays=tuple(
            statuses.AttachmentStatus(each.relay, each.standing, each.reason) for each in tunnels.attachments()
        ),
        unix_ms=int(own.clock.wall() * 1000),
        slots=custody.slots,
        free_slots=custody.slots - custody.used_slots,
        round=0 if own.anchor is None else own.anchor.round,
        digest="" if own.anchor is None else own.anchor.digest.hex(),
        rounds=rounds.describe(),
        last_round=rounds.reports.last_round(),
        accused=rounds.reports.accused_lately,
        catching_up=rounds.reports.catching_up(),
        left=rounds.reports.left_anchor(),
        credited=None if own.credit is None else own.credit.tokens,
        codecs=role.runner.codecs.describe(),
        traffic={
            peer: statuses.LinkTraffic(each.sent_bytes, each.received_bytes, round(each.round_trip_s, 4))
            for peer, each in islice(links.items(), statuses.MOST_LINKS)
        },
        compute=statuses.ComputeStatus(
            round(compute.busy_s, 3), round(compute.idle_work_s, 3), round(compute.idle_s, 3), compute.idle_waiting
        ),
    )
    return json.dumps(to_json(status), allow_nan=False).encode()
