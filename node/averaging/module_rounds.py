"""Connects the averaging rounds of the hosted module to the rest of the node, and gets a new replica's first state."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random, SystemRandom
from typing import Final

import torch

from node.averaging.anchor.anchor import Anchor, AnchorStore, initial_anchor, restored_anchor
from node.averaging.anchor.outer_step import LocalReplica, anchor_of, outer_rule
from node.averaging.anchor.shared_vector import Layout
from node.averaging.exchange.all_reduce import ExchangeMeans
from node.averaging.exchange.pieces import LARGEST_PIECE
from node.averaging.round_runner import InnerWork, ReplicaSync, RoundRunner
from node.averaging.state_sync.download import MOST_ASKED, Donor, FreshSpace, StateDownloads
from node.checkpoint.folder import LEFT_KEPT_S, keep_left
from node.checkpoint.state import Agreed
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import background, task_scope
from node.context.module_context import ModuleContext
from node.model.memory_need import require_memory
from node.observability import events
from node.observability.events import CatchingUp, EventSink, Note, RoundCommitted
from node.observability.status import Accusation, DownloadStatus, LeftAnchor, RoundStatus
from node.start.cut_model import first_version, module_layout
from protocol.identity.signatures import PieceSignatures
from protocol.interfaces.clock import Clock
from protocol.manifest.manifest import Manifest
from swarm.averaging.round_events import Caught, OtherReplica, ReplicasChanged, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.averaging.schedule import choose_version, voters
from swarm.compression.round_codecs import codec_levels
from swarm.vocabulary.averaging_messages import RoundId
from swarm.vocabulary.errors import CorruptSnapshot, NoQuorum, Stalled
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, PeerState

log = logging.getLogger(__name__)

CLIPPED: Final = 0.1  # Clipping factor below which an update counts as clipped
CLIPPED_ROUNDS: Final = 3  # Consecutive clipped rounds before a single warning
PROGRESS_S: Final = 1.0


class RoundReports:
    """Reporter of one replica's rounds, downloads and accusations, as events and status."""

    def __init__(self, peer: PeerId, module: ModuleId, clock: Clock, events: EventSink) -> None:
        self._peer = peer
        self._module = str(module)
        self._clock = clock
        self._events = events
        self._last: tuple[RoundCommitted, str, float] | None = None
        self._clipped = 0
        self._download: CatchingUp | None = None
        self.accused_lately: tuple[Accusation, ...] = ()
        self._left: tuple[float, LeftAnchor] | None = None
        self._began = self._reported_at = 0.0

    def exchanging(self, attempt: RoundId, reduced_chunks: int, percent: int) -> None:
        figures = (attempt.number, attempt.attempt, attempt.convener, reduced_chunks, percent)
        self._events.emit(events.RoundProgress(self._peer, str(attempt.module), *figures))

    def committed(self, event: RoundCommitted, codec_reason: str, clipping: float) -> None:
        self._last = event, codec_reason, self._clock.monotonic()
        self._clipped = self._clipped + 1 if clipping < CLIPPED else 0
        if self._clipped == CLIPPED_ROUNDS:
            text = (
                f"this replica's update of stage {self._module} counted less than {CLIPPED:.0%} in {CLIPPED_ROUNDS} "
                "rounds in a row, because the other replicas declare far smaller updates. "
                "Either this replica diverged, or they lie to slow training down."
            )
            self._events.emit(events.Note("warning", text))
        self._events.emit(event)

    def accused(self, caught: Caught) -> None:
        # Several members may accuse the same peer of the same round; report it once.
        latest = self.accused_lately[-1:]
        if latest and (latest[0].peer, latest[0].round) == (caught.peer, caught.round):
            return
        self.accused_lately = (*self.accused_lately, Accusation(caught.peer, caught.round, caught.why))[-8:]
        self._events.emit(
            events.ReplicaAccused(self._peer, self._module, caught.peer, caught.round, caught.why, caught.proof)
        )

    @contextmanager
    def fetching(self, wanted: AnchorVersion) -> Iterator[None]:
        """Reports the progress of the anchor download that runs within the block."""
        self._began = self._clock.monotonic()
        self._reported_at = self._began - PROGRESS_S
        self._download = CatchingUp(self._peer, self._module, wanted.round, 0, 0)
        try:
            yield
        finally:
            self._download = None

    def progressed(self, done: int, total: int) -> None:
        if self._download is None:
            return
        self._download = CatchingUp(self._peer, self._module, self._download.round, done, total)
        now = self._clock.monotonic()  # limits the rate of events
        if now - self._reported_at >= PROGRESS_S:
            self._reported_at = now
            self._events.emit(self._download)

    def caught_up(
        self, anchor: Anchor, known: Anchor, donors: Sequence[PeerId], received: Mapping[PeerId, int]
    ) -> None:
        """Reports a downloaded anchor. `known` was our anchor before; `received` has bytes by donor."""
        size = sum(len(anchor.chunk(n)) for n, new in enumerate(anchor.hashes) if new != known.hashes[n])
        reached, seconds = (anchor.version.round, anchor.version.digest.hex()), self._clock.monotonic() - self._began
        of_each = tuple(received.get(donor, 0) for donor in donors)
        self._events.emit(events.CaughtUp(self._peer, self._module, *reached, size, seconds, tuple(donors), of_each))

    def last_round(self) -> RoundStatus | None:
        if self._last is None:
            return None
        event, codec_reason, at = self._last
        return RoundStatus(len(event.members), round(self._clock.monotonic() - at, 1), event.codec, codec_reason)

    def left(self, version: AnchorVersion, followed: AnchorVersion, kept: bool) -> None:
        self._left = self._clock.monotonic(), LeftAnchor(version.round, 0.0, kept, followed.round)

    def left_anchor(self) -> LeftAnchor | None:
        """Describes the anchor that was last replaced by another replicas' one, for an hour."""
        if self._left is None or (seconds := self._clock.monotonic() - self._left[0]) > LEFT_KEPT_S:
            return None
        return replace(self._left[1], seconds_ago=round(seconds, 1))

    def catching_up(self) -> DownloadStatus | None:
        download = self._download
        return None if download is None else DownloadStatus(download.round, download.bytes, download.total_bytes)


