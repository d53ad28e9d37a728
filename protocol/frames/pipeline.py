"""The frames of a microbatch's life: tensors' headers, receipts and the small messages around them.

Times are seconds here and whole milliseconds on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.frames.fields import (
    DETAIL_CHARACTERS,
    TensorFrame,
    checked_peer,
    milliseconds,
    read_detail,
    read_enum,
    read_header,
    read_module,
    wire_header,
    wire_module,
    wire_number,
)
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    Direction,
    Forward,
    MicrobatchControl,
    MicrobatchTensor,
    Purpose,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
    Unsettled,
)
from swarm.vocabulary.types import MAX_HOPS, SIGNATURE_BYTES, Hop, MicrobatchId, Path, SignedRoute

MAX_LIFETIME_MS: Final = 3_600_000

_LARGEST: Final = 2**32 - 1


def encode_tensor(message: MicrobatchTensor, frame: TensorFrame) -> wire.Frame:
    """The frame of link.proto for a microbatch's tensor."""
    match message:
        case Forward():
            return wire.Frame(forward=_wire_forward(message, frame))
        case Backward():
            return wire.Frame(backward=wire.Backward(route=_wire_route(message), tensor=wire_header(frame)))


def encode_control(frame: MicrobatchControl) -> wire.Frame:
    """The frame of link.proto for a small message about a microbatch."""
    match frame:
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


def read_forward(forward: wire.Forward) -> TensorFrame:
    path, position, microbatch, lifetime_s = _read_route(forward.route)
    if position < 0:
        raise ProtocolViolation("forward: position -1 sends nothing forward to itself")
    purpose = read_enum(Purpose, forward.purpose, "purpose")
    message = Forward(microbatch, path, position, purpose, lifetime_s)
    return read_header(message, forward.tensor)


def read_backward(backward: wire.Backward) -> TensorFrame:
    path, position, microbatch, _ = _read_route(backward.route)
    if position >= len(path.hops):
        raise ProtocolViolation(f"backward: position {position} is not before the end of {len(path.hops)} hops")
    return read_header(Backward(microbatch, path, position), backward.tensor)


def read_receipt(receipt: wire.Receipt) -> Receipt:
    """Raises ProtocolViolation where a field is out of bounds."""
    return Receipt(
        _read_microbatch(receipt.microbatch),
        read_enum(Direction, receipt.direction, "direction"),
        _read_position(receipt.position),
        read_enum(ReceiptStatus, receipt.status, "receipt status"),
        receipt.retry_after_ms / 1000,
        read_detail(receipt.detail),
        receipt.waited_us / 1_000_000,
        receipt.computed_us / 1_000_000,
        receipt.sent_us / 1_000_000,
    )


def read_stranded(stranded: wire.Stranded) -> Stranded:
    return Stranded(
        _read_microbatch(stranded.microbatch),
        read_enum(Direction, stranded.direction, "direction"),
        _read_position(stranded.position),
        read_detail(stranded.detail),
        _read_signature(stranded.signature),
    )


def read_close(close: wire.Close) -> Close:
    return Close(_read_microbatch(close.microbatch), read_detail(close.detail))


def read_recall(recall: wire.Recall) -> Recall:
    path, position, microbatch, _ = _read_route(recall.route)
    if position + 1 >= len(path.hops):
        raise ProtocolViolation(f"recall: position {position} has no hop after it on a path of {len(path.hops)} hops")
    return Recall(microbatch, path, position)


def read_settled(settled: wire.Settled) -> Settled:
    microbatch = _read_microbatch(settled.microbatch)
    return Settled(microbatch, Path(microbatch.data_node, _read_hops(settled.hops)))


def read_unsettled(unsettled: wire.Unsettled) -> Unsettled:
    return Unsettled(_read_microbatch(unsettled.microbatch))


def _wire_forward(message: Forward, frame: TensorFrame) -> wire.Forward:
    return wire.Forward(
        route=_wire_route(message),
        purpose=wire_number(message.purpose),
        tensor=wire_header(frame),
    )


