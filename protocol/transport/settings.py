"""Settings of a transport. The defaults are for links from 10 Mbit/s at home to data centres."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protocol.frames.frames import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from swarm.vocabulary.errors import ConfigError

MAX_OPEN_TRANSFERS: Final = 64  # Per sender, including refused ones
MAX_OPEN_QUESTIONS: Final = 8  # Per peer, as in link.proto


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Settings of a transport. Raises ConfigError for impossible values."""

    listen_host: str = "127.0.0.1"  # `0.0.0.0` or `[::]` for all interfaces
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
        _require("chunk_bytes", self.chunk_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
        _require("bulk_chunk_bytes", self.bulk_chunk_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
        _require("listen_port", self.listen_port, 0, 65535)
        _require("send_budget_bytes", self.send_budget_bytes, 1, 2**40)
        _require("max_open_transfers", self.max_open_transfers, 1, MAX_OPEN_TRANSFERS // 2)
        _require("max_bulk_transfers", self.max_bulk_transfers, 1, MAX_OPEN_TRANSFERS // 2)
        _require("max_links", self.max_links, 1, 65536)
        _require("ping_period_s", self.ping_period_s, 0.01, 3600)
        _require("stall_after_s", self.stall_after_s, 2 * self.ping_period_s, 3600)
        _require("slowest_bytes_per_s", self.slowest_bytes_per_s, 1, 2**40)
        _require("dial_timeout_s", self.dial_timeout_s, 0.01, 600)
        _require("hello_timeout_s", self.hello_timeout_s, 0.01, 600)
        _require("proof_of_life_s", self.proof_of_life_s, 0.01, 600)
        _require("first_retry_s", self.first_retry_s, 0.001, 60)
        _require("longest_retry_s", self.longest_retry_s, self.first_retry_s, 600)
        _require("farewell_grace_s", self.farewell_grace_s, 0, 1)


def _require(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"transport: {name} is {value}; {least} to {most} are allowed")
