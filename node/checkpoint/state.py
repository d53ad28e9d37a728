"""What a replica needs to go on where it stopped, as plain data. `node.checkpoint.snapshot` turns it into files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from node.data.packing import Cursor
from swarm.vocabulary import AnchorVersion

Tensors = Mapping[str, Tensor]
"""Float32 on the CPU, by parameter name."""


@dataclass(frozen=True, slots=True, eq=False)
class InnerState:
    """Of the inner optimizer (AdamW). A parameter that no step has moved yet has no moments."""

    steps: int
    """Inner steps taken; the learning rate follows from it."""
    exp_avg: Tensors
    exp_avg_sq: Tensors
    adam_steps: Mapping[str, int]
    """Steps of each parameter that has moments. A part without visits is left out of a step, so they may differ."""


@dataclass(frozen=True, slots=True, eq=False)
class AnchorState:
    """The last agreed parameters and the outer momentum."""

    version: AnchorVersion
    parameters: Tensors
    momentum: Tensors | None = None
    """None before the first outer step."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a replica has done, counting only what has gone into its parameters."""

    tokens: int
    """Tokens trained on since the initial weights."""
    visits: int
    """Microbatches whose gradient has been applied."""
    steps_since_anchor: int
    tokens_since_anchor: int


@dataclass(frozen=True, slots=True)
class DataState:
    """Of a data node besides its replica of stage 0."""

    cursor: Cursor
    """Where to go on reading: at the first text whose gradient is not in the parameters."""
    next_number: int
    """Of the next microbatch; numbers after it may have been used before the node stopped."""
    completed: int
    abandoned: int
    duplicated: int
    loss_first: float | None = None
    loss_last: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaState:
    """One replica of a module at one moment."""

    local: Tensors
    """The module's parameters."""
    inner: InnerState
    counters: Counters
    anchor: AnchorState | None = None
    """None before the module's first round."""
    data: DataState | None = None
    """Of a data node only."""
