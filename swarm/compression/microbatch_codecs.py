"""Choice of a link's codec: the mildest one with which the link does not limit throughput (arXiv:2409.02423)."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Final

from swarm.vocabulary.types import Codec, Reasoned

# Share of a visit's compute time that a tensor may be on the link. Two tensors leave each peer per microbatch.
MOST_OF_A_VISIT: Final = 0.25
NO_CHOICE: Final = "the run allows nothing else"
BACK_AT: Final = 0.6  # Share of the allowed time below which a milder codec is chosen again (hysteresis)


class Traffic(enum.Enum):
    """Kinds of tensors with different tolerance for compression."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"


# Largest usual relative error of each codec. Above it, the next milder codec is used.
MOST_ERROR: Final[Mapping[Codec, float]] = {Codec.BF16: 4e-3, Codec.INT8: 1.2e-2, Codec.INT4: 0.13}

_LEVELS: Final[Mapping[Codec, tuple[Codec, ...]]] = {
    Codec.NONE: (),
    Codec.BF16: (Codec.BF16,),
    Codec.INT8: (Codec.BF16, Codec.INT8),
    Codec.INT4: (Codec.BF16, Codec.INT8, Codec.INT4),
}


def codec_levels(limit: Codec, *, half_precision: bool) -> tuple[Codec, ...]:
    """Lists the codecs from the mildest to `limit`. With bfloat16 elements BF16 equals NONE and is omitted."""
    levels = (Codec.NONE, *_LEVELS[limit])
    return tuple(codec for codec in levels if not (half_precision and codec is Codec.BF16))


def choose(
    levels: Sequence[Codec], sizes: Mapping[Codec, int], current: Codec | None, bytes_per_s: float, visit_s: float
) -> Reasoned[Codec]:
    """Chooses one of `levels` (mildest first) for a link. `sizes`: encoded bytes; `current`: codec in use.

    `visit_s`: compute time of a microbatch at the slower end, in both directions. 0 for unknown figures.
    """
    if len(levels) == 1:
        return Reasoned(levels[0], NO_CHOICE)
    if not bytes_per_s or not visit_s:
        return Reasoned(levels[0], "the link is not measured yet")
    if math.isinf(bytes_per_s):
        return Reasoned(levels[0], "the peer is in this process")
    allowed = MOST_OF_A_VISIT * visit_s
    if current is not None and current in levels:
        kept = levels.index(current)
        if sizes[current] / bytes_per_s <= allowed:
            milder = [codec for codec in levels[:kept] if sizes[codec] / bytes_per_s <= BACK_AT * allowed]
            return _reason(milder[0] if milder else current, sizes, bytes_per_s, visit_s)
    fitting = [codec for codec in levels if sizes[codec] / bytes_per_s <= allowed]
    return _reason(fitting[0] if fitting else levels[-1], sizes, bytes_per_s, visit_s)


def _reason(codec: Codec, sizes: Mapping[Codec, int], bytes_per_s: float, visit_s: float) -> Reasoned[Codec]:
    needs_s, rate = sizes[codec] / bytes_per_s, bytes_per_s * 8 / 1e6
    return Reasoned(
        codec,
        f"{sizes[codec] / 1e6:.2f} MB over {rate:.0f} Mbit/s take {1000 * needs_s:.0f} ms"
        f" of a visit's {1000 * visit_s:.0f} ms ({MOST_OF_A_VISIT:.0%} are wanted)",
    )
