"""A peer that belongs to the run and means no good: what it can find out, and what it can send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from node.clock import SystemClock
from protocol.chunks import MAX_CHUNK_BYTES
from protocol.directory import DhtDirectory, DirectorySettings
from protocol.frame_parts import TensorFrame
from protocol.identity import Identity
from protocol.join_link import JoinLink
from protocol.seams import Contact
from protocol.tensor_spec import TensorSpec
from swarm.errors import Unreachable
from swarm.messages import Forward, Purpose, TensorMessage
from swarm.vocabulary import Hop, MicrobatchId, ModuleId, Path, PeerId, PeerState
from tests.protocol.link_peers import BareStream, Node, Persona, node, stream_to

LONGEST_LIFETIME_S = 3600.0


@dataclass(frozen=True, slots=True)
class Targets:
    """The run as anybody sees it who has its link."""

    link: JoinLink
    contacts: dict[ModuleId, Contact]
    tensor: TensorSpec

    def persona(self) -> Persona:
        """A new identity with a certificate of the run, that knows everybody."""
        persona = Persona(run=self.link.run)
        persona.book.contacts = {contact.peer: contact for contact in self.contacts.values()}
        return persona

    @property
    def victim(self) -> Contact:
        return self.contacts[ModuleId(1)]

    @property
    def data_node(self) -> Contact:
        return self.contacts[ModuleId(0)]

    def forward(self, own: PeerId, number: int = 0, module: ModuleId | None = None) -> Forward:
        """Hidden states for the victim, as a data node would send them."""
        last = Hop(ModuleId(2), self.contacts[ModuleId(2)].peer)
        path = Path(own, (Hop(module or ModuleId(1), self.victim.peer), last))
        return Forward(MicrobatchId(own, number), path, 0, Purpose.TRAIN, LONGEST_LIFETIME_S)

    @asynccontextmanager
    async def attack(self) -> AsyncIterator[tuple[PeerId, BareStream]]:
        """A stream to the victim on which anything can be said."""
        persona = self.persona()
        async with stream_to(self.victim, persona) as stream:
            yield persona.peer, stream

    @asynccontextmanager
    async def peer(self) -> AsyncIterator[Node]:
        """A peer with a real transport."""
        async with node(self.persona()) as intruder:
            yield intruder


async def find_targets(link: JoinLink, tensor: TensorSpec, modules: tuple[ModuleId, ...]) -> Targets:
    """Asks the directory, as a visitor."""
    identity, contacts = Identity.generate(), dict[ModuleId, Contact]()
    settings = DirectorySettings("127.0.0.1", 0, (), link.peers, client=True)
    async with DhtDirectory(settings, identity, link.run, SystemClock()) as directory:

        async def look() -> bool:
            with suppress(Unreachable):
                for a in await directory.look_up(modules):
                    if a.module is not None and a.state is PeerState.SERVING:
                        contacts[a.module] = Contact(a.peer, a.addresses, a.certificate)
            return contacts.keys() == set(modules)

        while not await look():
            pass
    return Targets(link, contacts, tensor)


def header(message: TensorMessage, tensor: TensorSpec, chunks: int | None = None) -> TensorFrame:
    fewest = -(-tensor.byte_length // MAX_CHUNK_BYTES)
    return TensorFrame(message, tensor, 1, fewest if chunks is None else chunks)
