"""The plausibility of reducers' results: compared with our own contribution as they come, and audited after the commit.

Compared, at no traffic: the mean contains our own pseudo-gradient, so it points away from it only where the others'
together outweigh it the other way. Measured on rounds of 2 to 9 replicas of a small model, with every codec, from the
first round to the last of some thousand steps: the cosine was never below 0.28 over pieces of 15,000 elements and more,
never below 0.19 over pieces of 4000; the length, as a share of what the norms allow there, from 0.19 to 1.1, and over
the pieces of one round within a factor of 2 and 2.6; the shares of their norms that two replicas have in one piece,
within 1.34 and 1.95. In the worst honest case replicas have nothing in common; then the cosine is 1 / sqrt(members),
0.06 with 256 of them, and a sample of it over a smallest piece of 4096 elements is off by 0.016. A sparse codec's mean
has those elements of ours that were sent, so it takes away from the cosine and does not turn it. The limits stand far
from all of that, because an honest reducer that is objected to is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.types import Codec, PeerId

OPPOSED: Final = -0.25
"""A mean whose cosine with our own pseudo-gradient is less points away from it."""
LONGEST: Final = 1.75
"""Times what all members' norms allow in this piece, if they lie like ours there."""
ALIGNED: Final = 1.25
"""Times the same: so long a mean can be where all members' updates point the same way, and in the same round the rows
of an embedding, where they have nothing in common, can be 1 / members as long as allowed. (0.2 and 0.8 after two inner
steps of four replicas of a tiny model.)"""
LONGER_THAN_OURS: Final = 4.0
"""Times the share of the allowed that the mean has in the pieces that we reduce ourselves, where that is more than
ALIGNED."""
SHORTEST: Final = 0.1
"""Times our own part of the mean: less is as good as nothing."""
AUDITED_BYTES: Final = 0.11
"""Of a round's bytes, on average: the most that audits fetch."""
SLACK: Final = 1.5
"""How much longer a reducer's own part of a mean may be than its norm and the others' distribution of theirs make
it."""
SMALLEST: Final = 4096
"""Elements of a piece: over so few the shares of two replicas' norms were seen to differ by 1.95, over 15,000 by 1.34.
`SLACK` is that much wider for them."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A piece's result compared with our own pseudo-gradient there, in float64."""

    reducer: PeerId
    share: float
    """Of the fragment's elements."""
    own_squares: float
    result_squares: float
    product: float
    """Of the two vectors."""


def oddities(
    own: PeerId, pieces: Sequence[Beside], coefficient: float, norm: float, largest_norm: float
) -> dict[PeerId, str]:
    """The reducers whose results cannot be the mean, with the reasons.

    What we reduce ourselves tells whether it is we who are odd: if our own means look like that to us, we have nothing
    to say about those of others.

    Args:
        coefficient, norm: ours in the roster.
        largest_norm: that the mean can have by all members' norms.
    """
    if coefficient * norm == 0:
        return {}
    scale = largest_norm / norm
    usual = max((_length(piece, norm, scale) for piece in pieces if piece.reducer == own), default=math.inf)
    longest = min(LONGEST, max(ALIGNED, LONGER_THAN_OURS * usual))
    found: dict[PeerId, str] = {}
    for piece in pieces:
        why = _oddity(piece, coefficient, norm, scale, longest)
        if why is not None:
            found.setdefault(piece.reducer, why)
    return {} if own in found else found


def _oddity(piece: Beside, coefficient: float, norm: float, scale: float, longest: float) -> str | None:
    ours, length = math.sqrt(piece.own_squares), math.sqrt(piece.result_squares)
    if length < SHORTEST * coefficient * ours:
        return f"a mean of length {length:.2g}, where our own part of it is {coefficient * ours:.2g}"
    if piece.product < OPPOSED * ours * length:
        cosine, part = piece.product / ours / length, coefficient * ours / length
        return f"a mean that points away from our own contribution (cosine {cosine:.2f}; our part of it {part:.2g})"
    relative = _length(piece, norm, scale)
    if relative > longest:
        return f"a mean {relative:.1f} times as long as the members' norms allow there, where {longest:.1f} can be"
    return None


def _length(piece: Beside, norm: float, scale: float) -> float:
    """Of the result, as a share of what all members' norms allow in this piece. Where ours is next to nothing (rows of
    an embedding whose tokens we have not seen), norms are taken to be spread evenly."""
    there = scale * math.sqrt(max(piece.own_squares, piece.share * norm * norm))
    return math.sqrt(piece.result_squares) / there if there > 0 else 0.0


# ---- after the commit ------------------------------------------------------------------------------------------------

RESULT_ERROR: Final[Mapping[Codec, float]] = {
    Codec.NONE: 1e-4,
    Codec.BF16: 0.005,
    Codec.INT8: 0.01,
    Codec.INT4: 0.2,
}
"""What a result's encoding may be off by, in lengths of the result; sums in another order are far less."""


@dataclass(frozen=True, slots=True)
class Reckoning:
    """A piece that was summed again, without its reducer's own contribution."""

    elements: int
    rest: float
    """Length of what is left of the result when the others' contributions are taken away."""
    result: float
    """Length of the result."""
    shares: tuple[float, ...]
    """Which part of their norm the other contributors have in this piece, each from 0 to 1."""


def chance_of_audit(round_bytes: int, members: int, audit_bytes: int) -> float:
    """The probability with which a member audits a piece, so that together they fetch at most AUDITED_BYTES of what the
    round sent.

    Args:
        round_bytes: that all members together have sent.
        audit_bytes: of one audit on average.
    """
    return min(1.0, AUDITED_BYTES * round_bytes / (members * audit_bytes)) if audit_bytes else 1.0


def unexplained(reckoning: Reckoning, coefficient: float, norm: float, codec: Codec) -> str | None:
    """The reason why what is left of a result cannot be the reducer's own contribution; None when it can.

    That it is within the norm which the reducer declared, spread as the others' norms are, is all that can be known:
    its own part is nowhere encoded. A reducer that stays within that has no more power over the mean than by
    contributing.

    Args:
        coefficient, norm: of the reducer, in the roster.
        codec: of results.
    """
    wider = (SLACK + 0.5 * math.sqrt(min(1.0, SMALLEST / reckoning.elements))) * max(reckoning.shares, default=1.0)
    own = coefficient * norm * min(1.0, wider)
    allowed = own + RESULT_ERROR[codec] * reckoning.result
    if reckoning.rest <= allowed:
        return None
    return (
        "the mean that it sent is not that of what it was sent: what is left for its own part is "
        f"{reckoning.rest:.3g} long,"
        f" where {allowed:.3g} can be"
    )
