"""Whether the node in this container does its work, asked of the node itself: exit code 0, or 1 and the reason.

Two things are asked, for less than a tenth of a second of computing. The event loop has to answer at the endpoint that
`skipstone leave` comes to: it is sent what is not the secret, and must hang up (`node/runtime/leave_socket.py`); a
process that hangs does not. And the port of the node has to answer with TLS 1.3 (RFC 8446), which takes no certificate
of ours: a caller is done with the handshake before the server has looked at what the caller shows.
"""

import json
import os
import socket
import ssl
import sys
from pathlib import Path

LIMIT_S = 4.0
"""For each of the two; Docker gives both of them ten seconds together."""
NO_SECRET = b"?" * 64
"""As long as the secret: the endpoint hangs up when it has heard so much and it is wrong."""


def main() -> int:
    """Asks both, says what is wrong."""
    identity = os.environ.get("SKIPSTONE_IDENTITY") or Path(os.environ["SKIPSTONE_HOME"], "identity.key")
    listen = os.environ.get("SKIPSTONE_LISTEN") or "0.0.0.0"  # noqa: S104 - compared and dialled, not bound to
    host = "127.0.0.1" if listen == "0.0.0.0" else listen  # noqa: S104
    try:
        ask_event_loop(Path(f"{identity}.running"))
        ask_for_tls(host, int(os.environ["SKIPSTONE_PORT"]))
    except (OSError, ValueError, KeyError) as error:
        print(f"unhealthy: {error}")
        return 1
    return 0


def ask_event_loop(endpoint: Path) -> None:
    """Raises OSError (TimeoutError is one) or ValueError when there is no endpoint, or nobody hangs up on a wrong
    secret."""
    port = int(json.loads(endpoint.read_text())["port"])
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(NO_SECRET)
        if connection.recv(1):
            raise ValueError(f"whoever listens at the port in {endpoint} is not the node")


def ask_for_tls(host: str, port: int) -> None:
    """Raises OSError when no TLS server answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # who it is does not matter here: it is this container's own port
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), LIMIT_S) as connection,
        context.wrap_socket(connection, server_hostname=host),
    ):
        return


if __name__ == "__main__":
    sys.exit(main())
