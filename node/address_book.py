"""Whom the transport may talk to: the contacts of everybody whose verified announcement we hold."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from protocol.seams import Contact
from swarm.announcement import Announcement
from swarm.vocabulary import PeerId


class KnownPeers:
    """An `AddressBook` over the membership view. Readers on other threads see one whole snapshot or the next."""

    def __init__(self) -> None:
        self._contacts: MappingProxyType[PeerId, Contact] = MappingProxyType({})

    def replace_all(self, announcements: Iterable[Announcement]) -> None:
        self._contacts = MappingProxyType({a.peer: Contact(a.peer, a.addresses, a.certificate) for a in announcements})

    def contact(self, peer: PeerId) -> Contact | None:
        return self._contacts.get(peer)

    def certificates(self) -> Iterable[bytes]:
        return tuple(contact.certificate for contact in self._contacts.values())
