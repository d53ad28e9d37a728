"""Settings of a transport. The defaults are for links from 10 Mbit/s at home to data centres."""

import hashlib
import socket
from dataclasses import dataclass
from itertools import islice
from typing import Final

from swarm.vocabulary.errors import ConfigError


def joined(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Returns the host of a `host:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


PORTS: Final = range(10_000, 32_000)  # Below the range that Linux, macOS and Windows use for outgoing connections


def is_free(host: str, port: int) -> bool:
    """Whether this machine can listen on the address and port."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier process may linger
            probe.bind((host, port))
    except OSError:
        return False
    return True


def free_ports(host: str, owner: str, count: int) -> list[int]:
    """Returns free ports, consecutive if possible and the same at each start of `owner`. Raises ConfigError."""
    first = PORTS[int.from_bytes(hashlib.sha256(f"skipstone-ports:{owner}".encode()).digest()[:8], "big") % len(PORTS)]
    candidates = (*range(first, PORTS.stop), *range(PORTS.start, first))
    found = list(islice((port for port in candidates if is_free(host, port)), count))
    if len(found) < count:
        raise ConfigError(f"cannot listen on {host}", hint="Name an address of this machine, or free some ports.")
    return found


MAX_OPEN_TRANSFERS: Final = 64  # Per sender, including refused ones
MAX_OPEN_QUESTIONS: Final = 8  # Per peer, as in link.proto


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Settings of a transport. Raises ConfigError if the port is out of range."""

    listen_host: str = "127.0.0.1"  # `0.0.0.0` or `::` for all interfaces
    listen_port: int = 0  # 0: any free port
    chunk_bytes: int = 512 * 1024  # Chunks of microbatches, 4 KiB to 1 MiB; smaller on slow links
    bulk_chunk_bytes: int = 1024 * 1024  # Chunks of rounds and state
    send_budget_bytes: int = 64 * 1024 * 1024  # In flight per traffic class and link. A larger tensor is sent alone.
    max_open_transfers: int = 16  # Microbatch tensors sent in turns on one link, 1 to 32
    max_bulk_transfers: int = 4  # Round and state tensors; few, so that each progresses on a slow link
    max_links: int = 256
    ping_period_s: float = 2.0
    stall_after_s: float = 10.0  # Timeout of a silent peer or of a transfer without progress; at least two ping periods
    # Slowest mean rate of a transfer, after `stall_after_s`, so that no buffer is held forever
    slowest_bytes_per_s: float = 16 * 1024
    dial_timeout_s: float = 5.0  # Connection, TLS and both Hellos, for all addresses together
    hello_timeout_s: float = 3.0
    proof_of_life_s: float = 2.0  # Timeout of the ping that distinguishes a duplicate process from a restarted one
    first_retry_s: float = 0.2  # Pause after a failed dial, doubled each time, with jitter
    longest_retry_s: float = 5.0
    farewell_grace_s: float = 0.5  # Time for a Farewell to arrive before the stream is cut

    def __post_init__(self) -> None:
        if not 0 <= self.listen_port <= 65535:
            raise ConfigError(f"transport: listen_port is {self.listen_port}; 0 to 65535 are allowed")
