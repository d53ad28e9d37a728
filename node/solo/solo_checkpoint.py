"""The checkpoint of a solo run: every module in the folder of a peer of its own, so that it reads like a swarm's.

The modules are saved one after the other. A machine that dies in between leaves some of them a save ahead, so each says
how far the run was, and it goes on from the latest point that all of them have. (Where stages are skipped, their own
inner steps do not tell.)
"""

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
    Header,
    Problem,
    check_run,
    read_state,
    remove_older,
    whole_snapshots,
    write_snapshot,
)
from node.checkpoint.saver import capture_module, restore_module
from node.checkpoint.state import Agreed, DataState, ReplicaState
from node.data.packing import Cursor
from node.model.optimizer import InnerOptimizer
from swarm.vocabulary.errors import CorruptSnapshot
from swarm.vocabulary.types import ModuleId, PeerId


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The plan of a solo run's checkpoints: where, and how often."""

    folder: CheckpointFolder
    every_s: float = math.inf
    """Seconds between two saves; a run is saved at its end too."""


class SoloReplica:
    """The anchor of a module without company; its outer steps go before the inner steps after those that make them due.

    Args:
        every: inner steps between two outer steps.
    """

    def __init__(self, local: LocalReplica, rule: OuterRule, every: int) -> None:
        self.store = AnchorStore(anchor_of(local))
        self._local = local
        self._rule = rule
        self._every = every
        self._steps = self._tokens = 0
        local.optimizer.before_step = self._before_inner_step

    def after_inner_step(self, tokens: int) -> None:
        """Counts an inner step."""
        self._steps += 1
        self._tokens += tokens

    def _before_inner_step(self) -> None:
        if self._steps >= self._every:
            step_alone(self._local, self.store, self._rule, self._steps, self._tokens)
            self._steps = self._tokens = 0

    def agreed(self) -> Agreed:
        """The anchor and the work since, for a checkpoint."""
        return Agreed(self.store.saved(), self._steps, self._tokens)

    def restore(self, state: ReplicaState) -> None:
        """Resumes from a checkpoint whose parameters the replica has already. Raises CorruptSnapshot."""
        if state.anchor is not None:
            self.store = AnchorStore(restored_anchor(self._local.layout, state.anchor))
            self._steps, self._tokens = state.counters.steps_since_anchor, state.counters.tokens_since_anchor


@dataclass(slots=True, eq=False)
class Hosted:
    """A module, its parts, and what trains it."""

    module: ModuleId
    parts: tuple[nn.Module, ...]
    optimizer: InnerOptimizer
    replica: SoloReplica
    visits: int = 0
    """Applied."""


def solo_peer(module: ModuleId) -> PeerId:
    """The peer in whose folder a solo run's module is."""
    return PeerId(f"solo-{module}")


def save_solo(folder: CheckpointFolder, hosted: Sequence[Hosted], *, microbatches: int, steps: int, at: Cursor) -> None:
    """Saves the whole model after an inner step. Nothing old is removed before everything new is written.

    Args:
        microbatches: completed.
        steps: of stage 0.
        at: where the next one begins.

    Raises:
        ResourceExhausted, StateError: see `node.checkpoint.folder.save_state`.
    """
    data = DataState(at, next_number=microbatches, completed=microbatches, abandoned=0, duplicated=0, steps=steps)
    for each in hosted:
        agreed, tokens = each.replica.agreed(), each.optimizer.tokens
        state = capture_module(each.parts, each.optimizer, visits=each.visits, tokens=tokens, agreed=agreed)
        state = ReplicaState(state.local, state.inner, state.counters, state.anchor, data)
        write_snapshot(folder, solo_peer(each.module), each.module, state)
    for each in hosted:
        remove_older(folder, solo_peer(each.module))


def load_solo(folder: CheckpointFolder, hosted: Sequence[Hosted]) -> tuple[DataState | None, tuple[Problem, ...]]:
    """Restores the model as it was when it was last saved whole; None when nothing was saved.

    Also returns what is wrong with snapshots that had to be passed over.

    Raises:
        CorruptSnapshot: something was saved, and no save is whole.
        StateError: see `check_run` and `node.checkpoint.saver.restore_module`.
    """
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
    """By how many microbatches the run had completed."""
    found: dict[int, Header] = {}
    for header in newest_first:
        if header.data is not None:
            found.setdefault(header.data.completed, header)
    return found
