"""Training in one process: the baseline that a swarm of one replica a stage must reproduce, and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from node.averaging.anchor.anchor import AnchorStore, restored_anchor
from node.averaging.anchor.local_replica import LocalReplica, anchor_of
from node.averaging.anchor.outer_step import OuterRule, step_alone
from node.checkpoint.folder import (
    CheckpointFolder,
    Problem,
    check_run,
    remove_older,
    whole_snapshots,
    write_snapshot,
)
from node.checkpoint.saver import capture_module, restore_module
from node.checkpoint.snapshot import Header, read_state
from node.checkpoint.state import Agreed, DataState, ReplicaState
from node.data.packing import Cursor
from node.model.optimizer import InnerOptimizer
from swarm.vocabulary.errors import CorruptSnapshot
from swarm.vocabulary.types import ModuleId, PeerId


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    folder: CheckpointFolder
    every_s: float = math.inf


class SoloReplica:
    """The anchor of a lone module. Its outer step comes right before the inner step after the one that made it due."""

    def __init__(self, local: LocalReplica, rule: OuterRule, every: int) -> None:
        self.store = AnchorStore(anchor_of(local))
        self._local = local
        self._rule = rule
        self._every = every
        self._steps = self._tokens = 0
        local.optimizer.before_step = self._before_inner_step

    def after_inner_step(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens

    def _before_inner_step(self) -> None:
        if self._steps >= self._every:
            step_alone(self._local, self.store, self._rule, self._steps, self._tokens)
            self._steps = self._tokens = 0

    def agreed(self) -> Agreed:
        return Agreed(self.store.saved(), self._steps, self._tokens)

    def restore(self, state: ReplicaState) -> None:
        """Resumes from a checkpoint whose parameters the replica has already. Raises CorruptSnapshot."""
        if state.anchor is not None:
            self.store = AnchorStore(restored_anchor(self._local.layout, state.anchor))
            self._steps, self._tokens = state.counters.steps_since_anchor, state.counters.tokens_since_anchor


@dataclass(slots=True, eq=False)
class Hosted:
    module: ModuleId
    parts: tuple[nn.Module, ...]
    optimizer: InnerOptimizer
    replica: SoloReplica
    visits: int = 0


def solo_peer(module: ModuleId) -> PeerId:
    """The peer in whose folder a solo run's module is."""
    return PeerId(f"solo-{module}")


def save_solo(folder: CheckpointFolder, hosted: Sequence[Hosted], *, microbatches: int, steps: int, at: Cursor) -> None:
    """Saves the whole model after an inner step. Removes old snapshots after all new ones are written."""
    data = DataState(at, next_number=microbatches, completed=microbatches, abandoned=0, duplicated=0, steps=steps)
    for each in hosted:
        agreed, tokens = each.replica.agreed(), each.optimizer.tokens
        state = capture_module(each.parts, each.optimizer, visits=each.visits, tokens=tokens, agreed=agreed)
        state = ReplicaState(state.local, state.inner, state.counters, state.anchor, data)
        write_snapshot(folder, solo_peer(each.module), each.module, state)
    for each in hosted:
        remove_older(folder, solo_peer(each.module))


def load_solo(folder: CheckpointFolder, hosted: Sequence[Hosted]) -> tuple[DataState | None, tuple[Problem, ...]]:
    """Restores the last whole save, if any; returns the problems found. Raises CorruptSnapshot, StateError."""
    check_run(folder)
    problems: list[Problem] = []
    saved = [
        _by_position(whole_snapshots(folder, solo_peer(module), problems))
        for module in (each.module for each in hosted)
    ]
    common = set(saved[0]).intersection(*saved)
    if not common:
        if problems or any(saved):
            named = "; ".join(str(problem) for problem in problems) or "its modules were saved at different times"
            raise CorruptSnapshot(f"{folder.path}: no save of the run is whole: {named}")
        return None, ()
    newest = max(common)
    for each, headers in zip(hosted, saved, strict=True):
        state = read_state(folder.of(solo_peer(each.module)), headers[newest])
        restore_module(each.parts, each.optimizer, state)
        each.replica.restore(state)
        each.visits = state.counters.visits
    return saved[0][newest].data, tuple(problems)


def _by_position(newest_first: Iterable[Header]) -> dict[int, Header]:
    found: dict[int, Header] = {}
    for header in newest_first:
        if header.data is not None:
            found.setdefault(header.data.completed, header)
    return found
