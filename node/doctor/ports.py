"""Ports: can the node listen where it is to?"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from node.doctor.finding import Finding, Level


def look_at_port(host: str, port: int) -> Sequence[Finding]:
    """Binds to `port` (0 for any free one) at a local address, and lets it go."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = f"port {port}" if port else "any free port"
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # As gRPC binds: connections that have ended a moment ago do not hold the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), port))
            listener.listen(1)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "Stop what uses it (a running node?), or choose another port or --listen address."
        return [Finding("port", Level.FAIL, f"cannot listen on {where} of {host}: {why}", fix)]
    return [Finding("port", Level.OK, f"{where} of {host} can be listened on")]
