"""The handshake: admission of streams, Hellos and Farewells."""
# A stream whose caller does not read cannot be ended: gRPC's status waits behind what was written. So each peer gets
# few streams, and a refusal is a status alone.

from __future__ import annotations

from collections import Counter
from typing import Final

import grpc

from protocol.frames.frames import Farewell, FarewellReason, Frame, Hello
from protocol.identity.certificates import peer_of_certificate
from protocol.identity.signed_records import RECORD_LIFETIME_S
from protocol.transport.grpc_streams import AcceptedStream, ServicerContext
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import IdentityError, PeerError, ProtocolViolation, Rejected, StaleVersion, Unreachable
from swarm.vocabulary.types import PROTOCOL_VERSIONS, PeerId, RunId, short

MAX_STREAMS_PER_PEER: Final = 3  # The link's, its successor's after a restart, and one that is ending
FORMER_LIFE_MS: Final = 5000  # Clock correction between two lives, in ms


class Door:
    """Admits the peers of a run, and counts each one's streams until gRPC has forgotten them."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._streams: Counter[PeerId] = Counter()

    async def enter(self, context: ServicerContext) -> PeerId:
        """Admits a caller and returns its peer. Raises grpc.aio.AbortError after telling a refused one."""
        try:
            peer = proven_peer(AcceptedStream(context).certificate(), self._run)
        except Rejected as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if self._streams[peer] >= MAX_STREAMS_PER_PEER:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too many streams at once from this peer")
        self._streams[peer] += 1
        context.add_done_callback(lambda _context: self._left(peer))
        return peer

    def _left(self, peer: PeerId) -> None:
        self._streams -= Counter((peer,))  # and nothing is kept of 0


def proven_peer(certificate: bytes, run: RunId) -> PeerId:
    """The peer that the caller's certificate proves. Raises Rejected."""
    # TLS alone proves little: the authority's key is public.
    try:
        return peer_of_certificate(certificate, run)
    except ProtocolViolation as error:
        raise Rejected(str(error)) from None


def objection_to(hello: Hello, own_run: RunId, expected: PeerId) -> Farewell | None:
    """The reason why a Hello is not acceptable; None when it is. `expected` is the peer that the certificate proves."""
    if hello.peer != expected:
        return Farewell(FarewellReason.NOT_YOU, f"the certificate is that of {expected}")
    if hello.run != own_run:
        return Farewell(FarewellReason.WRONG_RUN, f"this is run {own_run[:12]}")
    if hello.versions.common(PROTOCOL_VERSIONS) is None:
        spoken = f"{PROTOCOL_VERSIONS.lowest} to {PROTOCOL_VERSIONS.highest}"
        return Farewell(FarewellReason.WRONG_VERSION, f"protocol versions {spoken} are spoken here")
    return None


def expect_hello(frame: Frame, peer: PeerId) -> Hello:
    """Reads the Hello that begins a stream. Raises PeerError for a Farewell, ProtocolViolation for other frames."""
    if isinstance(frame, Hello):
        return frame
    if isinstance(frame, Farewell):
        raise meaning_of(frame, peer)
    raise ProtocolViolation(f"{type(frame).__name__} came from {short(peer)} before a Hello")


def meaning_of(farewell: Farewell, peer: PeerId) -> PeerError:
    """The error that a peer's Farewell means for what was under way."""
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
    """The error that our objection to a peer's Hello means for the dialler."""
    kind = StaleVersion if objection.reason is FarewellReason.WRONG_VERSION else Rejected
    return kind(f"{short(peer)} was refused ({objection.reason.name.lower()}): {objection.detail}")


class SameKey(Rejected):
    """Raised when the peer says that another process uses our identity; `record` is to prove it."""

    def __init__(self, message: str, record: bytes) -> None:
        super().__init__(message)
        self.record = record


class Duplicate(Unreachable):
    """Raised when the peer has opened a stream to us at the same time, and that one is to be used."""


# ---- one key in two live processes: the older process is kept, and the younger one ends ----


def is_duplicate(said: Announcement, peer: PeerId, certificate: bytes, incarnation: int, wall: float) -> bool:
    """Whether another process with our key made this verified record while this one ran."""
    # The certificate is each process's own. A former life's record is older than this one.
    return (
        said.peer == peer
        and abs(wall - (said.expires_at - RECORD_LIFETIME_S)) < RECORD_LIFETIME_S
        and said.certificate != certificate
        and said.sequence > incarnation + FORMER_LIFE_MS
    )


async def end_for(older: Announcement) -> None:
    """Raises the IdentityError that ends this process."""
    where = f" at {', '.join(older.addresses)}" if older.addresses else ""
    raise IdentityError(
        f"another node with this key ({older.peer}) is in the run{where}, and was there first; this one ends",
        hint=(
            "Every machine needs a key of its own: start with --identity FILE, or stop the other node. Of a "
            "machine that was copied, delete the copied key."
        ),
    )
