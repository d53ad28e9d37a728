"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient (Douillard et al. 2023, arXiv:2311.08105).

The formula is that of torch.optim.SGD(nesterov=True), which is the one of Sutskever et al. 2013:

    momentum = mu * momentum + g;   parameters = parameters - lr * (g + mu * momentum)

Every operation is rounded to float32 by itself. A compiler that fuses a multiplication and an addition rounds once instead of twice,
and whether it does depends on the processor; replicas on different machines have to agree bit for bit, so numpy does
one operation at a time, without flushing denormal numbers to zero on its own (`node.device`). In their place everything below
TINY counts as nothing: else the momentum of a parameter that nobody moves any more would end among them, and each round take longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from node.averaging.anchor import Vector
from node.averaging.vectors import STRETCH, stretches
from node.device import gradual_underflow
from protocol.manifest import Manifest

TINY: Final = np.float32(1e-30)
"""No sum or product of numbers from here on with the rules' factors is denormal."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """The manifest's `training.outer`."""

    learning_rate: float
    momentum: float

    def step(
        self, gradient: Vector, parameters: Vector, momentum: Vector, new_parameters: Vector, new_momentum: Vector
    ) -> None:
        """Writes the next state. All are [elements]; the new ones may be the old ones themselves, `gradient` may not be among them."""
        rate, mu = np.float32(self.learning_rate), np.float32(self.momentum)
        rooms = np.empty((2, min(STRETCH, len(gradient))), np.float32)
        with gradual_underflow():
            for part in stretches(len(gradient)):
                g, update = rooms[:, : part.stop - part.start]
                buffer = new_momentum[part]
                np.copyto(g, gradient[part])
                _drop_tiny(g, room=update)
                np.multiply(momentum[part], mu, out=buffer)
                np.add(buffer, g, out=buffer)
                _drop_tiny(buffer, room=update)
                np.multiply(buffer, mu, out=update)
                np.add(update, g, out=update)
                np.multiply(update, rate, out=update)
                np.subtract(parameters[part], update, out=new_parameters[part])


def _drop_tiny(values: Vector, room: Vector) -> None:
    np.copyto(values, np.float32(0.0), where=np.less(np.abs(values, out=room), TINY))


def outer_rule(manifest: Manifest) -> OuterRule:
    """The run's."""
    outer = manifest.training.outer
    return OuterRule(outer.learning_rate, outer.momentum)
