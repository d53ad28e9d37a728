"""A tunnel through a relaying peer against a direct TCP connection, on this machine: `python benchmarks/tunnel.py`
prints JSON.

Three DHT processes with a p2pd each, plain bytes without gRPC and TLS. Through the tunnel every byte passes seven
processes on as many cores as there are, so this measures processing time and not a network. `opening_s`: from the wish
to the first byte back.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from protocol.dht.directory import DhtDirectory, DirectorySettings, RelayTunnels
from protocol.identity.keys import Identity
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.directory import Contact
from swarm.vocabulary.types import PeerId, RunId

RUN: Final = RunId("0" * 64)
MIB: Final = 2**20
AMOUNT: Final = 64 * MIB
ROUND_TRIPS: Final = 500
REPEATS: Final = 3


async def main() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    local = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, _tunnels(local) as (tunnels, contact):
        results: dict[str, list[dict[str, float]]] = {"direct": [], "tunnel": []}
        for _ in range(REPEATS):
            results["direct"].append(await _measure(time.perf_counter(), local))
            results["tunnel"].append(await _measure(time.perf_counter(), await tunnels.way_to(contact)))
    print(json.dumps({name: _medians(runs) for name, runs in results.items()}, indent=2))


@asynccontextmanager
async def _tunnels(local: str) -> AsyncIterator[tuple[RelayTunnels, Contact]]:
    """What opens tunnels to `local`."""
    relay_id, far_id, near_id = (Identity.generate() for _ in range(3))
    async with _directory(relay_id, (), 2**40) as relay:
        at = relay.multiaddrs()[0]
        async with _directory(far_id, (at,)) as far, _directory(near_id, (at,)) as near:
            await RelayTunnels(far, _nobody).attach([at], local)
            while not relay.situation.relay.attached:  # noqa: ASYNC110  # told by heartbeats of another process
                await asyncio.sleep(0.1)
            yield RelayTunnels(near, lambda _: at), Contact(far_id.peer, (), b"", via=(relay_id.peer,))


def _directory(identity: Identity, initial: tuple[str, ...], relayed: int = 0) -> DhtDirectory:
    settings = DirectorySettings(host="127.0.0.1", initial_peers=initial, relay_bytes_per_hour=relayed)
    return DhtDirectory(settings, identity, RUN, SystemClock())


def _nobody(_: PeerId) -> str:
    return ""


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back each of the first bytes, then takes the rest and says when it is complete."""
    for _ in range(ROUND_TRIPS):
        writer.write(await reader.readexactly(1))
    left = AMOUNT
    while left:
        left -= len(await reader.read(min(left, MIB)))
    writer.write(b"x")
    await writer.drain()
    await reader.read()
    writer.close()


async def _measure(began: float, address: str) -> dict[str, float]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    trips = []
    for number in range(ROUND_TRIPS):
        start = time.perf_counter()
        writer.write(b"x")
        await reader.readexactly(1)
        trips.append(time.perf_counter() - start)
        if number == 0:
            opening_s = time.perf_counter() - began
    start, data = time.perf_counter(), bytes(MIB)
    for _ in range(AMOUNT // MIB):
        writer.write(data)
        await writer.drain()
    await reader.readexactly(1)
    took_s = time.perf_counter() - start
    writer.close()
    return {
        "opening_s": opening_s,
        "round_trip_ms": 1000 * statistics.median(trips),
        "mb_per_s": AMOUNT / took_s / 1e6,
    }


def _medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


if __name__ == "__main__":
    asyncio.run(main())
