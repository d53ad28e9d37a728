"""Last ports of this machine's nodes, in a file beside the key, so that a link survives a restart."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Final

from swarm.vocabulary.types import RunId

MAX_RUNS: Final = 64  # Runs remembered for one key; the oldest is forgotten
MAX_BYTES: Final = 16 * 1024

Ports = tuple[int, int]  # Of the node and of its DHT


def last_ports(identity_path: Path, run: RunId, host: str) -> Ports:
    """Returns the ports that the run's node had last; 0 for each that is unknown or in use now."""
    port, dht_port = _read(_path(identity_path)).get(run, (0, 0))
    return _unless_in_use(host, port), _unless_in_use(host, dht_port)


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
        return {str(run): (_port(one), _port(other)) for run, (one, other) in table.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged
        return {}


def _port(number: object) -> int:
    if not isinstance(number, int) or not 0 <= number <= 65_535:
        raise ValueError(number)
    return number


def _unless_in_use(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port
