"""Our own pseudo-gradient: the anchor minus the snapshot of what the replica was when the round began."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from node.averaging.anchor import Anchor, Vector
from node.averaging.error_feedback import ErrorFeedback
from node.averaging.vectors import squares, squares_of_difference, stretches
from protocol.codecs import decode_into, encode_into
from swarm.vocabulary import Codec


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Read where it is needed, a piece at a time: the difference itself is never kept. Used on the averaging thread.

    With error feedback it is the pseudo-gradient and what earlier rounds left out; what this one leaves out is noted piece by piece.
    """

    anchor: Anchor
    snapshot: Vector
    """[elements]; filled in where the fragment is."""
    feedback: ErrorFeedback | None = None

    def squares(self, part: slice) -> float:
        """The sum of squares of what would be sent of this part, were it sent exactly. Not finite exactly when an element is not."""
        if self.feedback is None:
            return squares_of_difference(self.anchor.parameters[part], self.snapshot[part])
        return squares(self._wanted(part, np.empty(part.stop - part.start, np.float32)))

    def write(self, part: slice, out: Vector, factor: float) -> None:
        """`out` = `factor` * what is to be sent, rounded after each operation. Nothing is left out of it."""
        if self.feedback is not None:
            wanted = self._wanted(part, out)
            self.feedback.keep(part, wanted, wanted)
            np.multiply(wanted, np.float32(factor), out=out)
            return
        scale = np.float32(factor)
        left, right = self.anchor.parameters[part], self.snapshot[part]
        for stretch in stretches(len(out)):
            difference = np.subtract(left[stretch], right[stretch], out=out[stretch])
            np.multiply(difference, scale, out=difference)

    def encode(self, part: slice, codec: Codec, out: memoryview, room: Vector) -> None:
        """Writes the encoding of what is to be sent into `out`. `room` is at least as long as the part."""
        left, right = self.anchor.parameters[part], self.snapshot[part]
        if codec is Codec.NONE:
            np.subtract(left, right, out=np.frombuffer(out, dtype=np.float32))
            return
        wanted = self._wanted(part, room[: len(left)])
        encode_into(codec, wanted, out)
        if self.feedback is not None:
            decoded: Vector = np.empty(len(wanted), np.float32)
            decode_into(codec, out, decoded)
            self.feedback.keep(part, wanted, decoded)

    def _wanted(self, part: slice, out: Vector) -> Vector:
        """Into `out`, which is as long as the part."""
        np.subtract(self.anchor.parameters[part], self.snapshot[part], out=out)
        if self.feedback is not None:
            self.feedback.compensate(part, out)
        return out
