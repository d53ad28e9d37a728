"""Choice of a round's codecs: the mildest one with which the slowest member's link does not delay the round.

The leader chooses by the members' bandwidths. INT8 pseudo-gradients train as well as float32 (DiLoCo,
arXiv:2501.18512), so no milder codec is used if the run allows INT8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.compression.microbatch_codecs import NO_CHOICE
from swarm.vocabulary.averaging_messages import Contribution, RoundPiece
from swarm.vocabulary.types import Codec, Reasoned

MOST_OF_AN_INTERVAL: Final = 0.25  # Share of the round interval for an exchange; training uses the same links

_RESULTS: Final[Mapping[Codec, Codec]] = {
    Codec.NONE: Codec.NONE,
    Codec.BF16: Codec.BF16,
    Codec.INT8: Codec.INT8,
    Codec.INT4: Codec.INT4,
    Codec.TOP_K_4: Codec.INT4,
    Codec.TOP_K_2: Codec.INT4,
}
_LEVELS: Final = (Codec.INT8, Codec.INT4, Codec.TOP_K_4, Codec.TOP_K_2)
_LEAVE_LITTLE: Final = frozenset({Codec.NONE, Codec.BF16, Codec.INT8})


@dataclass(frozen=True, slots=True)
class RoundCodecs:
    """The codecs of a round: of the members' pseudo-gradients, and of the means that members get back."""

    contribution: Codec

    @property
    def result(self) -> Codec:
        """Codec of the means. Never sparse, because no replica could add the omitted elements later."""
        return _RESULTS[self.contribution]

    @property
    def leave_over(self) -> bool:
        """Whether the codec needs error feedback: replicas add the part that it dropped to their next contribution."""
        return self.contribution not in _LEAVE_LITTLE

    def of(self, message: RoundPiece) -> Codec:
        return self.contribution if isinstance(message, Contribution) else self.result


@dataclass(frozen=True, slots=True)
class CodecLevel:
    """Codecs of a round at one compression level. `share`: wire bytes relative to float32, mean of both directions."""

    codecs: RoundCodecs
    share: float


FLOAT32: Final = CodecLevel(RoundCodecs(Codec.NONE), 1.0)


def codec_levels(limit: Codec) -> tuple[RoundCodecs, ...]:
    """Lists the codecs that a run allows, from the mildest to `limit`. NONE and BF16 leave no choice."""
    levels = _LEVELS[: _LEVELS.index(limit) + 1] if limit in _LEVELS else (limit,)
    return tuple(RoundCodecs(codec) for codec in levels)


def choose(
    levels: Sequence[CodecLevel], both_ways_bytes: float, slowest_bytes_per_s: float, interval_s: float
) -> Reasoned[RoundCodecs]:
    """Chooses one of `levels` (mildest first) for a round, by float32 bytes and the slowest goodput (0: unknown)."""
    if len(levels) == 1:
        return Reasoned(levels[0].codecs, NO_CHOICE)
    if not slowest_bytes_per_s:
        return Reasoned(levels[0].codecs, "no link was measured yet")

    def takes_s(level: CodecLevel) -> float:
        return level.share * both_ways_bytes / slowest_bytes_per_s

    allowed_s = MOST_OF_AN_INTERVAL * interval_s
    chosen = next((level for level in levels if takes_s(level) <= allowed_s), levels[-1])
    return Reasoned(
        chosen.codecs,
        f"{chosen.share * both_ways_bytes / 1e6:.1f} MB over {slowest_bytes_per_s * 8 / 1e6:.0f} Mbit/s take "
        f"{takes_s(chosen):.1f} s"
        f" of the {interval_s:.0f} s between rounds ({MOST_OF_AN_INTERVAL:.0%} are wanted)",
    )
