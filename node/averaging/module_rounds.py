"""One replica's rounds as a part of a node: puts averager, donor and downloads together, and joins them to the rest.

What the manifest allows in rounds, with the sizes that the codecs have.

One module's state towards the links: what is given to others, and what is fetched from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random, SystemRandom

import torch

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.anchor_checkpoint import anchor_state, restored_anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.layout import Layout
from node.averaging.anchor.lone_replica import anchor_of
from node.averaging.anchor.module_vector import LocalReplica
from node.averaging.anchor.outer_step import outer_rule
from node.averaging.replica_sync import Work
from node.averaging.reporting import RoundNews
from node.averaging.round_runner import RoundRunner, RoundRunnerHooks, RoundRunnerParts, RoundSettled
from node.averaging.state_sync.chunk_codec import STATE_CODECS
from node.averaging.state_sync.donor import Donor
from node.averaging.state_sync.download import CatchingUp, Surroundings
from node.checkpoint.state import Agreed, AnchorState
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import task_scope
from node.context.module_context import ModuleContext
from node.model.optimizer import StepFigures
from node.network.dispatcher import RoundTensor
from node.observability.events import Note
from protocol.codecs import encoded_bytes
from protocol.identity.entry_signatures import EntrySeal
from protocol.identity.piece_signatures import PieceSignatures
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal
from protocol.manifest.manifest import Manifest
from swarm.averaging.round_events import Fellow, RoundRules
from swarm.averaging.round_machine import RoundMachine
from swarm.compression.round_codecs import RoundCodecs, Rung, ladder
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.averaging_messages import Progress, RoundControl, StateChunk, StateControl, StateRequest
from swarm.vocabulary.errors import CorruptSnapshot, PeerError
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, PeerState

_ELEMENTS = 2**20


def rungs_to(limit: Codec) -> tuple[Rung, ...]:
    """The rungs that a run with this limit has, mildest first."""
    return tuple(rung_of(codecs) for codecs in ladder(limit))


def rung_of(codecs: RoundCodecs) -> Rung:
    """These codecs with what they make of float32."""
    encoded = sum(encoded_bytes(codec, _ELEMENTS) for codec in (codecs.contribution, codecs.result))
    return Rung(codecs, encoded / (2 * 4 * _ELEMENTS))


class StateDesk:
    """The part of `node.network.dispatcher.RoundReceiver` that has to do with state. `donor` is None until there is an
    anchor to give."""

    def __init__(self, catching_up: CatchingUp, donor: Donor | None = None) -> None:
        self.catching_up = catching_up
        self.donor = donor

    def admit(self, sender: PeerId, message: StateChunk, tensor: TensorSpec) -> memoryview | Refusal:
        """Raises ProtocolViolation."""
        return self.catching_up.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> None:
        self.catching_up.received(sender, message, buffer)

    def broken_off(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> None:
        self.catching_up.broken_off(sender, message, buffer)

    def told(self, sender: PeerId, message: StateControl) -> None:
        if not isinstance(message, StateRequest):
            self.catching_up.told(sender, message)
        elif self.donor is not None:
            self.donor.told(sender, message)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.catching_up.link_down(peer)
        if self.donor is not None:
            self.donor.link_down(peer)


LOOK_S = 0.05
BETWEEN_SAVES_S = 30.0
"""A checkpoint is asked for at rounds, but not more often than this: small modules may have a round every second."""
ALONE_AFTER_S = 4.0
"""A resumed replica that sees nobody else looks for so long: until an announcement is seen, 1.8 s were measured on a
busy machine."""
RESUMING_WITHIN_S = 12.0
"""Those that resume at the same time are waited for so long."""


class ModuleRounds:
    """`node.network.dispatcher.RoundReceiver` of a node's module. Made by `module_rounds`."""

    def __init__(self, given: ModuleContext, replica: LocalReplica, start: Anchor, averaging: ComputeThread) -> None:
        manifest, own = given.manifest, given.session.own
        self._given = given
        self._own = own
        self._shelf = AnchorStore(start)
        rules = round_rules(manifest, start.layout)
        seal = EntrySeal(given.session.identity, given.session.run)
        self._machine = RoundMachine(own.peer, given.module, rules, start.version, seal)
        parts = RoundRunnerParts(
            own=own.peer,
            module=given.module,
            machine=self._machine,
            shelf=self._shelf,
            replica=replica,
            compute=given.compute,
            averaging=averaging,
            codecs=rules.codecs,
            outer=outer_rule(manifest),
            inner_steps=manifest.training.inner_steps,
            microbatch_tokens=manifest.microbatch_tokens,
            clock=own.clock,
            signatures=PieceSignatures(own.run, given.session.identity),
            random=SystemRandom(),
            longest_s=manifest.training.round_seconds,
        )
        self.news = RoundNews(own.peer, given.module, own.clock, given.events)
        hooks = RoundRunnerHooks(
            fellows=self._fellows,
            catch_up=self._catch_up,
            anchored=self._anchored,
            settled=self._settled,
            accused=self.news.accused,
            exchanging=self.news.exchanging,
        )
        self._averager = RoundRunner(parts, hooks)
        state_codecs = STATE_CODECS[manifest.codecs.state]
        self._donor = Donor(given.module, self._shelf, own.clock, state_codecs, averaging)
        folder = given.options.checkpoint_dir
        around = Surroundings(
            given.module,
            start.layout,
            given.session.transport,
            own.clock,
            Random(own.peer),  # noqa: S311 - spreads the load over donors; no secret
            self._shelf,
            state_codecs,
            None if folder is None else folder / own.peer / "download",
            self.news.progressed,
            self._averager.gave_other_state,
        )
        self._catching_up = CatchingUp(around)
        self._desk = StateDesk(self._catching_up, self._donor)
        self._ready = False
        self._resumed: AnchorVersion | None = None
        self._saved_at = -BETWEEN_SAVES_S

    async def run(self) -> None:
        """Until cancelled."""
        transport = self._given.session.transport
        async with task_scope() as tasks:
            tasks.create_task(self._donor.run(transport))
            tasks.create_task(self._averager.run(transport))

    def resume(self, since: Work) -> None:
        """The replica was restored with this much work since its anchor."""
        self._averager.keeper.resume(since)
        version = self._shelf.current.version
        if version.round:
            self._resumed = version
            self.news.restored(version)

    async def prepare(self) -> None:
        """Returns when the replica stands where its module stands; before that it has nothing to say in its module.

        With nobody else there it stands on its own state: the initial weights, or what it was resumed with.
        """
        await self._given.session.membership_sync.looked.wait()
        await self._settled_down()
        if self._shelf.current.version == self._resumed:
            await self._seen_who_resumes_with_us()
        elif not self._known_here():
            # The machine waits a little before it says so; then it may be too late for the first round.
            self._averager.keeper.alone = True
        self._ready = True
        self._own.anchor = self._shelf.current.version

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

    @property
    def answers(self) -> dict[QuestionAbout, Callable[[Question], Awaitable[bytes]]]:
        return {QuestionAbout.STATE: self._donor.answer}

    def describe(self) -> str:
        """One line for people."""
        return self._machine.describe()

    # ---- the replica's side ------------------------------------------------------------------------------------------

    def after_inner_step(self, figures: StepFigures) -> None:
        """On the compute thread, in the same job as the step."""
        self._averager.after_inner_step(figures)

    def stepped(self) -> None:
        """On the event loop, some time after."""
        self._averager.stepped()

    def agreed(self) -> Agreed:
        """What a checkpoint needs; on the compute thread."""
        since = self._averager.keeper.since_anchor
        return Agreed(anchor_state(self._shelf.current), since.steps, since.tokens)

    async def finish_round(self) -> None:
        """Before leaving: the round under way, if there is one, is done with us; what we have worked since our anchor
        is in it."""
        while self._machine.under_way is not None:  # noqa: ASYNC110 - the machine has no events to wait for
            await asyncio.sleep(LOOK_S)

    # ---- node.network.dispatcher.RoundReceiver -----------------------------------------------------------------------

    def admit(self, sender: PeerId, message: RoundTensor, tensor: TensorSpec) -> memoryview | Refusal:
        if isinstance(message, StateChunk):
            return self._desk.admit(sender, message, tensor)
        if not self._given.session.membership.hosts(sender, self._given.module):
            return Refusal(False, "only replicas of a module have a part in its rounds")
        return self._averager.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: RoundTensor, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, StateChunk):
            self._desk.received(sender, message, buffer)
        else:
            self._averager.received(sender, message, tensor, buffer)

    def broken_off(self, sender: PeerId, message: RoundTensor, buffer: memoryview, error: PeerError) -> None:
        if isinstance(message, StateChunk):
            self._desk.broken_off(sender, message, buffer)
        else:
            self._averager.broken_off(sender, message, buffer, error)

    def told(self, sender: PeerId, message: RoundControl | StateControl) -> None:
        if isinstance(message, StateControl):
            self._desk.told(sender, message)
        elif module_of(message) == self._given.module:
            self._averager.told(sender, message)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self._desk.link_down(peer, error)
        self._averager.link_down(peer, error)

    # ---- the averager's hooks ----------------------------------------------------------------------------------------

    def _fellows(self) -> tuple[Fellow, ...]:
        """To a newcomer one that leaves is as good as one that stays: it may be the last that has the state."""
        found = (
            Fellow(known.peer, known.anchor, known.state is PeerState.SERVING or not self._ready)
            for known in self._given.session.membership.with_state(self._given.module)
            if known.anchor is not None
        )
        return tuple(sorted(found, key=lambda fellow: fellow.peer))

    def fellows_of_last_round(self) -> frozenset[PeerId]:
        """Those who contributed to the round that made our anchor; nobody where it was made otherwise."""
        settled = self.news.settled
        if settled is None or settled.version != self._shelf.current.version:
            return frozenset()
        return frozenset(settled.contributors) - {self._own.peer}

    async def _catch_up(self, version: AnchorVersion, donors: Sequence[PeerId]) -> Anchor:
        known = self._shelf.current
        self.news.fetching(version)
        try:
            anchor = await self._catching_up.catch_up(version, donors, known)
            self.news.caught_up(anchor, known, donors, self._catching_up.received_bytes)
        finally:
            self.news.ended()
        return anchor

    def _anchored(self, anchor: Anchor) -> None:
        if self._ready:
            self._own.anchor = anchor.version
            self._given.session.membership_sync.announce()

    def _settled(self, settled: RoundSettled) -> None:
        self.news.committed(settled)
        now = self._own.clock.monotonic()
        if now - self._saved_at >= BETWEEN_SAVES_S:
            self._saved_at = now
            self._given.saves.request_save(f"round {settled.version.round}")


