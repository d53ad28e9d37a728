"""The rounds of one replica as a part of a node: runner, donor and downloads, joined to the rest.

What the manifest allows in rounds, with the sizes that the codecs have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from random import SystemRandom

import torch

from node.averaging.anchor.anchor import Anchor, restored_anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.layout import Layout
from node.averaging.anchor.lone_replica import anchor_of
from node.averaging.anchor.module_vector import LocalReplica
from node.averaging.anchor.outer_step import outer_rule
from node.averaging.exchange.all_reduce import ExchangeMeans
from node.averaging.replica_sync import AloneRule, ReplicaSync, Work
from node.averaging.reporting import RoundNews
from node.averaging.round_runner import RoundRunner, RoundSettled
from node.averaging.state_sync.chunk_codec import STATE_CODECS
from node.averaging.state_sync.donor import Donor
from node.averaging.state_sync.download import StateDownloads
from node.checkpoint.state import Agreed, AnchorState
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import task_scope
from node.context.module_context import ModuleContext
from node.observability.events import Note
from protocol.codecs import encoded_bytes
from protocol.identity.round_signatures import EntrySeal, PieceSignatures
from protocol.manifest.manifest import Manifest
from swarm.averaging.round_events import Caught, OtherReplica, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.compression.round_codecs import RoundCodecs, Rung, ladder
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import CorruptSnapshot
from swarm.vocabulary.types import AnchorVersion, Codec, PeerId, PeerState

log = logging.getLogger(__name__)

_ELEMENTS = 2**20
LOOK_S = 0.05
BETWEEN_SAVES_S = 30.0
"""A checkpoint is asked for at rounds, but not more often than this: small modules may have a round every second."""
ALONE_AFTER_S = 4.0
"""A resumed replica that sees nobody else looks for so long: until an announcement is seen, 1.8 s were measured on a
busy machine."""
RESUMING_WITHIN_S = 12.0
"""Those that resume at the same time are waited for so long."""


def rungs_to(limit: Codec) -> tuple[Rung, ...]:
    """The rungs up to a run's limit, mildest first."""
    return tuple(rung_of(codecs) for codecs in ladder(limit))


def rung_of(codecs: RoundCodecs) -> Rung:
    """The rung of these codecs, with their ratios to float32."""
    encoded = sum(encoded_bytes(codec, _ELEMENTS) for codec in (codecs.contribution, codecs.result))
    return Rung(codecs, encoded / (2 * 4 * _ELEMENTS))


