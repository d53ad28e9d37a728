"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient (Douillard et al. 2023, arXiv:2311.08105).

The formula is that of torch.optim.SGD(nesterov=True), which is the one of Sutskever et al. 2013:

    momentum = mu * momentum + g;   parameters = parameters - lr * (g + mu * momentum)

Every operation is rounded to float32 by itself. A compiler that fuses a multiplication and an addition rounds once instead of twice,
and whether it does depends on the processor; replicas on different machines have to agree bit for bit, so numpy does
one operation at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from node.averaging.anchor import Vector
from node.averaging.vectors import STRETCH, stretches
from protocol.manifest import Manifest


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
        room = np.empty(min(STRETCH, len(gradient)), np.float32)
        for part in stretches(len(gradient)):
            g, buffer = gradient[part], new_momentum[part]
            np.multiply(momentum[part], mu, out=buffer)
            np.add(buffer, g, out=buffer)
            update = np.multiply(buffer, mu, out=room[: part.stop - part.start])
            np.add(update, g, out=update)
            np.multiply(update, rate, out=update)
            np.subtract(parameters[part], update, out=new_parameters[part])


def outer_rule(manifest: Manifest) -> OuterRule:
    """The run's."""
    outer = manifest.training.outer
    return OuterRule(outer.learning_rate, outer.momentum)
