"""The handshake: verification of certificates, Hellos and Farewells."""

from typing import Final

from protocol.frames.frames import Farewell, FarewellReason, Frame, Hello
from protocol.identity.certificates import peer_of_certificate
from protocol.identity.signed_records import RECORD_LIFETIME_S
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import IdentityError, PeerError, ProtocolViolation, Rejected, StaleVersion, Unreachable
from swarm.vocabulary.types import PROTOCOL_VERSIONS, PeerId, RunId, short

FORMER_LIFE_MS: Final = 5000  # Largest clock correction between two processes of one node, in ms


def proven_peer(certificate: bytes, run: RunId) -> PeerId:
    """Verifies a caller's certificate for `run` and returns the caller's peer id. Raises Rejected."""
    try:  # TLS alone proves nothing, because the authority's key is public
        return peer_of_certificate(certificate, run)
    except ProtocolViolation as error:
        raise Rejected(str(error)) from None


def objection_to(hello: Hello, own_run: str, expected: PeerId) -> Farewell | None:
    """Checks a Hello's run, versions and peer (`expected`: by the certificate). Returns the objection, if any."""
    if hello.peer != expected:
        return Farewell(FarewellReason.NOT_YOU, f"the certificate belongs to {expected}")
    if hello.run != own_run:
        return Farewell(FarewellReason.WRONG_RUN, f"this is run {own_run[:12]}")
    if hello.versions.common(PROTOCOL_VERSIONS) is None:
        spoken = f"{PROTOCOL_VERSIONS.lowest} to {PROTOCOL_VERSIONS.highest}"
        return Farewell(FarewellReason.WRONG_VERSION, f"protocol versions {spoken} are spoken here")
    return None


def expect_hello(frame: Frame, peer: PeerId) -> Hello:
    """Returns `frame` if it is a Hello. Raises PeerError for a Farewell, ProtocolViolation for other frames."""
    if isinstance(frame, Hello):
        return frame
    if isinstance(frame, Farewell):
        raise meaning_of(frame, peer)
    raise ProtocolViolation(f"{type(frame).__name__} came from {short(peer)} before a Hello")


def meaning_of(farewell: Farewell, peer: PeerId) -> PeerError:
    """Converts a peer's Farewell to the error that ends its link and fails everything in flight on it."""
    said = f": {farewell.detail}" if farewell.detail else ""
    match farewell.reason:
        case FarewellReason.WRONG_RUN:
            return Rejected(f"{short(peer)} trains another run{said}")
        case FarewellReason.WRONG_VERSION:
            return StaleVersion(f"{short(peer)} supports none of our protocol versions{said}")
        case FarewellReason.NOT_YOU:
            return Rejected(f"{short(peer)} does not accept our identity{said}")
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
    """Converts our objection to a dialled peer's Hello to the error that `dial` raises."""
    kind = StaleVersion if objection.reason is FarewellReason.WRONG_VERSION else Rejected
    return kind(f"{short(peer)} was refused ({objection.reason.name.lower()}): {objection.detail}")


class SameKey(Rejected):
    """Error: a peer reports another process with our key. `record` should be that process's signed announcement."""

    def __init__(self, message: str, record: bytes) -> None:
        super().__init__(message)
        self.record = record


class Duplicate(Unreachable):
    """Error: the peer has opened a stream to us at the same time, and both sides use that stream."""


def is_duplicate(said: Announcement, peer: PeerId, certificate: bytes, incarnation: int, wall: float) -> bool:
    """Whether another process with our key signed this verified announcement while this process ran."""
    # Each process has its own certificate. A record of an earlier process of this node is older than this process.
    return (
        said.peer == peer
        and abs(wall - (said.expires_at - RECORD_LIFETIME_S)) < RECORD_LIFETIME_S
        and said.certificate != certificate
        and said.sequence > incarnation + FORMER_LIFE_MS
    )


async def end_for(older: Announcement) -> None:
    """Raises the IdentityError that ends this process, because an older process has the same key."""
    where = f" at {', '.join(older.addresses)}" if older.addresses else ""
    raise IdentityError(
        f"another node with this key ({older.peer}) is already in the run{where}; this one ends",
        hint=(
            "Every machine needs its own key: start with --identity FILE, or stop the other node. If this machine "
            "is a copy of another one, delete its key."
        ),
    )
