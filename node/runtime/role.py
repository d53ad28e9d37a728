"""What a node does in its run, and what the two kinds of duty have in common: that of a stage peer
(`node.runtime.stage_role`), of a data node (`node.runtime.data_role`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from node.averaging.module_rounds import ModuleRounds
from node.checkpoint.state import ReplicaState
from node.context.module_context import ModuleContext
from node.model.optimizer import StepFigures
from node.network.proofs import Proofs
from node.observability.events import EventSink, InnerStep, Load, Retracted, Visit
from node.observability.status import Account
from node.pipeline.admission import Admission
from node.pipeline.codec_selection import LinkCodecs
from node.pipeline.interfaces import Worker
from node.pipeline.microbatch_runner import MicrobatchRunner
from protocol.interfaces.clock import Clock, SystemClock
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.membership.membership import Membership
from swarm.pipeline.custody import Custody
from swarm.routing.planner import Planner
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Reasoned

Answering = Callable[[Question], Awaitable[bytes]]
Hook = Callable[[], Awaitable[None]]


class NodeRole(Protocol):
    """What the process needs of a duty, whichever it is."""

    carrier: MicrobatchRunner
    answers: dict[QuestionAbout, Answering]
    rounds: ModuleRounds
    before_leaving: list[Hook]
    """What is still to be done for the others when the module is let go, after `drain`; there is a limit for all
    together."""

    async def prepare(self) -> None:
        """Gets the replica ready to serve; the node is JOINING meanwhile. Cancelled when the node is asked to stop."""
        ...

    async def run(self) -> None:
        """Works until cancelled."""
        ...

    async def drain(self, patience_s: float) -> None:
        """Takes nothing new and finishes what is under way, or gives up after `patience_s` seconds."""
        ...

    def capture(self) -> ReplicaState:
        """A copy of everything the replica needs to go on. Runs on the compute thread."""
        ...

    def load(self) -> Load: ...

    def account(self) -> Account: ...


class LoggedVisits:
    """`node.pipeline.interfaces.VisitCounter` that reports each visit."""

    def __init__(self, peer: PeerId, module: str, events: EventSink, proofs: Proofs) -> None:
        self._peer = peer
        self._module = module
        self._events = events
        self._proofs = proofs

    def visited(self, microbatch: MicrobatchId) -> None:
        self._proofs.worked_on(microbatch)
        self._events.emit(Visit(self._peer, self._module, str(microbatch)))

    def retracted(self, microbatch: MicrobatchId) -> None:
        self._events.emit(Retracted(self._peer, self._module, str(microbatch)))


class PlannedReplicas:
    """`swarm.pipeline.ledger.Replicas` by what the planner and the membership view know now."""

    def __init__(
        self, planner: Planner, membership: Membership, clock: Clock, is_linked: Callable[[PeerId], bool]
    ) -> None:
        self._planner = planner
        self._membership = membership
        self._clock = clock
        self._is_linked = is_linked

    @property
    def fewest_hops(self) -> int:
        return self._planner.rules.fewest

    def choose(self, module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        return self._planner.replica(module, without, {}, self._clock.monotonic())

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return self._membership.hosts(peer, module)

    def is_given_up(self, peer: PeerId) -> bool:
        return self._membership.is_given_up(peer)

    def is_linked(self, peer: PeerId) -> bool:
        return self._is_linked(peer)

    def goes_round(self, module: ModuleId) -> bool:
        return self._planner.goes_round(module, self._clock.monotonic())


def microbatch_runner_for(
    given: ModuleContext, worker: Worker, planner: Planner, rounds: ModuleRounds
) -> MicrobatchRunner:
    """Carries for the replica that the node hosts; repair asks the planner who stands in."""
    own, clock, module = given.session.own, SystemClock(), str(given.module)
    session = given.session
    replicas = PlannedReplicas(planner, session.membership, clock, session.transport.is_linked)
    custody = Custody(own.peer, given.options.slots_held, replicas)
    own.slots, own.used_slots = custody.slots, lambda: custody.used_slots

    def stepped(figures: StepFigures) -> None:
        own.steps = figures.step
        rounds.stepped()
        visits, norm, rate = max(figures.visits), figures.gradient_norm, figures.learning_rate
        given.events.emit(InnerStep(own.peer, module, figures.step, visits, norm, rate))

    admission = Admission(given.manifest, own.peer, given.module, session.routes.fault)
    codecs = link_codecs(given, worker)
    given.proofs.in_rounds = rounds.fellows_of_last_round
    on_failure = given.session.membership_sync.link_down
    visits = LoggedVisits(own.peer, module, given.events, given.proofs)
    return MicrobatchRunner(
        custody, admission, worker, given.compute, clock, on_failure, stepped, visits=visits, codecs=codecs
    )


def link_codecs(given: ModuleContext, worker: Worker) -> LinkCodecs:
    """A visit takes as long as the slower end of a link needs, as far as it announces its speed (data nodes do not:
    nobody waits for theirs)."""
    own, membership, transport = given.session.own, given.session.membership, given.session.transport
    tokens = given.manifest.microbatch_tokens

    def visit_s(peer: PeerId) -> float:
        announced = membership.get(peer)
        speeds = (own.tokens_per_second, 0.0 if announced is None else announced.tokens_per_second)
        known = [speed for speed in speeds if speed > 0]
        return tokens / min(known) if known else 0.0

    return LinkCodecs(given.manifest, worker.tensor, visit_s, transport.goodput_bytes_per_s)
