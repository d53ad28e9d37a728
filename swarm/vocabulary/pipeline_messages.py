"""Messages about microbatches, as plain data, without their tensors. `proto/link.proto` explains each of them."""

import enum
from dataclasses import dataclass
from typing import Annotated

from swarm.vocabulary.averaging_messages import RoundControl, RoundPiece, StateChunk, StateControl
from swarm.vocabulary.bounds import Detail, Length, Range
from swarm.vocabulary.types import (
    INVITATION_BYTES,
    MAX_DOCUMENT_TOKENS,
    MAX_DOCUMENTS,
    MAX_HOPS,
    SIGNATURE_BYTES,
    MicrobatchId,
    Path,
)

Position = Annotated[int, Range(-1, MAX_HOPS)]  # See `Path`
# Tokens of each document
Documents = Annotated[tuple[Annotated[int, Range(1, MAX_DOCUMENT_TOKENS)], ...], Length(0, MAX_DOCUMENTS)]
RouteSignature = Annotated[bytes, Length(SIGNATURE_BYTES, SIGNATURE_BYTES, or_none=True)]
RouteInvitation = Annotated[bytes, Length(INVITATION_BYTES, INVITATION_BYTES, or_none=True)]


def _off_path(path: Path, position: int, least: int, most: int) -> str | None:
    if least <= position <= most:
        return None
    return f"position {position} on a path of {len(path.hops)} hops; {least} to {most} are allowed"


class Purpose(enum.Enum):
    TRAIN = 1
    EVALUATE = 2


class Direction(enum.Enum):
    FORWARD = 1
    BACKWARD = 2


class ReceiptStatus(enum.Enum):
    ACCEPTED = 1
    PASSED_ON = 2
    BUSY = 3
    REFUSED = 4


@dataclass(frozen=True, slots=True)
class Forward:
    """Hidden states [rows, tokens, hidden] for `path.hops[position]`, or for the data node at `len(hops)`."""

    microbatch: MicrobatchId
    path: Path
    position: Position
    purpose: Purpose
    lifetime_s: float

    def fault(self) -> str | None:
        return _off_path(self.path, self.position, 0, len(self.path.hops))


@dataclass(frozen=True, slots=True)
class Backward:
    """Gradient of the loss for the output of `path.hops[position]`; position -1 is the data node's embedding."""

    microbatch: MicrobatchId
    path: Path
    position: Position

    def fault(self) -> str | None:
        return _off_path(self.path, self.position, -1, len(self.path.hops) - 1)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Answer to the sender of a tensor. A receipt PASSED_ON includes measured times, in seconds."""

    microbatch: MicrobatchId
    direction: Direction
    position: Position
    status: ReceiptStatus
    retry_after_s: float = 0.0
    detail: Detail = ""
    waited_s: float = 0.0
    computed_s: float = 0.0
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stranded:
    """To the data node: the hop at `position` can be neither reached nor replaced. `signature`: see `SignedRoute`."""

    microbatch: MicrobatchId
    direction: Direction
    position: Position
    detail: Detail
    signature: RouteSignature = b""


@dataclass(frozen=True, slots=True)
class Close:
    """From the data node: the microbatch is abandoned."""

    microbatch: MicrobatchId
    detail: Detail


@dataclass(frozen=True, slots=True)
class Recall:
    """From a substitute for `path.hops[position + 1]`, which has the gradient: asks hop `position` for the input."""

    microbatch: MicrobatchId
    path: Path
    position: Position

    def fault(self) -> str | None:
        return _off_path(self.path, self.position, -1, len(self.path.hops) - 2)


@dataclass(frozen=True, slots=True)
class Settled:
    """From the data node: the microbatch is complete. Exactly the gradients of these hops count."""

    microbatch: MicrobatchId
    path: Path


@dataclass(frozen=True, slots=True)
class Unsettled:
    """To the data node: asks whether the gradient that the sender has added counts."""

    microbatch: MicrobatchId


MicrobatchTensor = Forward | Backward
MicrobatchControl = Receipt | Stranded | Close | Recall | Settled | Unsettled

TensorMessage = MicrobatchTensor | RoundPiece | StateChunk
ControlMessage = MicrobatchControl | RoundControl | StateControl
