"""The tunnels' part of the DHT's child process: relaying, being attached, opening.

Bytes are carried here, beside p2pd, and not in the node: its event loop has better things to do. Tunnels end with this
process; the node has attachments made again by the next one.
"""

from __future__ import annotations

import asyncio
from typing import Final

from protocol.generated import dht_process_pb2
from protocol.libp2p.streams import Libp2pStreams
from protocol.nat.relay_client import Attachment, Incoming
from protocol.nat.relay_limits import RelayLimits, read_figures, write_figures
from protocol.nat.relay_server import RelayService
from protocol.nat.tunnel_opener import OpenTunnels
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import PeerId, RunId

MAX_RELAYS: Final = 4


class ChildTunnels:
    """Relay, attachments and opened tunnels of one process. Made by `start`. What it does runs in the task group that
    it is given, and ends with it.
    """

    def __init__(self, streams: Libp2pStreams, run: RunId, tasks: asyncio.TaskGroup) -> None:
        self._streams = streams
        self._run = run
        self._tasks = tasks
        self._service: RelayService | None = None
        self._opened = OpenTunnels(run, streams.dial, tasks)
        self._incoming = Incoming(("", 0))
        self._attachments: dict[str, tuple[Attachment, asyncio.Task[None]]] = {}

    @classmethod
    async def start(
        cls, streams: Libp2pStreams, start: dht_process_pb2.DhtStart, tasks: asyncio.TaskGroup
    ) -> ChildTunnels:
        """Starts the tunnels' part, as a relay if it is to be one."""
        tunnels = cls(streams, RunId(start.run), tasks)
        if start.relay_bytes_per_hour:
            before = read_figures(start.relay_before) if start.HasField("relay_before") else None
            tunnels._service = RelayService(tunnels._run, RelayLimits(start.relay_bytes_per_hour), before)
            await streams.take(tunnels._service.serve)
        return tunnels

    async def open(self, wish: dht_process_pb2.DhtOpenTunnel) -> int:
        """Opens a tunnel; errors as `OpenTunnels.open`."""
        return await self._opened.open(wish.relay, PeerId(wish.target))

    def attach(self, wish: dht_process_pb2.DhtAttach) -> None:
        """Attaches to these relays and no others; tunnels through the others end.

        Raises:
            ProtocolViolation: too many relays, or `local` is not host:port.
        """
        host, _, port = wish.local.rpartition(":")
        if len(wish.relays) > MAX_RELAYS or (wish.relays and not (host and port.isdecimal())):
            raise ProtocolViolation(f"dht: {len(wish.relays)} relays and {wish.local!r} cannot be attached")
        if wish.relays:
            self._incoming.local = (host.strip("[]"), int(port))
        for relay in self._attachments.keys() - set(wish.relays):
            self._attachments.pop(relay)[1].cancel()
        for relay in dict.fromkeys(wish.relays):
            if relay not in self._attachments:
                attachment = Attachment(relay, self._run, self._streams.dial, self._incoming)
                self._attachments[relay] = (attachment, self._tasks.create_task(attachment.keep()))

    def describe(self, situation: dht_process_pb2.DhtSituation) -> None:
        """Adds the tunnels' figures to the DHT's state."""
        if self._service is not None:
            situation.relay.CopyFrom(write_figures(self._service.figures()))
        for each, _ in self._attachments.values():
            situation.attachments.add(relay=each.relay, standing=each.standing, reason=each.reason)
