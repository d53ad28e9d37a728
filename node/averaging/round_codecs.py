"""The codecs of a round: of what members contribute, and of the means that reducers send back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from swarm.round_messages import Contribution, RoundPiece
from swarm.vocabulary import Codec


@dataclass(frozen=True, slots=True)
class RoundCodecs:
    """Every member uses these."""

    contribution: Codec
    result: Codec
    """Nobody makes good for what this one leaves out, so it is never sparse."""

    @property
    def leave_over(self) -> bool:
        """Whether contributions leave out so much that it has to stay in the replicas (`node.averaging.leftover`)."""
        return self.contribution not in (Codec.NONE, Codec.BF16, Codec.INT8)

    def of(self, message: RoundPiece) -> Codec:
        """That the message's tensor has."""
        return self.contribution if isinstance(message, Contribution) else self.result


ROUND_CODECS: Final[Mapping[str, RoundCodecs]] = {
    "none": RoundCodecs(Codec.NONE, Codec.NONE),
    "bf16": RoundCodecs(Codec.BF16, Codec.BF16),
    "int8": RoundCodecs(Codec.INT8, Codec.INT8),
    "int4": RoundCodecs(Codec.INT4, Codec.INT4),
    "top_k_4": RoundCodecs(Codec.TOP_K_4, Codec.INT4),
    "top_k_2": RoundCodecs(Codec.TOP_K_2, Codec.INT4),
}
"""By what the manifest says under `codecs.pseudo_gradients`."""
