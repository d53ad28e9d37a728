"""The directory's interface, and the contacts of the peers found in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId


@dataclass(frozen=True, slots=True)
class Contact:
    """What it takes to dial a peer and to recognise it."""

    peer: PeerId
    addresses: tuple[str, ...]
    certificate: bytes  # DER; checked to belong to `peer`
    via: tuple[PeerId, ...] = ()  # Peers that can call it
    relay: str = ""  # Multiaddr at which it serves tunnels


class AddressBook(Protocol):
    """The contacts that the transport can dial."""

    def contact(self, peer: PeerId) -> Contact | None:
        """The peer's contact, or None when it is not known."""


class Directory(Protocol):
    """The DHT's interface to the node."""

    async def publish(self, announcement: Announcement) -> None:
        """Signs and stores our record under its module's key. Raises Unreachable; call again later."""

    async def look_up(self, modules: Sequence[ModuleId]) -> list[Announcement]:
        """All valid, unexpired records of these modules and of visitors. Raises Unreachable."""
