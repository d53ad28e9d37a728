"""The node's interface to tunnels: ways to peers that nobody can dial, and attachment to relays. The bytes flow
elsewhere (`protocol.nat`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.dht.directory import DhtDirectory
from protocol.generated import dht_process_pb2
from protocol.interfaces.directory import Contact
from protocol.nat.relay_limits import RelayFigures, read_figures
from swarm.vocabulary.errors import PeerError, Unreachable
from swarm.vocabulary.types import PeerId, short

log = logging.getLogger(__name__)

MAX_ATTACHED: Final = 2
"""Relays that a peer stays attached to: a second one for when the first goes."""
OPEN_S: Final = 16.0
"""For one relay: to be dialled, and to have the far end accept."""


@dataclass(frozen=True, slots=True)
class RelayAttachment:
    """The state of the attachment to one relay."""

    relay: str
    standing: bool
    reason: str
    """Why not."""


class RelayTunnels:
    """Opens and takes tunnels through relays. `relay_of` says at which multiaddr a peer serves tunnels; empty when it
    does not. `shuffle` puts relays into an order.
    """

    def __init__(
        self,
        directory: DhtDirectory,
        relay_of: Callable[[PeerId], str],
        shuffle: Callable[[list[str]], None] = random.shuffle,
    ) -> None:
        self._directory = directory
        self._relay_of = relay_of
        self._shuffle = shuffle

    async def way_to(self, contact: Contact) -> str:
        """A local `host:port` that leads to the peer through one of the relays that it is attached to; good for one
        connection, within 10 s.

        Raises:
            Unreachable: it has no relay that we know, or none of them carries a tunnel; why, it says.
        """
        relays = [relay for peer in contact.via if (relay := self._relay_of(peer))]
        if not relays:
            raise Unreachable(f"{short(contact.peer)} has no relay that is known here")
        self._shuffle(relays)
        reasons = []
        for relay in relays[:MAX_ATTACHED]:
            wish = dht_process_pb2.DhtOpenTunnel(relay=relay, target=contact.peer)
            try:
                reply = await self._directory.ask(dht_process_pb2.DhtRequest(open_tunnel=wish), OPEN_S)
            except PeerError as error:
                log.info("no tunnel to %s through %s: %s", short(contact.peer), relay, error)
                reasons.append(f"{relay}: {error}")
            else:
                return f"127.0.0.1:{reply.port}"
        raise Unreachable(f"no tunnel to {short(contact.peer)}: {'; '.join(reasons)}")

    async def attach(self, relays: Sequence[str], local: str) -> None:
        """Attaches to the relays at these multiaddrs, of which the first two count; tunnels through them lead to
        `local` (`host:port`). No relays: none may come any more.

        It goes on in the background while a relay does not answer, and anew whenever the DHT was restarted.

        Raises:
            Unreachable: the DHT is being restarted; it is done then.
        """
        attach = dht_process_pb2.DhtAttach(relays=relays[:MAX_ATTACHED], local=local)
        await self._directory.keep("attachments", dht_process_pb2.DhtRequest(attach=attach))

    def attachments(self) -> list[RelayAttachment]:
        """The states of the attachments that `attach` asked for, as of the DHT's last heartbeat (2 s)."""
        standing = self._directory.situation.attachments
        return [RelayAttachment(each.relay, each.standing, each.reason) for each in standing]

    def carried(self) -> RelayFigures:
        """The traffic carried for others since the node started, as of the last heartbeat."""
        return read_figures(self._directory.situation.relay)
