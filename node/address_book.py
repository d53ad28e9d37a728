"""Whom the transport can dial: the contacts of everybody whose verified announcement we hold."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.seams import Contact
from swarm.announcement import Announcement
from swarm.vocabulary import PeerId


class KnownPeers:
    """A `protocol.seams.AddressBook` over the membership view."""

    def __init__(self) -> None:
        self._contacts: dict[PeerId, Contact] = {}

    def replace_all(self, announcements: Iterable[Announcement]) -> None:
        """From now on exactly these can be dialled."""
        self._contacts = {a.peer: Contact(a.peer, a.addresses, a.certificate, a.via, a.relay) for a in announcements}

    def contact(self, peer: PeerId) -> Contact | None:
        return self._contacts.get(peer)

    def relay_of(self, peer: PeerId) -> str:
        """The multiaddr at which the peer serves tunnels; empty when it does not, or is not known."""
        contact = self._contacts.get(peer)
        return "" if contact is None else contact.relay
