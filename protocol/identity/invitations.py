"""Invitations: the author's signature that lets a peer act as data node. `proto/link.proto` specifies them at Route."""

import base64
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.identity.keys import KEY_BYTES, Identity, public_key_of, verify
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import INVITATION_BYTES, SIGNATURE_BYTES, PeerId, RunId

_GRANT_DOMAIN: Final = b"skipstone-invitation:1\0"
_GUEST_DOMAIN: Final = b"skipstone-guest:1\0"
_GRANT: Final = struct.Struct(f">{KEY_BYTES}sHQ{SIGNATURE_BYTES}s")  # key, uses, expires, signature
REMEMBERED: Final = 1024  # Invitations in the cache, valid or forged

HOW_TO_BE_INVITED: Final = "Ask the run's author for a link of `skipstone invite`, and copy all of it."
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
        """Parses `str(grant)`. Raises ConfigError."""
        try:
            return cls(*_GRANT.unpack(base64.b64decode(f"{text}==", altchars=b"-_", validate=True)))
        except (ValueError, struct.error):
            raise ConfigError("this is not an invitation, or not all of it", hint=HOW_TO_BE_INVITED) from None

    def __str__(self) -> str:
        data = _GRANT.pack(self.seed, self.uses, self.expires, self.signature)
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    def invitation(self, run: RunId, peer: PeerId) -> bytes:
        """Returns the invitation of `peer`, as it is sent with its routes."""
        key = Ed25519PrivateKey.from_private_bytes(self.seed)
        grant = _GRANT.pack(key.public_key().public_bytes_raw(), self.uses, self.expires, self.signature)
        return grant + key.sign(_GUEST_DOMAIN + bytes.fromhex(run) + peer.encode())


class Guests:
    """Decides which peers may act as data nodes in a run, by their invitations."""

    def __init__(self, run: RunId, author: PeerId, inviters: tuple[PeerId, ...] = (), is_open: bool = False) -> None:
        self._run = bytes.fromhex(run)
        self.hosts = (author, *inviters)  # Peers that sign invitations, and need none
        self._keys = tuple(map(public_key_of, self.hosts))
        self._is_open = is_open
        self._accepted = Latest[tuple[bytes, PeerId], None](REMEMBERED)

    def fault(self, peer: PeerId, invitation: bytes, now: float) -> str | None:
        """Returns why a peer may not act as data node at the Unix time `now`; None if it may."""
        if self._is_open:
            return None
        fault = self._not_signed(peer, invitation, now)
        if fault is not None or peer in self.hosts:
            return fault
        use = (invitation[: _GRANT.size], peer)
        uses = _GRANT.unpack(use[0])[1]
        if uses and use not in self._accepted and sum(grant == use[0] for grant, _ in self._accepted) >= uses:
            return USED_UP
        self._accepted[use] = None
        return None

    def is_invited(self, peer: PeerId, invitation: bytes, now: float) -> bool:
        """Whether the peer is the author, an inviter, or invited. An open run alone makes no peer invited."""
        # The number of uses does not count: others may have met other guests first, and all must agree.
        return self._not_signed(peer, invitation, now) is None

    def _not_signed(self, peer: PeerId, invitation: bytes, now: float) -> str | None:
        if peer in self.hosts:
            return None
        if len(invitation) != INVITATION_BYTES:
            return NOT_INVITED
        if now >= _GRANT.unpack(invitation[: _GRANT.size])[2]:
            return EXPIRED
        return None if _is_signed(self._run, self._keys, peer, invitation) else FORGED


@lru_cache(REMEMBERED)
def _is_signed(run: bytes, hosts: tuple[bytes, ...], peer: PeerId, invitation: bytes) -> bool:
    key, _, _, signature = _GRANT.unpack(invitation[: _GRANT.size])
    terms = _GRANT_DOMAIN + run + invitation[: _GRANT.size - SIGNATURE_BYTES]
    is_guest = verify(key, invitation[_GRANT.size :], _GUEST_DOMAIN + run + peer.encode())
    return is_guest and any(verify(host, signature, terms) for host in hosts)