class ModuleRounds:
    """The rounds of a module at this node, as the rest of the node sees them; and the rest of the node as they see it
    (`node.averaging.round_runner.RoundHost`). Made by `module_rounds`.

    Args:
        start: the anchor that the replica stands on.
        averaging: the thread for arithmetic on anchors.
    """

    def __init__(
        self,
        given: ModuleContext,
        replica: LocalReplica,
        start: Anchor,
        averaging: ComputeThread,
    ) -> None:
        manifest, own, session, module = given.manifest, given.session.own, given.session, given.module
        self.news = RoundNews(own.peer, module, own.clock, given.events)
        self._given = given
        self._own = own
        self._store = AnchorStore(start)
        rules, outer = round_rules(manifest, start.layout), outer_rule(manifest)
        seal = EntrySeal(session.identity, session.run)
        self._machine = RoundMachine(own.peer, module, rules, start.version, seal)
        training = manifest.training
        alone = AloneRule(training.inner_steps, outer, own.clock, training.round_seconds)
        self._replica_sync = ReplicaSync(replica, self._store, given.compute, averaging, alone)
        means = ExchangeMeans(
            codecs=rules.codecs,
            rule=outer,
            thread=averaging,
            transport=session.transport,
            clock=own.clock,
            signatures=PieceSignatures(own.run, session.identity),
            random=SystemRandom(),
            watch=self.news.exchanging,
        )
        self.runner = RoundRunner(own.peer, module, self._machine, self._store, self._replica_sync, means, self)
        codecs, folder = STATE_CODECS[manifest.codecs.state], given.options.checkpoint_dir
        self._donor = Donor(module, self._store, own.clock, codecs, averaging, session.transport, given.start)
        self._downloads = StateDownloads(
            session,
            module,
            self._store,
            codecs,
            None if folder is None else folder / own.peer / "download",
            self.news.progressed,
            self.runner.gave_other_state,
        )
        self._ready = False
        self._resumed: AnchorVersion | None = None
        self._saved_at = -BETWEEN_SAVES_S

    async def run(self) -> None:
        """Runs the rounds, until cancelled."""
        dispatcher = self._given.session.dispatcher
        with self._donor.receiving(dispatcher), self.runner.receiving(dispatcher):
            async with task_scope() as tasks:
                tasks.create_task(self._donor.run())
                tasks.create_task(self.runner.run())

    def resume(self, since: Work) -> None:
        """Takes over the work since its anchor of a replica that was restored."""
        self._replica_sync.resume(since)
        version = self._store.current.version
        if version.round:
            self._resumed = version
            self.news.restored(version)

    async def prepare(self) -> None:
        """Waits until the replica stands where its module stands; before that it has nothing to say in its module.

        With nobody else there it stands on its own state: the initial weights, or what it was resumed with.
        """
        await self._given.session.membership_sync.looked.wait()
        await self._settled_down()
        if self._store.current.version == self._resumed:
            await self._seen_who_resumes_with_us()
        elif not self._known_here():
            # The machine waits a little before it says so; then it may be too late for the first round.
            self._replica_sync.stand_alone(True)
        self._ready = True
        self._own.anchor = self._store.current.version

    async def _settled_down(self) -> None:
        while not self._machine.settled:  # noqa: ASYNC110 - the machine has no events to wait for
            await asyncio.sleep(LOOK_S)

    async def _seen_who_resumes_with_us(self) -> None:
        """Replicas that were stopped together start together, each with most of a round's work done: one that has not
        seen the others yet would take the outer step alone, and so would they. The first by peer id goes first; that it
        never comes is borne for a while."""
        clock = self._own.clock
        begun = clock.monotonic()
        while (waited := clock.monotonic() - begun) < RESUMING_WITHIN_S:
            first = not any(known.peer < self._own.peer for known in self._known_here())
            if self._machine.in_company or (first and waited >= ALONE_AFTER_S):
                break
            await asyncio.sleep(LOOK_S)
        await self._settled_down()

    def _known_here(self) -> list[Announcement]:
        """All others that say they are in our module, whatever they do there."""
        return [known for known in self._given.session.membership.peers() if known.module == self._given.module]

    def describe(self) -> str:
        """The state of the rounds in one line for people."""
        return self._machine.describe()

    # ---- the replica's side ------------------------------------------------------------------------------------------

    def agreed(self) -> Agreed:
        """The anchor and the work since, for a checkpoint; on the compute thread."""
        since = self._replica_sync.since_anchor
        return Agreed(self._store.saved(), since.steps, since.tokens)

    async def finish_round(self) -> None:
        """Finishes the round under way before leaving: what we have worked since our anchor is in it."""
        while self._machine.under_way is not None:  # noqa: ASYNC110 - the machine has no events to wait for
            await asyncio.sleep(LOOK_S)

    # ---- node.averaging.round_runner.RoundHost -----------------------------------------------------------------------

    def others(self) -> tuple[OtherReplica, ...]:
        """The other replicas, leaving ones included: to a newcomer one that leaves is as good as one that stays, since
        it may be the last that has the state.
        """
        found = (
            OtherReplica(known.peer, known.anchor, known.state is PeerState.SERVING or not self._ready)
            for known in self._given.session.membership.with_state(self._given.module)
            if known.anchor is not None
        )
        return tuple(sorted(found, key=lambda replica: replica.peer))

    async def catch_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> Anchor:
        known = self._store.current
        self.news.fetching(version)
        try:
            anchor = await self._downloads.catch_up(version, donors, known)
            self.news.caught_up(anchor, known, donors, self._downloads.received_bytes)
        finally:
            self.news.ended()
        return anchor

    def accused(self, caught: Caught) -> None:
        self.news.accused(caught)

    def anchored(self, anchor: Anchor) -> None:
        self._given.proofs.shared_round(frozenset())
        if self._ready:
            self._own.anchor = anchor.version
            self._given.session.membership_sync.announce()

    def settled(self, settled: RoundSettled) -> None:
        self.news.committed(settled)
        if settled.version == self._store.current.version:
            self._given.proofs.shared_round(frozenset(settled.contributors) - {self._own.peer})
        now = self._own.clock.monotonic()
        if now - self._saved_at >= BETWEEN_SAVES_S:
            self._saved_at = now
            self._given.saves.request_save(f"round {settled.version.round}")


@asynccontextmanager
async def module_rounds(
    given: ModuleContext, replica: LocalReplica, first: Anchor | None = None
) -> AsyncIterator[ModuleRounds]:
    """Runs the rounds of the module that the node hosts within the block.

    Args:
        first: the anchor on which the replica is put; None for what it is already.
    """
    start = await given.compute.run(Priority.UPKEEP, partial(_put_on, replica, first))
    saved, since = given.resumed.state, Work()
    with ComputeThread(set_up=lambda: torch.set_num_threads(1), name="averaging") as averaging:
        if saved is not None and saved.anchor is not None:
            restored = await averaging.run(Priority.UPKEEP, partial(_restored, given, replica.layout, saved.anchor))
            start = restored or start
            since = Work(saved.counters.steps_since_anchor, saved.counters.tokens_since_anchor)
        rounds = ModuleRounds(given, replica, start, averaging)
        if first is None:
            rounds.resume(since)
        del start, first, saved  # what is not the current anchor any more is not to be kept here
        async with task_scope() as tasks:
            running = tasks.create_task(rounds.run())
            try:
                yield rounds
            finally:
                running.cancel()


def round_rules(manifest: Manifest, layout: Layout) -> RoundRules:
    """The manifest's rules of rounds."""
    training = manifest.training
    return RoundRules(
        inner_steps=training.inner_steps,
        fragments=len(layout.fragments),
        chunks=layout.chunks,
        longest_s=training.round_seconds,
        step_tokens=training.inner_tokens,
        rungs=rungs_to(Codec[manifest.codecs.pseudo_gradients.upper()]),
    )


def _put_on(replica: LocalReplica, first: Anchor | None) -> Anchor:
    """On the compute thread."""
    if first is None:
        return anchor_of(replica)
    for part, array in first.parameters.pieces():
        replica.write(part, array)
    if first.version.round:
        replica.optimizer.start_anew(first.version.steps, first.version.tokens)
    return first


def _restored(given: ModuleContext, layout: Layout, saved: AnchorState) -> Anchor | None:
    """The saved anchor; None, and a word to the person, when it is of no use."""
    try:
        return restored_anchor(layout, saved)
    except CorruptSnapshot as error:
        given.events.emit(Note("warning", f"{error}; the parameters saved with it are taken for the anchor"))
        return None
