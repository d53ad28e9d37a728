"""Error feedback: what an encoding left out is added to what is encoded the next time (Seide et al. 2014; Karimireddy
et al. 2019, arXiv:1901.09847).

A sparse or coarse codec loses most of a pseudo-gradient in each round. With error feedback nothing is lost, only late:
the encodings of many rounds add up to the pseudo-gradients of as many rounds, but for one residual. Without it,
elements that are small in each round, always in the same direction, never move.

    wanted = pseudo-gradient + decay * residual;   residual = wanted - decoded

In two phases, because an attempt at a round may be dissolved and begun anew with the same pseudo-gradients: what is
kept counts only once the round commits, and until then `compensate` gives the same. It serves what a reducer encodes
(the mean, of which nobody's replica could keep the rest), and contributions; for those, with sparse codecs,
`node.averaging.exchange.pseudo_gradient` was measured to do better. Used on the averaging thread.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from node.averaging.anchor.shared_vector import Vector, add_scaled, squares
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec

DECAYS: Final = {
    Codec.INT8: 1.0,
    Codec.INT4: 1.0,
    Codec.TOP_K_4: 0.95,
    Codec.TOP_K_2: 0.95,
}
"""Of the residual in each round, for the codecs that have one.

The blockwise codecs leave out a tenth or less of each element, which the next round sends: nothing gets old, so nothing
is forgotten. The sparse ones send an element once in some 30 rounds, and what has waited so long was measured on
parameters that are gone; 0.95 forgets half of it in 14 rounds, and makes the residual what the outer momentum is
otherwise (SparseLoCo, arXiv:2508.15706)."""


class ErrorFeedback:
    """The residual of one module, laid out as its anchor's parameters.

    Args:
        elements: of the module.
        decay: what is left of the residual in each round, above 0 and at most 1.
    """

    def __init__(self, elements: int, decay: float) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"a decay of {decay} is not above 0 and at most 1")
        self._decay = decay
        self._residual: Vector = np.zeros(elements, np.float32)
        self._kept: dict[tuple[int, int], Vector] = {}
        """What the residual will be from one element to another if the round commits."""

    @property
    def residual(self) -> Vector:
        """[elements], as of the last commit: what a checkpoint has to save. Not to be written."""
        return self._residual

    def compensate(self, part: slice, gradient: Vector) -> None:
        """`gradient` becomes what is to be encoded for this part: `gradient` + decay * residual."""
        add_scaled(self._residual[part], self._decay, gradient)

    def keep(self, part: slice, wanted: Vector, decoded: Vector) -> None:
        """Notes what the encoding of this part left out; `wanted` is what was encoded, `decoded` what everybody else
        has of it.

        A part that comes again, in another attempt, replaces what was kept of it; parts of one attempt must not overlap
        otherwise.

        Raises:
            StateError: what was left out is not finite; nothing is kept of the part.
        """
        left = np.subtract(wanted, decoded)
        if not math.isfinite(squares(left)):
            raise StateError("what an encoding left out is not finite, so it cannot be sent in the next round")
        self._kept[part.start, part.stop] = left

    def commit(self) -> None:
        """The round has committed: what was kept is the residual of its parts now. All others stay as they were."""
        for (start, stop), left in self._kept.items():
            self._residual[start:stop] = left
        self._kept.clear()

    def discard(self) -> None:
        """The attempt was dissolved, or the next one begins: the residual is what it was before."""
        self._kept.clear()

    def reset(self) -> None:
        """The replica has become another (it has adopted an anchor that it did not help to make): its residual is of
        parameters that it no longer has."""
        self.discard()
        self._residual.fill(0.0)

    def restore(self, saved: Vector) -> None:
        """Goes on with the residual of a checkpoint.

        Raises:
            StateError: it is of another module, or not finite; nothing has changed.
        """
        if saved.shape != self._residual.shape or not math.isfinite(squares(saved)):
            raise StateError(f"the saved residual has not {len(self._residual)} finite elements")
        self.discard()
        self._residual[:] = saved