def _wire_route(message: MicrobatchTensor | Recall) -> wire.Route:
    signed = message.path.route
    known_s = 0.0 if signed is None else signed.lifetime_s
    lifetime_s = message.lifetime_s if isinstance(message, Forward) else known_s
    return wire.Route(
        microbatch=_wire_microbatch(message.microbatch),
        hops=_wire_hops(message.path),
        position=message.position,
        modules=[] if signed is None else [wire_module(module) for module in signed.modules],
        lifetime_ms=milliseconds(lifetime_s),
        signature=b"" if signed is None else signed.signature,
    )


def _wire_hops(path: Path) -> list[wire.Hop]:
    return [wire.Hop(module=wire_module(hop.module), peer=hop.peer) for hop in path.hops]


def _read_hops(hops: Sequence[wire.Hop]) -> tuple[Hop, ...]:
    if len(hops) > MAX_HOPS:
        raise ProtocolViolation(f"a path of {len(hops)} hops is longer than {MAX_HOPS}")
    return tuple(Hop(read_module(hop.module), checked_peer(hop.peer)) for hop in hops)


def _read_route(route: wire.Route) -> tuple[Path, int, MicrobatchId, float]:
    """Path, position, microbatch and lifetime in seconds. Whether the data node has signed them is asked where the run
    is known."""
    microbatch, hops = _read_microbatch(route.microbatch), _read_hops(route.hops)
    if not -1 <= route.position <= len(hops):
        raise ProtocolViolation(f"position {route.position} is not on a path of {len(hops)} hops")
    if route.lifetime_ms > MAX_LIFETIME_MS:
        raise ProtocolViolation(f"a lifetime of {route.lifetime_ms} ms is more than {MAX_LIFETIME_MS}")
    lifetime_s = route.lifetime_ms / 1000
    return Path(microbatch.data_node, hops, _read_signed(route, lifetime_s)), route.position, microbatch, lifetime_s


def _read_signed(route: wire.Route, lifetime_s: float) -> SignedRoute | None:
    signature = _read_signature(route.signature)
    if len(route.modules) > (MAX_HOPS if signature else 0):
        raise ProtocolViolation(f"a route of {len(route.modules)} modules, signed with {len(signature)} bytes")
    return SignedRoute(tuple(map(read_module, route.modules)), lifetime_s, signature) if signature else None


def _wire_receipt(receipt: Receipt) -> wire.Receipt:
    return wire.Receipt(
        microbatch=_wire_microbatch(receipt.microbatch),
        direction=wire_number(receipt.direction),
        position=receipt.position,
        status=wire_number(receipt.status),
        retry_after_ms=milliseconds(receipt.retry_after_s),
        detail=receipt.detail[:DETAIL_CHARACTERS],
        waited_us=_microseconds(receipt.waited_s),
        computed_us=_microseconds(receipt.computed_s),
        sent_us=_microseconds(receipt.sent_s),
    )


def _wire_stranded(stranded: Stranded) -> wire.Stranded:
    return wire.Stranded(
        microbatch=_wire_microbatch(stranded.microbatch),
        direction=wire_number(stranded.direction),
        position=stranded.position,
        detail=stranded.detail[:DETAIL_CHARACTERS],
        signature=stranded.signature,
    )


def _read_signature(signature: bytes) -> bytes:
    if len(signature) not in (0, SIGNATURE_BYTES):
        raise ProtocolViolation(f"a signature of {len(signature)} bytes; it has {SIGNATURE_BYTES}")
    return signature


def _wire_microbatch(microbatch: MicrobatchId) -> wire.MicrobatchId:
    return wire.MicrobatchId(data_node=microbatch.data_node, number=microbatch.number)


def _read_microbatch(microbatch: wire.MicrobatchId) -> MicrobatchId:
    return MicrobatchId(checked_peer(microbatch.data_node), microbatch.number)


def _read_position(position: int) -> int:
    if not -1 <= position <= MAX_HOPS:
        raise ProtocolViolation(f"position {position} is on no path")
    return position


def _microseconds(seconds: float) -> int:
    return min(max(round(seconds * 1_000_000), 0), _LARGEST)
