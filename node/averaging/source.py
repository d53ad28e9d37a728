"""Our own pseudo-gradient: the anchor minus the snapshot of what the replica was when the round began."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from node.averaging.anchor import Anchor, Vector
from node.averaging.vectors import squares_of_difference, stretches
from protocol.codecs import encode_into
from swarm.vocabulary import Codec


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Read where it is needed, a piece at a time: the difference itself is never kept. Used on the averaging thread."""

    anchor: Anchor
    snapshot: Vector
    """[elements]; filled in where the fragment is."""

    def squares(self, part: slice) -> float:
        """The sum of squares of this part. Not finite exactly when an element is not."""
        return squares_of_difference(self.anchor.parameters[part], self.snapshot[part])

    def write(self, part: slice, out: Vector, factor: float) -> None:
        """`out` = `factor` * pseudo-gradient there, rounded after each operation."""
        scale = np.float32(factor)
        left, right = self.anchor.parameters[part], self.snapshot[part]
        for stretch in stretches(len(out)):
            difference = np.subtract(left[stretch], right[stretch], out=out[stretch])
            np.multiply(difference, scale, out=difference)

    def encode(self, part: slice, codec: Codec, out: memoryview, room: Vector) -> None:
        """Writes the pseudo-gradient's encoding into `out`. `room` is at least as long as the part."""
        left, right = self.anchor.parameters[part], self.snapshot[part]
        if codec is Codec.NONE:
            np.subtract(left, right, out=np.frombuffer(out, dtype=np.float32))
            return
        encode_into(codec, np.subtract(left, right, out=room[: len(left)]), out)
