"""The frames of a microbatch's life: tensors' headers, receipts and the small messages around them.

Times are seconds here and whole milliseconds on the wire.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from protocol.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from protocol.generated import link_pb2 as wire
from protocol.seams import Codec, DType, TensorSpec
from swarm.errors import ProtocolViolation
from swarm.messages import (
    ArrivalHint,
    Backward,
    Close,
    ControlMessage,
    Direction,
    Forward,
    Purpose,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
    TensorMessage,
    Unsettled,
)
from swarm.vocabulary import MAX_HOPS, Hop, MicrobatchId, ModuleId, Path, PeerId

DETAIL_CHARACTERS: Final = 256
MAX_LIFETIME_MS: Final = 3_600_000
MAX_DIMENSIONS: Final = 4

_PEER_ID: Final = re.compile(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{45}")
_LONGEST_MS: Final = 2**32 - 1

EnumT = TypeVar("EnumT", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A message whose tensor follows in `chunk_count` chunks of the same transfer."""

    message: TensorMessage
    tensor: TensorSpec
    transfer: int
    chunk_count: int


def checked_peer(text: str) -> PeerId:
    """Only the form is checked: a name proves nothing, the certificate does.

    Raises:
        ProtocolViolation: not the form of an Ed25519 key's libp2p id.
    """
    if not _PEER_ID.fullmatch(text):
        raise ProtocolViolation("a peer id is not of the form 12D3Koo... with 52 characters")
    return PeerId(text)


def read_enum(kind: type[EnumT], number: int, what: str) -> EnumT:
    """Raises ProtocolViolation for a number that stands for nothing; 0 does only where the enum has it."""
    try:
        return kind(number)
    except ValueError:
        raise ProtocolViolation(f"{what} {number} is unknown") from None


def read_detail(text: str) -> str:
    """A text for people, without what could drive their terminal.

    Raises:
        ProtocolViolation: more than 256 characters.
    """
    if len(text) > DETAIL_CHARACTERS:
        raise ProtocolViolation(f"a detail of {len(text)} characters is longer than {DETAIL_CHARACTERS}")
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def encode_message(frame: TensorFrame | ControlMessage) -> wire.Frame:
    """The frame of link.proto for a message about a microbatch."""
    match frame:
        case TensorFrame(Forward() as message):
            return wire.Frame(forward=_wire_forward(message, frame))
        case TensorFrame(Backward() as message):
            return wire.Frame(backward=wire.Backward(route=_wire_route(message), tensor=_wire_header(frame)))
        case Receipt():
            return wire.Frame(receipt=_wire_receipt(frame))
        case Stranded():
            return wire.Frame(stranded=_wire_stranded(frame))
        case Close():
            return wire.Frame(
                close=wire.Close(microbatch=_wire_microbatch(frame.microbatch), detail=frame.detail[:DETAIL_CHARACTERS])
            )
        case Recall():
            return wire.Frame(recall=wire.Recall(route=_wire_route(frame)))
        case Settled():
            settled = wire.Settled(microbatch=_wire_microbatch(frame.microbatch), hops=_wire_hops(frame.path))
            return wire.Frame(settled=settled)
        case Unsettled():
            return wire.Frame(unsettled=wire.Unsettled(microbatch=_wire_microbatch(frame.microbatch)))
        case ArrivalHint():
            return wire.Frame(
                arrival_hint=wire.ArrivalHint(
                    microbatch=_wire_microbatch(frame.microbatch),
                    position=frame.position,
                    expected_ms=_milliseconds(frame.expected_s),
                )
            )
    raise TypeError(f"{type(frame).__name__} is not a message that travels")


def read_forward(forward: wire.Forward) -> TensorFrame:
    path, position, microbatch = _read_route(forward.route)
    if position < 0:
        raise ProtocolViolation("forward: position -1 sends nothing forward to itself")
    purpose = read_enum(Purpose, forward.purpose, "purpose")
    if forward.lifetime_ms > MAX_LIFETIME_MS:
        raise ProtocolViolation(f"a lifetime of {forward.lifetime_ms} ms is more than {MAX_LIFETIME_MS}")
    message = Forward(microbatch, path, position, purpose, forward.lifetime_ms / 1000)
    return _read_header(message, forward.tensor)


def read_backward(backward: wire.Backward) -> TensorFrame:
    path, position, microbatch = _read_route(backward.route)
    if position >= len(path.hops):
        raise ProtocolViolation(f"backward: position {position} is not before the end of {len(path.hops)} hops")
    return _read_header(Backward(microbatch, path, position), backward.tensor)


def read_receipt(receipt: wire.Receipt) -> Receipt:
    return Receipt(
        _read_microbatch(receipt.microbatch),
        read_enum(Direction, receipt.direction, "direction"),
        _read_position(receipt.position),
        read_enum(ReceiptStatus, receipt.status, "receipt status"),
        receipt.retry_after_ms / 1000,
        read_detail(receipt.detail),
    )


def read_stranded(stranded: wire.Stranded) -> Stranded:
    return Stranded(
        _read_microbatch(stranded.microbatch),
        read_enum(Direction, stranded.direction, "direction"),
        _read_position(stranded.position),
        read_detail(stranded.detail),
    )


def read_close(close: wire.Close) -> Close:
    return Close(_read_microbatch(close.microbatch), read_detail(close.detail))


