"""The default gateway: the router of a home. Nobody else is asked for a port."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Final

ROUTES: Final = Path("/proc/net/route")
_HAS_GATEWAY: Final = 2
"""RTF_GATEWAY of Linux's <linux/route.h>."""


def default_gateway(routes: Path = ROUTES) -> str | None:
    """Its IPv4 address by Linux's table of routes, the one with the lowest metric; None elsewhere, and where there is none."""
    try:
        lines = routes.read_text().splitlines()[1:]
    except OSError:
        return None
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000" and int(fields[3], 16) & _HAS_GATEWAY:
            found.append((int(fields[6]), socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))))
    return min(found)[1] if found else None
