"""Checks of the machine: memory, disk, and how many files it lets a process open.

Ports: can the node listen where it is to?
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from node.doctor.finding import Finding, Level
from node.model.free_memory import GIB, available_memory
from swarm.vocabulary.types import Reasoned

LITTLE_MEMORY_BYTES: Final = 4 * GIB
NO_MEMORY_BYTES: Final = 1 * GIB
"""Torch, gRPC and the DHT's process alone take more than half of that."""
LITTLE_DISK_BYTES: Final = 5 * GIB
NO_DISK_BYTES: Final = 1 * GIB
FEW_FILES: Final = 1024
"""256 links and the DHT's connections, twice over."""
TOO_FEW_FILES: Final = 256


def look_at_memory(memory: Callable[[], Reasoned[int | None]] = available_memory) -> Sequence[Finding]:
    """Checks the available memory: of the machine, or of the container that limits it."""
    available = memory().value
    if available is None:
        return [Finding("memory", Level.SKIP, "this system does not say how much is free")]
    found = f"{available / GIB:.1f} GiB available"
    if available < NO_MEMORY_BYTES:
        return [
            Finding(
                "memory",
                Level.FAIL,
                found,
                "Close other programs, or give the container more memory: a node needs 1 GiB and its stage.",
            )
        ]
    if available < LITTLE_MEMORY_BYTES:
        return [Finding("memory", Level.WARN, found, "Enough for small stages; close other programs for larger ones.")]
    return [Finding("memory", Level.OK, found)]


def look_at_disk(folders: Iterable[tuple[str, Path]]) -> Sequence[Finding]:
    """Checks each named folder: what is free where it is or would be made, and whether it may be written to."""
    return [_disk(name, folder) for name, folder in folders]


def _disk(name: str, folder: Path) -> Finding:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            "disk", Level.FAIL, f"{name}: {there} cannot be written to", "Choose another folder, or change its owner."
        )
    free = shutil.disk_usage(there).free
    found = f"{name}: {free / GIB:.1f} GiB free at {folder}"
    if free < NO_DISK_BYTES:
        return Finding("disk", Level.FAIL, found, "Free some space: a full disk loses checkpoints and logs.")
    if free < LITTLE_DISK_BYTES:
        return Finding(
            "disk", Level.WARN, found, "Free some space, or choose another folder: checkpoints grow with the stage."
        )
    return Finding("disk", Level.OK, found)


def look_at_files() -> Sequence[Finding]:
    """Checks how many files and sockets a process may have open."""
    try:
        import resource
    except ImportError:
        return [Finding("files", Level.SKIP, "this system has no such limit")]
    return [files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]


def files_finding(limit: int) -> Finding:
    """The finding on the limit of open files; `limit` is negative where there is none."""
    if limit < 0 or limit >= FEW_FILES:
        return Finding("files", Level.OK, "no limit on open files" if limit < 0 else f"{limit} files may be open")
    level = Level.FAIL if limit < TOO_FEW_FILES else Level.WARN
    return Finding(
        "files",
        level,
        f"only {limit} files may be open",
        "Raise it: `ulimit -n 4096`, or LimitNOFILE=4096 in the service.",
    )


def look_at_port(host: str, port: int) -> Sequence[Finding]:
    """Checks that `port` (0 for any free one) can be bound at a local address, and lets it go."""
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
