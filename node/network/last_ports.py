"""Last ports of this machine's nodes, in a file beside the key, so that a link survives a restart."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Final

from protocol.transport.settings import free_port
from swarm.vocabulary.types import RunId

MAX_RUNS: Final = 64  # Runs remembered for one key; the oldest is forgotten
MAX_BYTES: Final = 16 * 1024

Ports = tuple[int, int]  # Of the node and of its DHT


def last_ports(identity_path: Path, run: RunId, host: str) -> Ports:
    """Returns the ports that the run's node had last; 0 for each that is unknown or in use now."""
    port, dht_port = _read(_path(identity_path)).get(run, (0, 0))
    return port and free_port(host, port), dht_port and free_port(host, dht_port)


def remember_ports(identity_path: Path, run: RunId, ports: Ports) -> None:
    """Saves the ports of the run's node, unless the folder is read-only."""
    path = _path(identity_path)
    known = _read(path)
    if known.pop(run, None) == ports:
        return
    newest = dict([*known.items(), (run, ports)][-MAX_RUNS:])
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(newest))
        os.replace(partial, path)


def _path(identity_path: Path) -> Path:
    return identity_path.with_name(identity_path.name + ".ports")


def _read(path: Path) -> dict[str, Ports]:
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(MAX_BYTES))
        return {run: (int(port), int(dht_port)) for run, (port, dht_port) in table.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged
        return {}