LOOK_S = 0.05
BETWEEN_SAVES_S = 30.0
ALONE_AFTER_S = 4.0  # Seconds in which a resumed replica looks for others. Announcements took 1.8 s on a busy machine
RESUMING_WITHIN_S = 12.0  # Seconds to wait for replicas that resume at the same time


class ModuleRounds:
    """Averaging rounds of the hosted module, with the downloads that they need. Implements RoundHost."""

    def __init__(self, context: ModuleContext, replica: LocalReplica, start: Anchor, averaging: ComputeThread) -> None:
        manifest, own, session, module = context.manifest, context.session.own, context.session, context.module
        self.reports = RoundReports(own.peer, module, own.clock, context.events)
        self.accused = self.reports.accused
        self._context = context
        self._own = own
        self._store = AnchorStore(start)
        rules, outer = round_rules(manifest, start.layout), outer_rule(manifest)
        self._machine = machine = RoundMachine(own.peer, module, rules, start.version, context.proofs.signer)
        context.proofs.accused = lambda: machine.accused  # `self` would keep the replica in memory during a pause
        self._replica_sync = ReplicaSync(replica, self._store, context.compute, averaging, rules, outer, own.clock)
        means = ExchangeMeans(
            codecs=rules.codecs,
            rule=outer,
            thread=averaging,
            transport=session.transport,
            clock=own.clock,
            signatures=PieceSignatures(own.run, session.identity),
            random=SystemRandom(),
            watch=self.reports.exchanging,
        )
        self.runner = RoundRunner(own.peer, module, self._machine, self._store, self._replica_sync, means, self)
        self._donor = Donor(module, self._store, own.clock, session.transport, context.start)
        self._downloads = StateDownloads(
            session, module, self._store, self.reports.progressed, self.runner.gave_other_state
        )
        self._ready = False
        self._resumed: AnchorVersion | None = None
        self._saved_at = -BETWEEN_SAVES_S

    async def run(self) -> None:
        dispatcher = self._context.session.dispatcher
        with self._donor.receiving(dispatcher), self.runner.receiving(dispatcher):
            async with task_scope() as tasks:
                tasks.create_task(self._donor.run())
                tasks.create_task(self.runner.run())
                tasks.create_task(self._context.proofs.keep_fresh())

    def resume(self, since: InnerWork) -> None:
        self._replica_sync.resume(since)
        version = self._store.current.version
        if version.round:
            self._resumed = version
            restored = events.Restored(self._own.peer, str(self._context.module), version.round, version.digest.hex())
            self._context.events.emit(restored)

    async def prepare(self) -> None:
        """Waits until the replica has the anchor of the module's other replicas, or finds no other replica."""
        await self._context.session.membership_sync.looked.wait()
        await self._settled_down()
        if self._store.current.version == self._resumed:
            await self._seen_who_resumes_with_us()
        self._ready = True
        self._own.anchor = self._store.current.version

    async def _settled_down(self) -> None:
        while not self._machine.settled:  # noqa: ASYNC110 - the machine has no events to wait for
            await asyncio.sleep(LOOK_S)

    async def _seen_who_resumes_with_us(self) -> None:
        # Replicas that resume together must find each other first, or each would train a separate anchor.
        clock = self._own.clock
        begun = clock.monotonic()
        while (waited := clock.monotonic() - begun) < RESUMING_WITHIN_S:
            # The lowest peer id stops waiting early; the others wait for it.
            here = [known for known in self._context.session.membership.peers() if known.module == self._context.module]
            first = not any(known.peer < self._own.peer for known in here)
            if self._machine.in_company or (first and waited >= ALONE_AFTER_S):
                break
            await asyncio.sleep(LOOK_S)
        await self._settled_down()

    def describe(self) -> str:
        return self._machine.describe()

    def agreed(self) -> Agreed:
        since = self._replica_sync.since_anchor
        return Agreed(self._store.saved(), since.steps, since.tokens)

    async def finish_round(self) -> None:
        """Waits before the node leaves: for the round, so that its inner steps count, or for a newer anchor to save."""
        while self._machine.current_attempt or self._machine.is_behind:  # noqa: ASYNC110 - it has no events to wait for
            await asyncio.sleep(LOOK_S)

    def others(self) -> ReplicasChanged:
        """Returns the module's other replicas. Until this one serves, also leaving ones: they may have the anchor."""
        membership, proofs = self._context.session.membership, self._context.proofs
        known = membership.with_state(self._context.module)
        # Names that are only in the directory do not count while a replica is linked.
        known = [a for a in known if a.peer in membership.linked] or known
        proven = proofs.proven
        found = (
            OtherReplica(a.peer, a.anchor, a.state is PeerState.SERVING or not self._ready, a.peer in proven)
            for a in known
            if a.anchor is not None
        )
        # Data nodes sign their own work, so it proves their invitation and no amount.
        tallies = proofs.tallies if self._context.module.stage > 0 else ()
        leaving = self._context.session.own.state is PeerState.DRAINING
        return ReplicasChanged(tuple(sorted(found, key=lambda replica: replica.peer)), tallies, leaving)

    async def catch_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
        known = self._store.current
        with self.reports.fetching(version):
            anchor = await self._downloads.catch_up(version, donors, known)
            self.reports.caught_up(anchor, known, donors, self._downloads.received_bytes)
        return anchor

    async def left(self, version: AnchorVersion, followed: AnchorVersion) -> None:
        folder = self._context.options.checkpoint_dir
        kept = folder is not None and await asyncio.to_thread(keep_left, folder / self._own.peer)
        self.reports.left(version, followed, kept)

    def anchored(self, anchor: Anchor) -> None:
        self._context.proofs.in_round = frozenset()
        if self._ready:
            self._own.anchor = anchor.version
            self._context.session.membership_sync.announce()

    def settled(self, version: AnchorVersion, event: RoundCommitted, reason: str = "", clipping: float = 1.0) -> None:
        self.reports.committed(event, reason, clipping)
        if version == self._store.current.version:  # another anchor may have been adopted meanwhile
            self._context.proofs.in_round = frozenset(map(PeerId, event.contributors)) - {self._own.peer}
        now = self._own.clock.monotonic()  # rounds may be short, so limit the saves
        if now - self._saved_at >= BETWEEN_SAVES_S:
            self._saved_at = now
            self._context.saves.request_save(f"round {event.round}")


