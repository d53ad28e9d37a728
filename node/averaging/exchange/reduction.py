"""Pseudo-gradient (anchor minus snapshot), weighted sums of our shard, and checks of other members' results.

Values that a codec drops stay in the replica: after the commit, its snapshot becomes the one that the other members
decoded. Error feedback was worse (0.25 nats behind float32 instead of 0.02).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.shared_vector import SharedVector, Vector, add_scaled, squared_distance, squares, stretches
from node.averaging.exchange.pieces import Piece, Plan
from protocol.codecs import decode_into, encode_into, encoded_bytes
from swarm.averaging.trust import Beside, oddities, suspect
from swarm.compression.round_codecs import LEAVES_OVER
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec, PeerId


class SentParts:
    """Encoded slices of the pseudo-gradient that this member sent in one attempt at a round."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._sent: dict[tuple[int, int], bytes] = {}
        self._rewritten = False

    def note(self, part: slice, encoding: memoryview) -> None:
        """Stores the encoding of a sent slice. Slices without a stored encoding count as sent exactly."""
        self._sent[part.start, part.stop] = encoding.tobytes()

    def encoding(self, part: slice) -> bytes | None:
        return self._sent.get((part.start, part.stop))

    def rewrite(self, base: SharedVector, snapshot: Vector | SharedVector) -> None:
        """Writes into the snapshot what the other members decoded from our contribution. A second call does nothing."""
        if self._rewritten:
            return
        self._rewritten = True
        # The anchor minus the decoded pseudo-gradient is the snapshot that others assume.
        for (start, stop), encoding in self._sent.items():
            there = snapshot[start:stop]
            decode_into(self._codec, memoryview(encoding), there)
            np.subtract(base[start:stop], there, out=there)


@dataclass(frozen=True, slots=True, eq=False)
class UpdateSource:
    """Pseudo-gradient of a snapshot, computed slice by slice on demand. Used on the averaging thread."""

    anchor: Anchor
    snapshot: Vector | SharedVector

    def squares(self, part: slice) -> float:
        return squared_distance(self.anchor.parameters[part], self.snapshot[part])

    def write(self, part: slice, out: Vector, factor: float) -> None:
        """Writes `factor` * pseudo-gradient to `out`, rounded to float32 after each operation."""
        scale = np.float32(factor)
        left, right = self.anchor.parameters[part], self.snapshot[part]
        for stretch in stretches(len(out)):
            difference = np.subtract(left[stretch], right[stretch], out=out[stretch])
            np.multiply(difference, scale, out=difference)

    def encode(self, part: slice, codec: Codec, out: memoryview, room: Vector) -> None:
        """Encodes a pseudo-gradient slice into `out`. `room` is scratch memory, at least as long as the slice."""
        left, right = self.anchor.parameters[part], self.snapshot[part]
        if codec is Codec.NONE:
            np.subtract(left, right, out=np.frombuffer(out, dtype=np.float32))
            return
        encode_into(codec, np.subtract(left, right, out=room[: len(left)]), out)


ROUNDING: Final = 1.01  # Largest accepted ratio of a norm to its declaration. Float32 and INT8 add at most 0.3 %.
COARSE_ROUNDING: Final = 1.05  # The same ratio for INT4 and INT2, which add up to 1 %


class NormLimit:
    """Limit on the Euclidean norm of all pieces from one member together."""

    def __init__(self, norm: float, codec: Codec) -> None:
        rounding = COARSE_ROUNDING if codec in LEAVES_OVER else ROUNDING
        # The smallest normal number allows for rounding around norm 0.
        self._left = (norm * rounding) ** 2 + float(np.finfo(np.float32).tiny)

    def check(self, values: Vector) -> None:
        """Adds a piece's values to the norm. Raises ProtocolViolation if they are not finite or exceed the limit."""
        length = squares(values)
        if not math.isfinite(length):
            raise ProtocolViolation("it has elements that are not finite")
        if length > self._left:
            raise ProtocolViolation("it exceeds its declared norm")
        self._left -= length


def read_encoding(codec: Codec, data: memoryview, room: Vector) -> Vector:
    """Decodes a piece into `room`, or returns a view of uncompressed `data`. Raises ProtocolViolation if invalid."""
    if codec is Codec.NONE:
        return np.frombuffer(data, dtype="<f4")
    decode_into(codec, data, room)
    return room


