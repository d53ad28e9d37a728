"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient (Douillard et al. 2023, arXiv:2311.08105).

The formula is that of torch.optim.SGD(nesterov=True), which is the one of Sutskever et al. 2013:

    momentum = mu * momentum + g;   parameters = parameters - lr * (g + mu * momentum)

Every operation is rounded to float32 by itself. A compiler that fuses a multiplication and an addition rounds once instead of twice,
and whether it does depends on the processor; replicas on different machines have to agree bit for bit, so numpy does
one operation at a time, without flushing denormal numbers to zero on its own (`node.device`). In its place gradient and momentum are rounded to
multiples of 2**-104 by adding COARSE and taking it away again, which is exact for all that is larger than 3e-17: else the momentum of a parameter that nobody
moves any more would end among denormal numbers, and each round take longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from node.averaging.anchor import Vector
from node.averaging.vectors import STRETCH, stretches
from node.device import gradual_underflow
from protocol.manifest import Manifest

COARSE: Final = np.float32(2.0**-80)
"""The smallest number that is left, 5e-32, is so large that no product with the rule's factors is denormal."""


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
                _round(gradient[part], out=g)
                np.multiply(momentum[part], mu, out=buffer)
                np.add(buffer, g, out=buffer)
                _round(buffer, out=buffer)
                np.multiply(buffer, mu, out=update)
                np.add(update, g, out=update)
                np.multiply(update, rate, out=update)
                np.subtract(parameters[part], update, out=new_parameters[part])


def _round(values: Vector, out: Vector) -> None:
    np.add(values, COARSE, out=out)
    np.subtract(out, COARSE, out=out)


def outer_rule(manifest: Manifest) -> OuterRule:
    """The run's."""
    outer = manifest.training.outer
    return OuterRule(outer.learning_rate, outer.momentum)
