"""Precision of AdamW's moments. Does not import torch, because the command line imports this module."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from swarm.vocabulary.types import Reasoned

if TYPE_CHECKING:
    from protocol.manifest.manifest import InnerSection


DEFAULT_SLOTS: Final = 16  # Microbatches that a replica holds at a time


class MomentType(enum.Enum):
    FLOAT32 = "float32"
    EIGHT_BIT = "8bit"


@dataclass(frozen=True, slots=True)
class Allowance:
    slots: int = DEFAULT_SLOTS
    moments: MomentType = MomentType.FLOAT32


ORDINARY: Final = Allowance()


def moments_of(inner: "InnerSection", asked: MomentType) -> Reasoned[MomentType]:
    """Chooses the precision of moments: the one that the user asked for, if the run's inner optimizer has it."""
    if asked is MomentType.FLOAT32:
        return Reasoned(asked, "unless --moments 8bit is given")
    if inner.name != "adamw":
        reason = f"--moments {asked.value} needs AdamW; the state of {inner.name} is float32"
        return Reasoned(MomentType.FLOAT32, reason)
    return Reasoned(asked, f"--moments {asked.value}: large matrices except the embedding; other moments are float32")
