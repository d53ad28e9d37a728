"""A solo run's checkpoint: every module in the folder of a peer of its own, so that it reads like a swarm's.

The modules are saved one after the other. A machine that dies in between leaves some of them a save ahead, so a run goes on from
the latest step that all of them have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from node.averaging.lone import LoneReplica
from node.checkpoint.folder import (
    CheckpointFolder,
    Problem,
    check_run,
    remove_older,
    whole_snapshots,
    write_snapshot,
)
from node.checkpoint.snapshot import Header, read_state
from node.checkpoint.state import DataState, ReplicaState
from node.data.packing import Cursor
from node.optimization import InnerOptimizer
from node.resume import capture_module, restore_module
from swarm.errors import CorruptSnapshot
from swarm.vocabulary import ModuleId, PeerId


@dataclass(frozen=True, slots=True, eq=False)
class Hosted:
    """A module, its parts, and what trains it."""

    module: ModuleId
    parts: tuple[nn.Module, ...]
    optimizer: InnerOptimizer
    replica: LoneReplica


def solo_peer(module: ModuleId) -> PeerId:
    """Whose folder a solo run's module is in."""
    return PeerId(f"solo-{module}")


def save_solo(folder: CheckpointFolder, hosted: Sequence[Hosted], *, microbatches: int, size: int, at: Cursor) -> None:
    """Saves the whole model after an inner step. Nothing old is removed before everything new is written.

    Args:
        microbatches: completed, each of `size` tokens.
        at: where the next one begins.

    Raises:
        ResourceExhausted, StateError: see `node.checkpoint.folder.save_state`.
    """
    data = DataState(at, next_number=microbatches, completed=microbatches, abandoned=0, duplicated=0)
    for each in hosted:
        agreed = each.replica.agreed()
        state = capture_module(each.parts, each.optimizer, visits=microbatches, tokens=size, agreed=agreed)
        if each.module == ModuleId(0):
            state = ReplicaState(state.local, state.inner, state.counters, state.anchor, data)
        write_snapshot(folder, solo_peer(each.module), each.module, state)
    for each in hosted:
        remove_older(folder, solo_peer(each.module))


def load_solo(folder: CheckpointFolder, hosted: Sequence[Hosted]) -> tuple[DataState | None, tuple[Problem, ...]]:
    """Puts the model back as it was at the latest step that is whole for every module; None when nothing was saved.

    Also returns what is wrong with snapshots that had to be passed over.

    Raises:
        CorruptSnapshot: something was saved, and no step of it is whole.
        StateError: see `check_run` and `node.resume.restore_module`.
    """
    check_run(folder)
    problems: list[Problem] = []
    saved = [
        _by_step(whole_snapshots(folder, solo_peer(module), problems)) for module in (each.module for each in hosted)
    ]
    common = set(saved[0]).intersection(*saved)
    if not common:
        if problems or any(saved):
            named = "; ".join(str(problem) for problem in problems) or "its modules were saved at different steps"
            raise CorruptSnapshot(f"{folder.path}: no step of the run is whole: {named}")
        return None, ()
    step, position = max(common), None
    for each, headers in zip(hosted, saved, strict=True):
        state = read_state(folder.of(solo_peer(each.module)), headers[step])
        restore_module(each.parts, each.optimizer, state)
        each.replica.restore(state)
        position = state.data or position
    if position is None:
        raise CorruptSnapshot(f"{folder.path}: the snapshot of module {ModuleId(0)} has no position in the text")
    return position, tuple(problems)


def _by_step(newest_first: Iterable[Header]) -> dict[int, Header]:
    found: dict[int, Header] = {}
    for header in newest_first:
        found.setdefault(header.steps, header)
    return found
