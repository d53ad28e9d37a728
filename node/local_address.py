"""Which address of this machine leads to another."""

from __future__ import annotations

import ipaddress
import socket


def address_towards(host: str) -> str | None:
    """This machine's address on the way to a host; None when there is no way. It is sent no packet for that; a name is looked up (IPv4)."""
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