@asynccontextmanager
async def module_rounds(given: ModuleContext, replica: LocalReplica) -> AsyncIterator[ModuleRounds]:
    """The rounds of the module that the node hosts, at work as long as the block lasts."""
    start = await given.compute.run(Priority.UPKEEP, lambda: anchor_of(replica))
    saved, since = given.resumed.state, Work()
    with ComputeThread(set_up=lambda: torch.set_num_threads(1), name="averaging") as averaging:
        if saved is not None and saved.anchor is not None:
            restored = await averaging.run(Priority.UPKEEP, partial(_restored, given, replica.layout, saved.anchor))
            start = restored or start
            since = Work(saved.counters.steps_since_anchor, saved.counters.tokens_since_anchor)
        rounds = ModuleRounds(given, replica, start, averaging)
        rounds.resume(since)
        given.session.dispatcher.rounds = rounds
        try:
            async with task_scope() as tasks:
                running = tasks.create_task(rounds.run())
                try:
                    yield rounds
                finally:
                    running.cancel()
        finally:
            given.session.dispatcher.rounds = None


def round_rules(manifest: Manifest, layout: Layout) -> RoundRules:
    """What the manifest says about rounds."""
    training = manifest.training
    return RoundRules(
        inner_steps=training.inner_steps,
        fragments=len(layout.fragments),
        chunks=layout.chunks,
        longest_s=training.round_seconds,
        step_tokens=training.inner_tokens,
        rungs=rungs_to(Codec[manifest.codecs.pseudo_gradients.upper()]),
    )


def module_of(message: RoundControl) -> ModuleId:
    """Which module's round it is about."""
    return message.module if isinstance(message, Progress) else message.round.module


def _restored(given: ModuleContext, layout: Layout, saved: AnchorState) -> Anchor | None:
    """The saved anchor; None, and a word to the person, when it is of no use."""
    try:
        return restored_anchor(layout, saved)
    except CorruptSnapshot as error:
        given.events.emit(Note("warning", f"{error}; the parameters saved with it are taken for the anchor"))
        return None