def read_recall(recall: wire.Recall) -> Recall:
    path, position, microbatch = _read_route(recall.route)
    if position + 1 >= len(path.hops):
        raise ProtocolViolation(f"recall: position {position} has no hop after it on a path of {len(path.hops)} hops")
    return Recall(microbatch, path, position)


def read_settled(settled: wire.Settled) -> Settled:
    microbatch = _read_microbatch(settled.microbatch)
    return Settled(microbatch, Path(microbatch.data_node, _read_hops(settled.hops)))


def read_unsettled(unsettled: wire.Unsettled) -> Unsettled:
    return Unsettled(_read_microbatch(unsettled.microbatch))


def read_arrival_hint(hint: wire.ArrivalHint) -> ArrivalHint:
    return ArrivalHint(_read_microbatch(hint.microbatch), _read_position(hint.position), hint.expected_ms / 1000)


def _wire_forward(message: Forward, frame: TensorFrame) -> wire.Forward:
    return wire.Forward(
        route=_wire_route(message),
        purpose=wire_number(message.purpose),
        lifetime_ms=_milliseconds(message.lifetime_s),
        tensor=_wire_header(frame),
    )


def _wire_header(frame: TensorFrame) -> wire.TensorHeader:
    return wire.TensorHeader(
        transfer=frame.transfer,
        dtype=wire_number(frame.tensor.dtype),
        codec=wire_number(frame.tensor.codec),
        shape=frame.tensor.shape,
        byte_length=frame.tensor.byte_length,
        chunk_count=frame.chunk_count,
    )


def _read_header(message: TensorMessage, header: wire.TensorHeader) -> TensorFrame:
    dtype = read_enum(DType, header.dtype, "element type")
    codec = read_enum(Codec, header.codec, "codec")
    if not 1 <= len(header.shape) <= MAX_DIMENSIONS or 0 in header.shape:
        raise ProtocolViolation(
            f"a tensor has {len(header.shape)} dimensions, or one of size 0; 1 to 4 are allowed, none 0"
        )
    tensor = TensorSpec(tuple(header.shape), dtype, codec)
    length = tensor.byte_length
    if header.byte_length != length:
        raise ProtocolViolation(f"a tensor of {length} bytes is announced as {header.byte_length} bytes")
    fewest, most = -(-length // MAX_CHUNK_BYTES), -(-length // MIN_CHUNK_BYTES)
    if not fewest <= header.chunk_count <= most:
        raise ProtocolViolation(f"{header.chunk_count} chunks for {length} bytes; {fewest} to {most} are allowed")
    return TensorFrame(message, tensor, header.transfer, header.chunk_count)


def _wire_route(message: TensorMessage | Recall) -> wire.Route:
    microbatch = _wire_microbatch(message.microbatch)
    return wire.Route(microbatch=microbatch, hops=_wire_hops(message.path), position=message.position)


def _wire_hops(path: Path) -> list[wire.Hop]:
    return [
        wire.Hop(module=wire.ModuleId(stage=hop.module.stage, expert=hop.module.expert), peer=hop.peer)
        for hop in path.hops
    ]


def _read_hops(hops: Sequence[wire.Hop]) -> tuple[Hop, ...]:
    if len(hops) > MAX_HOPS:
        raise ProtocolViolation(f"a path of {len(hops)} hops is longer than {MAX_HOPS}")
    return tuple(Hop(ModuleId(hop.module.stage, hop.module.expert), checked_peer(hop.peer)) for hop in hops)


def _read_route(route: wire.Route) -> tuple[Path, int, MicrobatchId]:
    microbatch, hops = _read_microbatch(route.microbatch), _read_hops(route.hops)
    if not -1 <= route.position <= len(hops):
        raise ProtocolViolation(f"position {route.position} is not on a path of {len(hops)} hops")
    return Path(microbatch.data_node, hops), route.position, microbatch


def _wire_receipt(receipt: Receipt) -> wire.Receipt:
    return wire.Receipt(
        microbatch=_wire_microbatch(receipt.microbatch),
        direction=wire_number(receipt.direction),
        position=receipt.position,
        status=wire_number(receipt.status),
        retry_after_ms=_milliseconds(receipt.retry_after_s),
        detail=receipt.detail[:DETAIL_CHARACTERS],
    )


def _wire_stranded(stranded: Stranded) -> wire.Stranded:
    return wire.Stranded(
        microbatch=_wire_microbatch(stranded.microbatch),
        direction=wire_number(stranded.direction),
        position=stranded.position,
        detail=stranded.detail[:DETAIL_CHARACTERS],
    )


def _wire_microbatch(microbatch: MicrobatchId) -> wire.MicrobatchId:
    return wire.MicrobatchId(data_node=microbatch.data_node, number=microbatch.number)


def _read_microbatch(microbatch: wire.MicrobatchId) -> MicrobatchId:
    return MicrobatchId(checked_peer(microbatch.data_node), microbatch.number)


def _read_position(position: int) -> int:
    if not -1 <= position <= MAX_HOPS:
        raise ProtocolViolation(f"position {position} is on no path")
    return position


def _milliseconds(seconds: float) -> int:
    return min(max(round(seconds * 1000), 0), _LONGEST_MS)


def wire_number(value: enum.Enum) -> Any:
    """An enum's number, as the generated code takes it: the values are link.proto's."""
    return value.value
