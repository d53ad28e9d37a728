"""The address book of the transport: the contacts of everybody whose verified announcement we hold.

Which address of this machine leads to another.

It stands alone because the session, the membership view and the reachability test share it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from protocol.interfaces.directory import Contact
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import PeerId


class KnownPeers:
    """The contacts from the membership view: a `protocol.interfaces.directory.AddressBook`."""

    def __init__(self) -> None:
        self._contacts: dict[PeerId, Contact] = {}

    def replace_all(self, announcements: Iterable[Announcement]) -> None:
        """Replaces the contacts: from now on exactly these can be dialled."""
        self._contacts = {a.peer: Contact(a.peer, a.addresses, a.certificate, a.via, a.relay) for a in announcements}

    def contact(self, peer: PeerId) -> Contact | None:
        return self._contacts.get(peer)

    def relay_of(self, peer: PeerId) -> str:
        """The multiaddr at which the peer serves tunnels; empty when it does not, or is not known."""
        contact = self._contacts.get(peer)
        return "" if contact is None else contact.relay


def address_towards(host: str) -> str | None:
    """This machine's address on the way to a host; None when there is no way. It is sent no packet for that; a name is
    looked up (IPv4)."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