class Reduction:
    """Weighted sums of all members' contributions to the pieces of this member's shard."""

    def __init__(self, plan: Plan, source: UpdateSource) -> None:
        self._plan = plan
        self._source = source
        self._limits = {of: NormLimit(plan.members[of].norm, plan.codec) for of in plan.contributors}
        self._sums: dict[Piece, Vector] = {}
        self._sampled = next(iter(plan.shards[plan.own]), None)
        self.samples: dict[PeerId, Vector] = {}  # From the first piece, to compare their directions
        self._to_come = dict.fromkeys(plan.shards[plan.own], len(set(plan.contributors) - {plan.own}))

    def add(self, piece: Piece, sender: PeerId, data: memoryview, room: Vector) -> memoryview | None:
        """Adds a contribution, using `room` as scratch memory. Returns the encoded sum after the last contribution."""
        values = read_encoding(self._plan.codec, data, room[: piece.elements])
        self._limits[sender].check(values)
        total = self._sum(piece)
        if piece == self._sampled:
            self.samples[sender] = sample_of(values)
        add_scaled(values, self._plan.members[sender].coefficient, total)
        self._to_come[piece] -= 1
        return None if self._to_come[piece] else self.finish(piece)

    def finish(self, piece: Piece) -> memoryview:
        total = self._sum(piece)
        del self._sums[piece]
        codec = self._plan.result_codec
        if codec is Codec.NONE:
            return total.view(np.uint8).data
        encoding = np.empty(encoded_bytes(codec, piece.elements), np.uint8).data
        encode_into(codec, total, encoding)
        return encoding

    def _sum(self, piece: Piece) -> Vector:
        total = self._sums.get(piece)
        if total is None:
            # Start with our own contribution, which needs no encoding.
            total = self._sums[piece] = np.empty(piece.elements, np.float32)
            if self._plan.contributes:
                self._source.write(piece.part, total, self._plan.members[self._plan.own].coefficient)
                if piece == self._sampled:
                    self.samples[self._plan.own] = sample_of(total)
            else:
                total.fill(0.0)
        return total


SAMPLED: Final = 4096  # Elements of a contribution that are compared with other contributions
AGAINST: Final = -0.05
TOGETHER: Final = 0.05


def sample_of(values: Vector) -> Vector:
    return values[:: max(1, len(values) // SAMPLED)][:SAMPLED].copy()


def opposed(samples: Mapping[PeerId, Vector]) -> frozenset[PeerId]:
    """Returns the contributors whose cosine with most others is negative, while the rest agree with each other."""
    peers = sorted(samples)
    if len(peers) < 3:
        return frozenset()
    rows = np.stack([samples[peer] for peer in peers]).astype(np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -1.0)  # sorts before all others
    against = np.sort(cosines, axis=1)[:, 1 + (len(peers) - 1) // 2] < AGAINST
    rest = cosines[np.ix_(~against, ~against)][np.triu_indices(int((~against).sum()), 1)]
    if 2 * (~against).sum() <= len(peers) or np.median(rest) < TOGETHER:
        return frozenset()
    return frozenset(peer for peer, is_against in zip(peers, against, strict=True) if is_against)


PATCH: Final = 4096
ONE_IN: Final = 8  # One patch in ONE_IN is compared. Members cannot know which, and it saves memory traffic.
AT_LEAST: Final = 8


class Comparison:
    """Plausibility check: compares all reducers' results with our pseudo-gradient. `random` must be unpredictable."""

    def __init__(self, plan: Plan, source: UpdateSource, random: Random) -> None:
        self._plan = plan
        self._source = source
        self._random = random
        self._pieces: list[Beside] = []
        fragment = plan.layout.range_of(plan.first_chunk, plan.end_chunk)
        self._elements = fragment.stop - fragment.start

    def add(self, piece: Piece, result: Vector) -> None:
        """Compares random patches of a piece's result [piece.elements] with our pseudo-gradient."""
        left, right = self._source.anchor.parameters[piece.part], self._source.snapshot[piece.part]
        width = min(PATCH, piece.elements)
        count = piece.elements // width
        # Chosen at random afterwards, so that a reducer cannot know the patches.
        chosen = self._random.sample(range(count), min(count, max(AT_LEAST, count // ONE_IN)))
        start = self._random.randint(0, piece.elements - count * width)  # any element may be compared

        def patches(values: Vector) -> Vector:
            rows = values[start : start + count * width].reshape(count, width)
            return rows[chosen].reshape(-1)

        there = patches(result)
        ours = patches(left)
        np.subtract(ours, patches(right), out=ours)
        own, squares, product = (float(np.dot(a, b)) for a, b in ((ours, ours), (there, there), (ours, there)))
        self._pieces.append(Beside(piece.reducer, len(there) / self._elements, own, squares, product))

    def suspect(self) -> PeerId | None:
        return suspect(self._pieces, self._plan.own, self._plan.members[self._plan.own].coefficient)

    def oddities(self) -> dict[PeerId, str]:
        own = self._plan.members[self._plan.own]
        return oddities(self._plan.own, self._pieces, own.coefficient, own.norm, self._plan.roster.largest_norm)
