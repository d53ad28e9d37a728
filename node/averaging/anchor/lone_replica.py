"""The outer step of a replica that is alone in its module: its own pseudo-gradient, so that the outer optimizer means
the same.

It happens on the compute thread, right after an inner step, so a swarm with one replica a stage and `solo` take the
same steps at the same places.
"""

from __future__ import annotations

import math

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


def anchor_of(replica: LocalReplica) -> Anchor:
    """The anchor before the first round, of the replica's parameters as they are now."""
    parameters = empty_vector(replica.layout)
    for part, array in parameters.pieces():
        replica.read(part, array)
    return initial_anchor(replica.layout, parameters)


def steps_between_rounds(inner_steps: int, fragments: int) -> int:
    """Inner steps between two outer steps: each fragment's turn comes once in `inner_steps` steps."""
    return math.ceil(inner_steps / fragments)


def step_alone(replica: LocalReplica, store: AnchorStore, rule: OuterRule, steps: int, tokens: int) -> Anchor:
    """Takes the outer step for the fragment that is due, puts the new anchor on the store and the replica on it.

    Args:
        steps, tokens: of the work since the current anchor.

    Raises:
        StateError: the replica's update is not finite.
        ResourceExhausted: there is no memory for another anchor.
    """
    base = store.current
    layout = base.layout
    first, end = layout.fragments[base.version.fragment]
    vectors = store.spare(layout.range_of(first, end))
    staging = Staging(base, rule, *vectors)
    for chunk in range(first, end):
        part = layout.range_of(chunk, chunk + 1)
        local: Vector = np.empty(part.stop - part.start, np.float32)
        replica.read(part, local)
        gradient = np.subtract(base.parameters[part], local, out=local)
        if not math.isfinite(squares(gradient)):
            store.give_back(*vectors)
            raise StateError("training has diverged: the parameters of this replica are not finite")
        staging.apply(chunk, chunk + 1, gradient)
    anchor = staging.finish(
        base.version.round + 1, min(base.version.steps + steps, MAX_COUNT), min(base.version.tokens + tokens, MAX_COUNT)
    )
    fragment = layout.range_of(first, end)
    replica.write(fragment, anchor.parameters[fragment])
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

    def after_inner_step(self, tokens: int) -> None:
        """Takes the outer step when it is due. Raises what `step_alone` raises.

        Args:
            tokens: that went into the inner step.
        """
        self._steps += 1
        self._tokens += tokens
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