@asynccontextmanager
async def module_rounds(
    context: ModuleContext, replica: LocalReplica, first: Anchor | None = None
) -> AsyncIterator[ModuleRounds]:
    """Runs the hosted module's averaging rounds within the block. `first`, if given, replaces the replica's state."""
    start = await context.compute.run(Priority.UPKEEP, partial(_put_on, replica, first))
    saved, since = context.resumed.state, InnerWork()
    with ComputeThread(set_up=lambda: torch.set_num_threads(1), name="averaging") as averaging:
        if saved is not None and saved.anchor is not None:
            try:
                start = await averaging.run(Priority.UPKEEP, partial(restored_anchor, replica.layout, saved.anchor))
            except CorruptSnapshot as error:
                context.events.emit(Note("warning", f"{error}. The parameters saved with it become the anchor."))
            since = InnerWork(saved.counters.steps_since_anchor, saved.counters.tokens_since_anchor)
        rounds = ModuleRounds(context, replica, start, averaging)
        if first is None:
            rounds.resume(since)
        del start, first, saved  # references here would keep old anchors in memory
        async with background(rounds.run()):
            yield rounds


def round_rules(manifest: Manifest, layout: Layout) -> RoundRules:
    """Returns the manifest's rules for rounds of a module with this layout."""
    training = manifest.training
    return RoundRules(
        inner_steps=training.inner_steps,
        fragments=len(layout.fragments),
        chunks=layout.chunks,
        longest_s=training.round_seconds,
        step_tokens=training.inner_tokens,
        chunk_bytes=4 * layout.chunk_elements,
        piece_bytes=4 * min(LARGEST_PIECE, layout.elements),
        codecs=codec_levels(Codec[manifest.codecs.pseudo_gradients.upper()]),
    )


