"""Our pseudo-gradient (anchor minus snapshot), and what was sent of it.

What a codec leaves out stays in the replica: after the commit it is carried over from what the others received.
Error feedback was worse (0.25 nats behind float32 instead of 0.02).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.shared_vector import SharedVector, Vector, squares_of_difference, stretches
from protocol.codecs import decode_into, encode_into
from swarm.vocabulary.types import Codec


class SentParts:
    """The encoded parts that were sent in one attempt."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._sent: dict[tuple[int, int], bytes] = {}
        self._rewritten = False

    def note(self, part: slice, encoding: memoryview) -> None:
        """Notes the encoding of a part. Parts that are never noted were used as they are."""
        self._sent[part.start, part.stop] = encoding.tobytes()

    def encoding(self, part: slice) -> bytes | None:
        return self._sent.get((part.start, part.stop))

    def rewrite(self, base: SharedVector, snapshot: Vector | SharedVector) -> None:
        """Sets the snapshot, after the commit, to what the others received of it. Done once."""
        if self._rewritten:
            return
        self._rewritten = True
        for (start, stop), encoding in self._sent.items():
            there = snapshot[start:stop]
            decode_into(self._codec, memoryview(encoding), there)
            np.subtract(base[start:stop], there, out=there)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The pseudo-gradient, computed piece by piece where it is read. Used on the averaging thread."""

    anchor: Anchor
    snapshot: Vector | SharedVector

    def squares(self, part: slice) -> float:
        return squares_of_difference(self.anchor.parameters[part], self.snapshot[part])

    def write(self, part: slice, out: Vector, factor: float) -> None:
        """Writes `factor` * pseudo-gradient to `out`, rounded after each operation."""
        scale = np.float32(factor)
        left, right = self.anchor.parameters[part], self.snapshot[part]
        for stretch in stretches(len(out)):
            difference = np.subtract(left[stretch], right[stretch], out=out[stretch])
            np.multiply(difference, scale, out=difference)

    def encode(self, part: slice, codec: Codec, out: memoryview, room: Vector) -> None:
        """Writes the encoding into `out`. `room` is at least as long as the part."""
        left, right = self.anchor.parameters[part], self.snapshot[part]
        if codec is Codec.NONE:
            np.subtract(left, right, out=np.frombuffer(out, dtype=np.float32))
            return
        encode_into(codec, np.subtract(left, right, out=room[: len(left)]), out)
