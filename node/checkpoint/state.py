"""The saved state of a replica, as plain data: all it needs to go on where it stopped. `node.checkpoint.snapshot` turns
it into files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from node.checkpoint.state_copy import StateCopy
from node.data.packing import Cursor
from node.model.optimizer import InnerState, Tensors
from swarm.vocabulary.types import AnchorVersion, ModuleId


class TensorsInParts(Mapping[str, Tensor], ABC):
    """Tensors by name that lie in memory in several parts, to be written part by part without a copy of the whole."""

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def parts_of(self, name: str) -> Iterator[Tensor]:
        """Its elements, one-dimensional tensors one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """The module's anchor, and this replica's work since."""

    anchor: AnchorState
    steps_since: int
    tokens_since: int


@dataclass(slots=True, eq=False)
class Resumed:
    """The state from which a starting node goes on: nothing, or its own snapshot."""

    module: ModuleId | None = None
    state: ReplicaState | None = None
    """Let go of once the module has been made from it: it is several times the module's size."""


@dataclass(frozen=True, slots=True, eq=False)
class AnchorState:
    """The last agreed parameters and the outer momentum."""

    version: AnchorVersion
    parameters: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor] | None = None
    """None before the first outer step."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts of a replica's work, counting only what has gone into its parameters."""

    tokens: int
    """Tokens trained on since the initial weights."""
    visits: int
    """Microbatches whose gradient has been applied."""
    steps_since_anchor: int
    tokens_since_anchor: int


@dataclass(frozen=True, slots=True)
class DataState:
    """The additional state of a data node, besides its replica of stage 0."""

    cursor: Cursor
    """Where to go on reading: at the first text whose gradient is not in the parameters."""
    next_number: int
    """Of the next microbatch; numbers after it may have been used before the node stopped."""
    completed: int
    abandoned: int
    duplicated: int
    loss_first: float | None = None
    loss_last: float | None = None
    steps: int | None = None
    """Completed. None where an older version has saved it."""

    def steps_done(self, per_step: int) -> int:
        """The completed steps; where they are not said, as many as there were so many microbatches."""
        return self.completed // per_step if self.steps is None else self.steps


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaState:
    """The state of one replica of a module at one moment."""

    local: Tensors
    """The module's parameters."""
    inner: InnerState
    counters: Counters
    anchor: AnchorState | None = None
    """None before the module's first round."""
    data: DataState | None = None
    """Of a data node only."""
    copying: StateCopy | None = None
    """Copies those of the tensors that are still the replica's own, which it will change."""