def _put_on(replica: LocalReplica, first: Anchor | None) -> Anchor:
    if first is None:
        return anchor_of(replica)
    for part, array in first.parameters.pieces():
        replica.write(part, array)
    if first.version.round:
        replica.optimizer.start_anew(first.version.steps, first.version.tokens)
    return first


PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class FirstState:
    """Anchor from which a new replica starts, or None to keep the weights from the seed or checkpoint."""

    anchor: Anchor | None = None


async def first_state(context: ModuleContext) -> FirstState:
    """Gets the new replica's first anchor, waiting until a peer has it. Raises ConfigError, ResourceExhausted."""
    if context.manifest.start is None or context.resumed.state is not None:  # needs no download
        return FirstState()
    allowance = context.options.allowance
    require_memory(context.manifest, (context.module,), context.device, allowance.slots, allowance.moments)
    if context.start is not None:
        return FirstState(await asyncio.to_thread(context.start.anchor, context.module))
    return FirstState(await _Fetch(context).anchor())


class _Fetch:
    """Download of a new replica's first anchor from other peers, retried until it succeeds."""

    def __init__(self, context: ModuleContext) -> None:
        session, manifest, module = context.session, context.manifest, context.module
        self._context = context
        self._layout = module_layout(manifest, module)
        self._first = first_version(manifest, module)
        self._reports = RoundReports(session.own.peer, module, session.own.clock, context.events)
        self._random = Random()  # noqa: S311 - spreads the load over donors; no secret
        self._downloads = StateDownloads(session, module, FreshSpace(self._layout), self._reports.progressed)

    async def anchor(self) -> Anchor:
        await self._context.session.membership_sync.looked.wait()
        pause_s = PAUSE_S
        while True:
            try:
                return await self._agreed() or await self._from_the_start()
            except (NoQuorum, Stalled) as error:
                log.info("module %s: %s", self._context.module, error)
                if pause_s == PAUSE_S:  # tell the user once
                    self._context.events.emit(Note("info", f"waiting for a peer with module {self._context.module}"))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _agreed(self) -> Anchor | None:
        membership, module = self._context.session.membership, self._context.module
        await self._context.proofs.refresh()
        known = {a.peer: a.anchor for a in membership.with_state(module) if a.anchor is not None}
        announced = voters(known, self._context.proofs.proven)
        version = choose_version(announced).value
        if version is None or version.round == 0:
            return None
        donors = tuple(peer for peer, stands in announced.items() if stands == version)
        try:
            with self._reports.fetching(version):
                return await self._downloads.catch_up(version, donors)
        except (NoQuorum, Stalled) as error:  # they may have moved on, or never had it
            log.info("module %s: %s", module, error)
            return None

    async def _from_the_start(self) -> Anchor:
        """Downloads this module of the model that the run started from. Raises NoQuorum or Stalled."""
        known = list(self._context.session.membership.peers())
        self._random.shuffle(known)  # only some are asked at once; each attempt picks others
        # First peers that announce this state, then data nodes (the author runs one), then all others.
        known.sort(key=lambda a: (a.anchor != self._first, a.module is None or a.module.stage > 0))
        with self._reports.fetching(self._first):
            parameters = await self._downloads.parameters(self._first, [a.peer for a in known][:MOST_ASKED])
        return await asyncio.to_thread(initial_anchor, self._layout, parameters)
