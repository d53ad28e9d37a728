"""Choice of a round's codec: the mildest one with which the slowest member's link does not delay the round.

The leader chooses by the members' bandwidths. INT8 pseudo-gradients train as well as float32 (DiLoCo,
arXiv:2501.18512), so no milder codec is used if the run allows INT8.
"""

from collections.abc import Sequence
from typing import Final

from swarm.compression.microbatch_codecs import NO_CHOICE
from swarm.vocabulary.types import Codec, Reasoned

MOST_OF_AN_INTERVAL: Final = 0.25  # Share of the round interval for an exchange; training uses the same links

_LEVELS: Final = (Codec.INT8, Codec.INT4, Codec.INT2)
# Bytes relative to float32: a scale of 4 bytes for 128 elements, and of 2 bytes for 64
SHARES: Final = {Codec.NONE: 1.0, Codec.BF16: 1 / 2, Codec.INT8: 33 / 128, Codec.INT4: 17 / 128, Codec.INT2: 9 / 128}
# Codecs that need error feedback: replicas add the part that the codec dropped to their next contribution.
LEAVES_OVER: Final = frozenset({Codec.INT4, Codec.INT2})


def result_codec(contributions: Codec) -> Codec:
    """Returns the codec of the means in a round."""
    # What is dropped of a mean is lost, and a reducer that lies could hide in a coarse mean.
    return Codec.INT4 if contributions is Codec.INT2 else contributions


def codec_levels(limit: Codec) -> tuple[Codec, ...]:
    """Lists the codecs that a run allows, from the mildest to `limit`. NONE and BF16 leave no choice."""
    return _LEVELS[: _LEVELS.index(limit) + 1] if limit in _LEVELS else (limit,)


def choose(
    codecs: Sequence[Codec], both_ways_bytes: float, slowest_bytes_per_s: float, interval_s: float
) -> Reasoned[Codec]:
    """Chooses one of `codecs` (mildest first) for a round, by float32 bytes and the slowest goodput (0: unknown)."""
    if len(codecs) == 1:
        return Reasoned(codecs[0], NO_CHOICE)
    if not slowest_bytes_per_s:
        return Reasoned(codecs[0], "no link was measured yet")

    def share(codec: Codec) -> float:
        return (SHARES[codec] + SHARES[result_codec(codec)]) / 2

    def takes_s(codec: Codec) -> float:
        return share(codec) * both_ways_bytes / slowest_bytes_per_s

    allowed_s = MOST_OF_AN_INTERVAL * interval_s
    chosen = next((codec for codec in codecs if takes_s(codec) <= allowed_s), codecs[-1])
    return Reasoned(
        chosen,
        f"{share(chosen) * both_ways_bytes / 1e6:.1f} MB over {slowest_bytes_per_s * 8 / 1e6:.0f} Mbit/s take "
        f"{takes_s(chosen):.1f} s"
        f" of the {interval_s:.0f} s between rounds ({MOST_OF_AN_INTERVAL:.0%} are wanted)",
    )
