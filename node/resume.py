"""Between a replica at work and its saved state: what is copied out of it, what is put back, and what a starting node finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from node.checkpoint.folder import CheckpointFolder, load_newest
from node.checkpoint.state import AnchorState, Counters, DataState, ReplicaState
from node.data.position import ReadingPosition
from node.data_node import Progress
from node.data_worker import DataWorker
from node.events import Note
from node.hop_worker import HopWorker
from node.model.initial import parameters_of
from node.optimization import InnerOptimizer
from node.tensors import copied
from swarm.errors import CorruptSnapshot, StateError
from swarm.flights import Counts, Flights
from swarm.vocabulary import ModuleId, PeerId

RESERVED_NUMBERS = 2**32
"""A node that was killed has used microbatch numbers after those in its snapshot, and in its life many before it: so many are left out either way."""
NUMBERS = 2**47
"""Of microbatches that are trained on; those from here on are of what is evaluated."""


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """The module's anchor, and how far this replica has come from it."""

    anchor: AnchorState
    steps_since: int
    tokens_since: int


@dataclass(slots=True, eq=False)
class Resumed:
    """What a starting node goes on from: nothing, or its own snapshot."""

    module: ModuleId | None = None
    state: ReplicaState | None = None
    """Let go of once the module has been made from it: it is several times the module's size."""


AgreedNow = Callable[[], Agreed | None]
"""Asked on the compute thread while a replica is copied; its tensors must not be written to afterwards."""


def nothing_agreed() -> Agreed | None:
    """Of a replica that has not taken part in a round."""
    return None


# ---- copying out, on the compute thread ------------------------------------------------------------------------------------


def capture_module(
    parts: tuple[nn.Module, ...], optimizer: InnerOptimizer, *, visits: int, tokens: int, agreed: Agreed | None = None
) -> ReplicaState:
    """A copy of a replica as it is between two inner steps. `visits` have been applied, of `tokens` tokens each."""
    names = parameters_of(*parts)
    since = (optimizer.steps, visits * tokens) if agreed is None else (agreed.steps_since, agreed.tokens_since)
    return ReplicaState(
        local={name: copied(tensor) for name, tensor in names.items()},
        inner=optimizer.export_state(names),
        counters=Counters(visits * tokens, visits, *since),
        anchor=None if agreed is None else agreed.anchor,
    )


def capture_hop(worker: HopWorker, tokens: int, agreed: Agreed | None) -> ReplicaState:
    """A stage peer's replica; `tokens` are those of a microbatch."""
    visits = worker.accumulated - worker.unapplied
    return capture_module((worker.part,), worker.optimizer, visits=visits, tokens=tokens, agreed=agreed)


def capture_stage_zero(
    worker: DataWorker, flights: Flights, progress: Progress, reading: ReadingPosition, agreed: Agreed | None
) -> ReplicaState:
    """A data node's replica, and the place in its text that goes with exactly these parameters."""
    stage, counts = worker.stage, flights.counts
    visits = worker.accumulated - stage.embedding_sum.visits
    parts = stage.embedding, stage.head
    plain = capture_module(parts, stage.optimizer, visits=visits, tokens=worker.tokens, agreed=agreed)
    data = DataState(
        cursor=reading.resume_at(stage.embedding_sum.has_applied),
        next_number=flights.next_number,
        completed=visits,
        abandoned=counts.abandoned,
        duplicated=counts.duplicated,
        loss_first=_finite(progress.loss_first),
        loss_last=_finite(progress.loss_last),
    )
    return ReplicaState(plain.local, plain.inner, plain.counters, plain.anchor, data)


# ---- putting back ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def restore_module(parts: tuple[nn.Module, ...], optimizer: InnerOptimizer, state: ReplicaState) -> None:
    """Parameters and optimizer as they were saved, in place.

    Raises:
        StateError: the state is of another model; nothing has been changed.
    """
    parameters = parameters_of(*parts)
    saved, own = ({name: t.shape for name, t in tensors.items()} for tensors in (state.local, parameters))
    if saved != own:
        raise StateError("the snapshot is of a model with other parameters than this version builds from the manifest")
    optimizer.import_state(parameters, state.inner)
    for name, parameter in parameters.items():
        parameter.copy_(state.local[name])


def restore_hop(worker: HopWorker, state: ReplicaState) -> None:
    """A stage peer's replica. Errors as `restore_module`."""
    restore_module((worker.part,), worker.optimizer, state)
    worker.accumulated = state.counters.visits


def restore_stage_zero(worker: DataWorker, state: ReplicaState) -> None:
    """A data node's replica of stage 0. Errors as `restore_module`."""
    restore_module((worker.stage.embedding, worker.stage.head), worker.stage.optimizer, state)
    worker.accumulated = state.counters.visits


def counts_of(data: DataState | None) -> Counts:
    """What a data node goes on counting from. What was under way when the state was saved was never completed, and is read again."""
    if data is None:
        return Counts()
    return Counts(data.completed + data.abandoned, data.completed, data.abandoned, data.duplicated)


def position_of(resumed: Resumed) -> DataState | None:
    """Where a data node stood."""
    return None if resumed.state is None else resumed.state.data


def progress_of(resumed: Resumed) -> Progress:
    """The training as a data node goes on seeing it."""
    state = resumed.state
    if state is None or state.data is None:
        return Progress()
    return Progress(state.data.loss_first, state.data.loss_last, state.counters.tokens)


def first_number(data: DataState | None, drawn: int) -> int:
    """Of the microbatches of this start: `drawn`, a number below NUMBERS / 2 that nobody else can know, unless the life before has come too near it.

    Those of earlier lives it meets by chance only: of a hundred lives of a million microbatches each, once in 10,000 runs.
    """
    if data is None or abs(drawn - data.next_number) > RESERVED_NUMBERS:
        return drawn
    return (drawn + 2 * RESERVED_NUMBERS + 1) % (NUMBERS // 2)


# ---- at the start ----------------------------------------------------------------------------------------------------------


def find_own(folder: CheckpointFolder, peer: PeerId, module: ModuleId | None) -> tuple[Resumed, tuple[Note, ...]]:
    """The peer's newest state, of `module` or (None) of any, and what to tell the person. Reads the disk.

    Every damaged file is named. When all are damaged, the node goes on without them.

    Raises:
        StateError: the folder holds another run's checkpoint.
    """
    try:
        found = load_newest(folder, peer, module)
    except CorruptSnapshot as error:
        return Resumed(), (Note("warning", f"{error}; the node goes on without them"),)
    if found is None:
        return Resumed(), ()
    header = found.header
    at = f"inner step {header.steps}, {header.counters.tokens} tokens"
    damaged = tuple(Note("warning", f"damaged snapshot passed over: {problem}") for problem in found.problems)
    told = Note("info", f"resumes module {header.owner.module} from snapshot {header.number}: {at}")
    return Resumed(header.owner.module, found.state), (*damaged, told)


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
