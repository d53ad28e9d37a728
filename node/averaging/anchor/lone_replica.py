"""The outer step of a replica that is alone in its module: its own pseudo-gradient, so that the outer optimizer means
the same.

It is taken at the beginning of the inner step after the one that made it due. The parameters are what they were until
then, so the new anchor can be made beside training meanwhile (`node.averaging.replica_sync`), and is the same when it
is made at that moment, as in `solo`: a swarm with one replica a stage takes the same steps at the same places. A
checkpoint in between needs nothing besides the anchor before and the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from node.averaging.anchor.anchor import Anchor, initial_anchor, restored_anchor
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.module_vector import LocalReplica
from node.averaging.anchor.outer_step import OuterRule, Staging
from node.averaging.anchor.shared_vector import Vector, empty_vector
from node.averaging.anchor.vector_math import squares
from node.checkpoint.state import Agreed, ReplicaState
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import MAX_COUNT

PIECE: Final = 2**18
"""Elements (1 MiB) of which the next anchor is made at a time."""


def anchor_of(replica: LocalReplica) -> Anchor:
    """The anchor before the first round, of the replica's parameters as they are now."""
    parameters = empty_vector(replica.layout)
    for part, array in parameters.pieces():
        replica.read(part, array)
    return initial_anchor(replica.layout, parameters)


def steps_between_rounds(inner_steps: int, fragments: int) -> int:
    """Inner steps between two outer steps: each fragment's turn comes once in `inner_steps` steps."""
    return math.ceil(inner_steps / fragments)


class LoneStep:
    """The outer step of a lone replica for the fragment that is due: makes the next anchor, piece by piece.

    Args:
        read: copies a part of the replica's parameters to an array of its length.

    Raises:
        ResourceExhausted: there is no memory for another anchor.
    """

    def __init__(self, store: AnchorStore, rule: OuterRule, read: Callable[[slice, Vector], None]) -> None:
        self.base = store.current
        self._read = read
        layout, (first, end) = self.base.layout, self.base.layout.fragments[self.base.version.fragment]
        self.fragment = layout.range_of(first, end)
        """The elements that it moves."""
        self._staging = Staging(self.base, rule, *store.spare(self.fragment))
        at_a_time = max(1, PIECE // layout.chunk_elements)
        self._pieces = [(start, min(start + at_a_time, end)) for start in range(first, end, at_a_time)]
        self._room: Vector = np.empty(min(at_a_time * layout.chunk_elements, layout.elements), np.float32)

    def pieces(self) -> Iterator[Callable[[], None]]:
        """What is to be called before `anchor`, in this order, a millisecond or a few each. They raise StateError when
        the replica's update is not finite."""
        return (partial(self._apply, first, end) for first, end in self._pieces)

    def anchor(self, steps: int, tokens: int) -> Anchor:
        """The new anchor, of so much work since the one before."""
        version = self.base.version
        return self._staging.finish(
            version.round + 1, min(version.steps + steps, MAX_COUNT), min(version.tokens + tokens, MAX_COUNT)
        )

    def _apply(self, first: int, end: int) -> None:
        part = self.base.layout.range_of(first, end)
        local = self._room[: part.stop - part.start]
        self._read(part, local)
        gradient = np.subtract(self.base.parameters[part], local, out=local)
        if not math.isfinite(squares(gradient)):
            raise StateError("training has diverged: the parameters of this replica are not finite")
        self._staging.apply(first, end, gradient)


def step_alone(replica: LocalReplica, store: AnchorStore, rule: OuterRule, steps: int, tokens: int) -> Anchor:
    """Takes the outer step at once: puts the new anchor on the store and the replica on it.

    Args:
        steps, tokens: of the work since the current anchor.

    Raises:
        StateError: the replica's update is not finite.
        ResourceExhausted: there is no memory for another anchor.
    """
    step = LoneStep(store, rule, replica.read)
    for piece in step.pieces():
        piece()
    anchor = step.anchor(steps, tokens)
    replica.write(step.fragment, anchor.parameters[step.fragment])
    store.put(anchor)
    return anchor


class LoneReplica:
    """A replica that is always alone, with nobody to announce its anchors to: a module of `solo`."""

    def __init__(self, local: LocalReplica, rule: OuterRule, inner_steps: int) -> None:
        self.store = AnchorStore(anchor_of(local))
        self._local = local
        self._rule = rule
        self._every = steps_between_rounds(inner_steps, len(local.layout.fragments))
        self._steps = self._tokens = 0
        local.optimizer.before_step = self._before_inner_step

    def after_inner_step(self, tokens: int) -> None:
        """Counts an inner step into which so many tokens went. If that makes the outer step due, the next inner step
        begins with it, and raises what `step_alone` raises."""
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
        """Goes on from a checkpoint, whose parameters the replica has already. Raises CorruptSnapshot."""
        if state.anchor is None:
            return
        self.store = AnchorStore(restored_anchor(self._local.layout, state.anchor))
        self._steps, self._tokens = state.counters.steps_since_anchor, state.counters.tokens_since_anchor
