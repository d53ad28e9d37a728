"""The first words on a stream, and the last: who speaks, whether they may, and what a Farewell means."""

from __future__ import annotations

from protocol.frames import Farewell, FarewellReason, Frame, Hello
from swarm.errors import PeerError, ProtocolViolation, Rejected, StaleVersion, Unreachable
from swarm.vocabulary import PROTOCOL_VERSIONS, PeerId, RunId, short


def objection_to(hello: Hello, own_run: RunId, expected: PeerId) -> Farewell | None:
    """Why a Hello is not acceptable, or None when it is. `expected` is the peer that the certificate proves."""
    if hello.peer != expected:
        return Farewell(FarewellReason.NOT_YOU, f"the certificate is that of {expected}")
    if hello.run != own_run:
        return Farewell(FarewellReason.WRONG_RUN, f"this is run {own_run[:12]}")
    if hello.versions.common(PROTOCOL_VERSIONS) is None:
        spoken = f"{PROTOCOL_VERSIONS.lowest} to {PROTOCOL_VERSIONS.highest}"
        return Farewell(FarewellReason.WRONG_VERSION, f"protocol versions {spoken} are spoken here")
    return None


def expect_hello(frame: Frame, peer: PeerId) -> Hello:
    """The Hello that a stream has to begin with.

    Raises:
        PeerError: it is a Farewell, and then the error is its meaning; or something else, a ProtocolViolation.
    """
    if isinstance(frame, Hello):
        return frame
    if isinstance(frame, Farewell):
        raise meaning_of(frame, peer)
    raise ProtocolViolation(f"{type(frame).__name__} came from {short(peer)} before a Hello")


def meaning_of(farewell: Farewell, peer: PeerId) -> PeerError:
    """A peer's Farewell as the error that ends what was under way."""
    said = f": {farewell.detail}" if farewell.detail else ""
    match farewell.reason:
        case FarewellReason.WRONG_RUN:
            return Rejected(f"{short(peer)} trains another run{said}")
        case FarewellReason.WRONG_VERSION:
            return StaleVersion(f"{short(peer)} speaks no protocol version that we speak{said}")
        case FarewellReason.NOT_YOU:
            return Rejected(f"{short(peer)} does not take us for who we say we are{said}")
        case FarewellReason.VIOLATION:
            return Rejected(f"{short(peer)} says that we broke the protocol{said}")
        case FarewellReason.LEAVING:
            return Unreachable(f"{short(peer)} leaves{said}")
        case FarewellReason.DUPLICATE:
            return Duplicate(f"{short(peer)} has another stream to us{said}")
        case FarewellReason.SAME_KEY:
            return SameKey(f"{short(peer)} is linked to another process with our key{said}", farewell.record)
        case FarewellReason.UNSPECIFIED:
            return Unreachable(f"{short(peer)} closed the stream{said}")


def objection_error(objection: Farewell, peer: PeerId) -> PeerError:
    """Our own objection to a peer's Hello as an error for the one who dialled."""
    kind = StaleVersion if objection.reason is FarewellReason.WRONG_VERSION else Rejected
    return kind(f"{short(peer)} was refused ({objection.reason.name.lower()}): {objection.detail}")


class SameKey(Rejected):
    """The peer says that another process uses our identity; `record` is to prove it."""

    def __init__(self, message: str, record: bytes) -> None:
        super().__init__(message)
        self.record = record


class Duplicate(Unreachable):
    """The peer has opened a stream to us at the same time, and that one is to be used."""
