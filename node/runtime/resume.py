"""Conversion between a working replica and its state in a checkpoint."""

import math
from collections.abc import Iterable
from dataclasses import replace

from node.checkpoint.folder import CheckpointFolder, load_newest, whole_snapshots
from node.checkpoint.saver import capture_module, restore_module
from node.checkpoint.state import Agreed, DataState, Post, ReplicaState, ResumedState
from node.observability.events import Note
from node.pipeline.worker import DataWorker, HopWorker
from node.routing.launcher import Training, TrainingProgress
from swarm.pipeline.in_flight import Counts
from swarm.vocabulary.errors import CorruptSnapshot
from swarm.vocabulary.types import ModuleId, PeerId

# Distance between the microbatch numbers of two starts. A killed node used more numbers than its snapshot says.
RESERVED_NUMBERS = 2**32
NUMBERS = 2**47  # Numbers of training microbatches; evaluation uses the numbers above.


def capture_hop(worker: HopWorker, agreed: Agreed | None, post: Post) -> ReplicaState:
    unapplied = worker.unapplied  # gradients not yet applied are not saved, so they do not count
    visits, tokens = worker.accumulated - unapplied.visits, worker.accumulated_tokens - unapplied.tokens
    return capture_module((worker.part,), worker.optimizer, post, visits=visits, tokens=tokens, agreed=agreed)


def capture_stage_zero(worker: DataWorker, training: Training, agreed: Agreed | None, post: Post) -> ReplicaState:
    """Captures a data node's replica, and the position in the text up to which its parameters are trained."""
    stage, in_flight, progress = worker.stage, training.in_flight, training.progress
    counts = in_flight.counts
    unapplied = stage.embedding_sum
    visits, tokens = worker.accumulated - unapplied.visits, worker.accumulated_tokens - unapplied.tokens
    plain = capture_module(stage.parts, stage.optimizer, post, visits=visits, tokens=tokens, agreed=agreed)
    data = DataState(
        cursor=training.reading.resume_at(stage.embedding_sum.has_applied),
        next_number=in_flight.next_number,
        completed=visits,
        steps=worker.steps,
        abandoned=counts.abandoned,
        duplicated=counts.duplicated,
        loss_first=_finite(progress.loss_first),
        loss_last=_finite(progress.loss_last),
    )
    return replace(plain, data=data)


def restore_hop(worker: HopWorker, state: ReplicaState) -> None:
    restore_module((worker.part,), worker.optimizer, state)
    worker.accumulated, worker.accumulated_tokens = state.counters.visits, state.counters.tokens


def restore_stage_zero(worker: DataWorker, state: ReplicaState, per_step: int) -> None:
    """Restores a data node's replica of stage 0. Raises as `restore_module`."""
    restore_module(worker.stage.parts, worker.stage.optimizer, state)
    worker.steps = 0 if state.data is None else state.data.steps_done(per_step)
    worker.accumulated, worker.accumulated_tokens = state.counters.visits, state.counters.tokens


def counts_of(data: DataState | None) -> Counts:
    """Returns the microbatch counts of a resumed data node. Microbatches that were in flight are read again."""
    if data is None:
        return Counts()
    return Counts(data.completed + data.abandoned, data.completed, data.abandoned, data.duplicated)


def progress_of(resumed: ResumedState) -> TrainingProgress:
    state = resumed.state
    if state is None or state.data is None:
        return TrainingProgress()
    return TrainingProgress(state.data.loss_first, state.data.loss_last, state.counters.tokens)


def first_number(data: DataState | None, drawn: int) -> int:
    """Returns the first microbatch number: the random `drawn`, unless the last start used numbers near it."""
    if data is None or abs(drawn - data.next_number) > RESERVED_NUMBERS:
        return drawn
    return (drawn + 2 * RESERVED_NUMBERS + 1) % (NUMBERS // 2)


def find_own(folder: CheckpointFolder, peer: PeerId, module: ModuleId | None) -> tuple[ResumedState, tuple[Note, ...]]:
    """Loads the peer's newest checkpoint, of `module` or any, with messages for the person. Raises StateError."""
    try:
        found = load_newest(folder, peer, module)
    except CorruptSnapshot as error:
        return ResumedState(), (Note("warning", f"{error}; the node starts without a snapshot"),)
    if found is None:
        return ResumedState(), ()
    header = found.header
    at = f"inner step {header.steps}, {header.counters.tokens} tokens"
    damaged = tuple(Note("warning", f"skipped a damaged snapshot: {problem}") for problem in found.problems)
    note = Note("info", f"resumes module {header.owner.module} from snapshot {header.number}: {at}")
    return ResumedState(header.owner.module, found.state), (*damaged, note)


def saved_modules(folder: CheckpointFolder, peers: Iterable[PeerId]) -> list[ModuleId]:
    """Returns the modules of these peers' newest intact snapshots. Raises StateError."""
    newest = (next(whole_snapshots(folder, peer, []), None) for peer in peers)
    return [header.owner.module for header in newest if header is not None]


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
