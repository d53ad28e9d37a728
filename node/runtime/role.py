"""Code shared by a node's two roles: data node and stage peer."""

from collections.abc import Callable
from dataclasses import dataclass

from node.averaging.module_rounds import ModuleRounds
from node.context.module_context import ModuleContext
from node.model.moments import MomentType
from node.model.optimizer import InnerOptimizer, StepFigures
from node.observability.events import InnerStep, Note, Retracted, Visit
from node.observability.status import MomentsStatus
from node.pipeline.admission import Admission
from node.pipeline.runner import LinkCodecs, MicrobatchRunner, Worker, WorkerThread
from node.pipeline.worker import receive_buffers
from protocol.interfaces.clock import Clock, SystemClock
from swarm.membership.membership import Membership
from swarm.pipeline.custody import Custody
from swarm.routing.planner import Planner
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Reasoned


class ReplicaHost:
    """Reports a replica's gradients and steps to rounds, events and proofs (`node.pipeline.runner.RunnerHost`)."""

    def __init__(self, context: ModuleContext, rounds: ModuleRounds) -> None:
        self._context, self._rounds = context, rounds
        self._own, self._module = context.session.own, str(context.module)

    def visited(self, microbatch: MicrobatchId) -> None:
        self._context.events.emit(Visit(self._own.peer, self._module, str(microbatch)))

    def retracted(self, microbatch: MicrobatchId) -> None:
        self._context.events.emit(Retracted(self._own.peer, self._module, str(microbatch)))

    def stepped(self, figures: StepFigures) -> None:
        self._own.steps = figures.step
        self._rounds.runner.stepped()
        visits, norm, rate = max(figures.visits), figures.gradient_norm, figures.learning_rate
        self._context.events.emit(InnerStep(self._own.peer, self._module, figures.step, visits, norm, rate))

    def not_reached(self, peer: PeerId, error: PeerError) -> None:
        self._context.session.membership_sync.link_down(peer, error)


@dataclass(frozen=True, slots=True)
class PlannedReplicas:
    """Lookup of replicas that could take over a microbatch (`swarm.pipeline.custody.Replicas`)."""

    _planner: Planner
    _membership: Membership
    _clock: Clock
    is_linked: Callable[[PeerId], bool]

    @property
    def fewest_hops(self) -> int:
        return self._planner.rules.fewest

    def choose(self, module: ModuleId, without: frozenset[PeerId], busy: PeerId | None) -> Reasoned[PeerId | None]:
        return self._planner.replica(module, without, {}, self._clock.monotonic(), busy)

    def link_took(self, peer: PeerId, since: float) -> None:
        self._planner.sent(peer, self._clock.monotonic() - since)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return self._membership.hosts(peer, module)

    def is_given_up(self, peer: PeerId) -> bool:
        return self._membership.is_given_up(peer)

    def goes_round(self, module: ModuleId) -> bool:
        return self._planner.goes_round(module, self._clock.monotonic())

    def has_other_expert(self, module: ModuleId) -> bool:
        return self._planner.has_other_expert(module, self._clock.monotonic())


def microbatch_runner_for(
    context: ModuleContext, worker: Worker, planner: Planner, codecs: LinkCodecs, rounds: ModuleRounds
) -> MicrobatchRunner:
    """Builds the microbatch runner of the node's replica. `planner` chooses substitutes for lost hops."""
    session, clock = context.session, SystemClock()
    own = session.own
    replicas = PlannedReplicas(planner, session.membership, clock, session.transport.is_linked)
    # A data node's own microbatches take no slots, but need as many receive buffers.
    window = (context.options.window or 0) if context.module.stage == 0 else 0
    custody = Custody(own.peer, max(context.options.slots_held, window), replicas)
    own.slots, own.used_slots = custody.slots, lambda: custody.used_slots
    admission = Admission(context.manifest, own.peer, context.module, context.routes.fault, context.routes.uninvited)
    allocate = receive_buffers(context.device)
    on_thread = WorkerThread(worker, context.compute, clock, rounds.runner.after_inner_step, allocate)
    host = ReplicaHost(context, rounds)
    return MicrobatchRunner(custody, admission, on_thread, session.transport, codecs, host, clock)


def moments_status(optimizer: InnerOptimizer) -> MomentsStatus:
    return MomentsStatus(optimizer.moments.value.value, optimizer.moments.reason, optimizer.state_bytes)


def tell_moments(context: ModuleContext, optimizer: InnerOptimizer) -> None:
    """Reports to the person the effect of `--moments`, also on moments from a checkpoint."""
    if context.options.moments is MomentType.FLOAT32:
        return
    resumed = context.resumed.state is not None and optimizer.moments.value is not MomentType.FLOAT32
    then = "; float32 moments of the checkpoint are rounded to it" if resumed else ""
    context.events.emit(Note("info", f"moments: {optimizer.moments.reason}{then}"))


def link_codecs(context: ModuleContext, worker: Worker) -> LinkCodecs:
    """Builds the codec choice of links: compares transfer time with the compute time of the link's slower peer."""
    own, membership, transport = context.session.own, context.session.membership, context.session.transport
    tokens = context.manifest.microbatch_tokens

    def visit_s(peer: PeerId) -> float:
        announced = membership.get(peer)
        speeds = (own.speed.tokens_per_s, 0.0 if announced is None else announced.tokens_per_second)
        known = [speed for speed in speeds if speed > 0]  # a data node announces no speed
        return tokens / min(known) if known else 0.0

    return LinkCodecs(context.manifest, worker.tensor, visit_s, transport.goodput_bytes_per_s)
