"""TCP sockets of this machine and the processes that hold them, read from Linux's /proc (proc(5)).

A node cannot choose the source address of its calls, so a caller is known by the process that holds its socket.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.vocabulary.errors import ConfigError

Endpoint = tuple[str, int]
_LISTENS = 0x0A
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


@dataclass(frozen=True, slots=True)
class Socket:
    """One line of the kernel's table. IPv4 addresses in IPv6 form become IPv4."""

    local: Endpoint
    remote: Endpoint
    listens: bool
    inode: int


def require_proc() -> None:
    """Raises ConfigError unless the kernel tells which process holds a socket."""
    if sys.platform != "linux" or not Path(_TABLES[0]).is_file():
        raise ConfigError(
            "the WAN emulation needs Linux: it tells nodes apart by /proc",
            hint="Run it in a container or a virtual machine with Linux.",
        )


def read_sockets() -> list[Socket]:
    found: list[Socket] = []
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        found += map(parse_socket, lines)
    return found


def parse_socket(line: str) -> Socket:
    fields = line.split()
    return Socket(_endpoint(fields[1]), _endpoint(fields[2]), int(fields[3], 16) == _LISTENS, int(fields[9]))


def listening() -> frozenset[Endpoint]:
    return frozenset(socket.local for socket in read_sockets() if socket.listens)


class Callers:
    """Finds the member behind a connection. `roots` returns the process id of each member's node, by index."""

    def __init__(self, roots: Callable[[], Mapping[int, int]]) -> None:
        self._roots = roots

    def caller(self, source: Endpoint, target: Endpoint) -> int | None:
        """Returns the member, or None if it is none of them or its end is closed. Reads /proc: call it in a thread."""
        inode = next((s.inode for s in read_sockets() if s.local == source and s.remote == target and s.inode), None)
        if inode is None:
            return None
        roots = {pid: member for member, pid in self._roots().items()}
        return next((roots[root] for root, pid in descendants(set(roots)) if _holds(pid, inode)), None)


def descendants(roots: set[int]) -> Iterator[tuple[int, int]]:
    """Yields all living descendants of `roots`, and the roots themselves, as (root, process)."""
    parents = {pid: parent for pid in _processes() if (parent := _parent(pid)) is not None}
    for pid in parents:
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in roots:
            ancestor = parents.get(ancestor)
        if ancestor is not None:
            yield ancestor, pid


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended meanwhile
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _holds(pid: int, inode: int) -> bool:
    wanted = f"socket:[{inode}]"
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                if os.readlink(f"/proc/{pid}/fd/{name}") == wanted:
                    return True
            except OSError:  # closed meanwhile
                continue
    except OSError:  # it has ended, or is somebody else's
        return False
    return False


def _endpoint(text: str) -> Endpoint:
    """Parses `0100007F:96A9`: the address in words of the machine's byte order, then the port."""
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    parsed = ipaddress.ip_address(raw)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed), int(port, 16)
