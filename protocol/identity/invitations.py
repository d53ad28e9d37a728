"""Invitations: the author's signature that lets a peer act as data node, verified offline.

A join link carries a `Grant`; its holder signs an `Invitation` for its own peer id. `proto/link.proto` specifies the
signed bytes at Route.
"""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.identity.keys import KEY_BYTES, Identity, public_key_of, verify
from swarm.vocabulary.types import INVITATION_BYTES, SIGNATURE_BYTES, PeerId, RunId

_GRANT_DOMAIN: Final = b"skipstone-invitation:1\0"
_GUEST_DOMAIN: Final = b"skipstone-guest:1\0"
_GRANT: Final = struct.Struct(f">{KEY_BYTES}sHQ{SIGNATURE_BYTES}s")  # key, uses, expires, signature
REMEMBERED: Final = 1024  # Verified invitations in the cache, and as many forged ones
NEVER: Final = 2**64 - 1

NOT_INVITED: Final = "the data node has no invitation"
EXPIRED: Final = "the data node's invitation has expired"
USED_UP: Final = "the data node's invitation is in use by as many other peers as it allows"
FORGED: Final = "the data node's invitation is not signed by the run's author for this peer"


@dataclass(frozen=True, slots=True)
class Grant:
    """The part of an invitation in a join link. It is a secret: every holder may use it."""

    seed: bytes = field(repr=False)  # of the grant's own Ed25519 key
    uses: int  # Number of peers that may use it; 0: any number
    expires: int  # Unix time, in seconds
    signature: bytes = field(repr=False)  # by the run's author or an inviter

    @classmethod
    def issue(cls, issuer: Identity, run: RunId, uses: int, expires: int) -> Self:
        key = Ed25519PrivateKey.generate()
        terms = _GRANT.pack(key.public_key().public_bytes_raw(), uses, expires, b"")[:-SIGNATURE_BYTES]
        signature = issuer.sign(_GRANT_DOMAIN + bytes.fromhex(run) + terms)
        return cls(key.private_bytes_raw(), uses, expires, signature)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `str(grant)`. Raises ValueError for other text."""
        if len(text) > 2 * _GRANT.size:
            raise ValueError(f"{len(text)} characters are too long")
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if len(data) != _GRANT.size:
            raise ValueError(f"{len(data)} bytes, not {_GRANT.size}")
        return cls(*_GRANT.unpack(data))

    def __str__(self) -> str:
        data = _GRANT.pack(self.seed, self.uses, self.expires, self.signature)
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    def invitation(self, run: RunId, peer: PeerId) -> bytes:
        """Returns the invitation of `peer`, as it is sent with its routes."""
        key = Ed25519PrivateKey.from_private_bytes(self.seed)
        public = key.public_key().public_bytes_raw()
        guest = key.sign(_GUEST_DOMAIN + bytes.fromhex(run) + peer.encode())
        return _GRANT.pack(public, self.uses, self.expires, self.signature) + guest


class Guests:
    """Decides which peers may act as data nodes in a run, by their invitations."""

    def __init__(self, run: RunId, author: PeerId, inviters: tuple[PeerId, ...] = (), is_open: bool = False) -> None:
        self._run = bytes.fromhex(run)
        self.hosts = (author, *inviters)
        """Peers that sign invitations, and need none."""
        self.is_open = is_open
        self._verified: OrderedDict[tuple[bytes, PeerId], bytes] = OrderedDict()
        """Signature of the guest, by grant and peer."""
        self._forged: OrderedDict[tuple[bytes, PeerId], bytes] = OrderedDict()

    def fault(self, peer: PeerId, invitation: bytes, now: float) -> str | None:
        """Returns why a peer may not act as data node at the Unix time `now`; None if it may."""
        return None if self.is_open else self._fault(peer, invitation, now, counts_uses=True)

    def is_invited(self, peer: PeerId, invitation: bytes, now: float) -> bool:
        """Whether the peer is the author, an inviter, or invited; all peers agree. An open run alone invites no peer.

        The number of uses does not count, because each peer may have met other guests first.
        """
        return self._fault(peer, invitation, now, counts_uses=False) is None

    def _fault(self, peer: PeerId, invitation: bytes, now: float, *, counts_uses: bool) -> str | None:
        if peer in self.hosts:
            return None
        if len(invitation) != INVITATION_BYTES:
            return NOT_INVITED
        grant, guest = invitation[: _GRANT.size], invitation[_GRANT.size :]
        key, uses, expires, signature = _GRANT.unpack(grant)
        if now >= expires:
            return EXPIRED
        if self._verified.get((grant, peer)) != guest:
            # A used-up grant costs no verification.
            if counts_uses and uses and sum(one == grant and other != peer for one, other in self._verified) >= uses:
                return USED_UP
            if (invitation, peer) in self._forged or not self._is_signed(peer, grant, key, signature, guest):
                _remember(self._forged, (invitation, peer), b"")
                return FORGED
            _remember(self._verified, (grant, peer), guest)
        self._verified.move_to_end((grant, peer))
        return None

    def _is_signed(self, peer: PeerId, grant: bytes, key: bytes, signature: bytes, guest: bytes) -> bool:
        terms = _GRANT_DOMAIN + self._run + grant[:-SIGNATURE_BYTES]
        return verify(key, guest, _GUEST_DOMAIN + self._run + peer.encode()) and any(
            verify(public_key_of(host), signature, terms) for host in self.hosts
        )


def _remember(cache: OrderedDict[tuple[bytes, PeerId], bytes], name: tuple[bytes, PeerId], value: bytes) -> None:
    cache[name] = value
    if len(cache) > REMEMBERED:
        cache.popitem(last=False)
