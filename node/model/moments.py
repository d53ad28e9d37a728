"""The choice of how many bits the moments of AdamW have on this machine: the person's, for one node.

It is no part of the manifest. A round averages parameters, never moments, so a replica whose moments are coarser
averages with all others as before; and whether the bytes are scarce is a question of the card. Peers need not know of
it. It stands alone because the node's options, which load no torch, name it too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.types import Reasoned

if TYPE_CHECKING:
    from protocol.manifest.manifest import InnerSection


class MomentType(enum.Enum):
    """The form in which the moments of large matrices are kept."""

    FLOAT32 = "float32"
    EIGHT_BIT = "8bit"
    """8 bits each and a scale for 256 of them (`node.model.packed.eight_bit`)."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the person at a machine lets the module on it take."""

    slots: int = DEFAULT_SLOTS
    """Microbatches held at a time."""
    moments: MomentType = MomentType.FLOAT32


ORDINARY: Final = Allowance()


def moments_of(inner: InnerSection, asked: MomentType) -> Reasoned[MomentType]:
    """The form of the moments in a run with this inner optimizer."""
    if asked is MomentType.FLOAT32:
        return Reasoned(asked, "unless --moments 8bit is given")
    if inner.name != "adamw":
        reason = f"--moments {asked.value} is for AdamW; what {inner.name} keeps of the blocks' matrices is float32"
        return Reasoned(MomentType.FLOAT32, reason)
    return Reasoned(asked, f"--moments {asked.value}: of matrices, but for the embedding; small tensors keep float32")
