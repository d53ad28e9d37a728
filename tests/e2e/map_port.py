"""Maps a port at home and serves a byte to each caller: `python -m tests.e2e.map_port nat-pmp|upnp`, one JSON line."""

import dataclasses
import json
import socket
import sys
import threading

from node.reachability.port_mapping import NatPmp, NotMapped, Upnp

LEASE_S = 120


def main() -> None:
    way = {"nat-pmp": NatPmp, "upnp": Upnp}[sys.argv[1]]()
    listener = socket.create_server(("0.0.0.0", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    port = listener.getsockname()[1]
    mapping = way.map(port, port, LEASE_S)
    print(json.dumps(dataclasses.asdict(mapping)), flush=True)
    if isinstance(mapping, NotMapped):
        return
    assert way.map(port, mapping.external_port, LEASE_S) == mapping, "renewed"
    sys.stdin.read()
    failed = way.unmap(mapping)
    assert failed is None, failed


def serve(listener: socket.socket) -> None:
    while True:
        caller, _ = listener.accept()
        with caller:
            caller.sendall(b"!")


if __name__ == "__main__":
    main()
