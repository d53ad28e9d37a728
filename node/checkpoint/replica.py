"""Capture of a replica between two inner steps, and its restoration.

It stands alone because the node and the single process share it, and the saved state itself knows no module at
work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from node.checkpoint.snapshot import own_tensors
from node.checkpoint.state import Agreed, Counters, ReplicaState
from node.checkpoint.state_copy import Post, StateCopy
from node.model.device import copied
from node.model.initialization import floats_of, parameters_of
from node.model.optimizer import InnerOptimizer
from node.model.packed.packed_floats import Floats
from swarm.vocabulary.errors import StateError

# ---- copying out, on the compute thread ------------------------------------------------------------------------------


def capture_module(
    parts: tuple[nn.Module, ...], optimizer: InnerOptimizer, *, visits: int, tokens: int, agreed: Agreed | None = None
) -> ReplicaState:
    """A copy of a replica as it is between two inner steps. So many visits of so many tokens have been applied."""
    names = parameters_of(*parts)
    since = (optimizer.steps, tokens) if agreed is None else (agreed.steps_since, agreed.tokens_since)
    return ReplicaState(
        local={name: _copied(floats) for name, floats in floats_of(*parts).items()},
        inner=optimizer.export_state(names),
        counters=Counters(tokens, visits, *since),
        anchor=None if agreed is None else agreed.anchor,
    )


def capture_as_written(
    parts: tuple[nn.Module, ...],
    optimizer: InnerOptimizer,
    post: Post,
    *,
    visits: int,
    tokens: int,
    agreed: Agreed | None = None,
) -> ReplicaState:
    """A replica as `capture_module` gives it, which is copied while it is written (`node.checkpoint.state_copy`). What
    others than the optimizer may move (a router's tables) is copied at once.
    """
    optimizer.before_change()  # the copy before this one ends here
    names, floats = parameters_of(*parts), floats_of(*parts)
    own = optimizer.moved(names)
    inner = optimizer.shared_state(names)
    copying = StateCopy(own_tensors({name: floats[name] for name in names if name in own}, inner), post)
    optimizer.before_change = copying.finish
    since = (optimizer.steps, tokens) if agreed is None else (agreed.steps_since, agreed.tokens_since)
    return ReplicaState(
        local={name: tensor if name in own else copied(tensor) for name, tensor in names.items()},
        inner=inner,
        counters=Counters(tokens, visits, *since),
        anchor=None if agreed is None else agreed.anchor,
        copying=copying,
    )


# ---- putting back ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def restore_module(parts: tuple[nn.Module, ...], optimizer: InnerOptimizer, state: ReplicaState) -> None:
    """Restores parameters and optimizer in place.

    Raises:
        StateError: the state is of another model; nothing has been changed.
    """
    parameters = parameters_of(*parts)
    saved, own = ({name: t.shape for name, t in tensors.items()} for tensors in (state.local, parameters))
    if saved != own:
        raise StateError("the snapshot is of a model with other parameters than this version builds from the manifest")
    optimizer.import_state(parameters, state.inner)
    agreed = 0 if state.anchor is None else state.anchor.version.tokens
    optimizer.tokens = agreed + state.counters.tokens_since_anchor
    for name, floats in floats_of(*parts).items():
        if isinstance(floats, Tensor):
            floats.copy_(state.local[name])
        else:
            floats.store(state.local[name])


def _copied(floats: Floats) -> Tensor:
    return copied(floats) if isinstance(floats, Tensor) else floats.copied()
