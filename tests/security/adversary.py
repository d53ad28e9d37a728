"""A peer that belongs to the run and means no good."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import grpc

from protocol.dht.directory import DhtDirectory, DirectorySettings
from protocol.frames.frames import MAX_CHUNK_BYTES, Hello, TensorFrame
from protocol.identity.certificates import pem_of
from protocol.identity.invitations import Guests
from protocol.identity.keys import Identity
from protocol.identity.signatures import Routes
from protocol.identity.signed_records import encode_record
from protocol.interfaces.clock import SystemClock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Contact
from protocol.manifest.join_link import JoinLink
from protocol.transport.grpc_streams import DialledStream
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.pipeline_messages import Forward, Purpose, TensorMessage
from swarm.vocabulary.types import (
    PROTOCOL_VERSIONS,
    AnchorVersion,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    PeerId,
    PeerState,
)
from tests.protocol.transport.link_peers import SETTINGS, BareStream, Node, Persona, Recorder, hello_of, node

LONGEST_LIFETIME_S = 3600.0
RECORD_LIFETIME_S = 100.0
HARD_OF_HEARING = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))
NOWHERE = "127.0.0.1:9"


@dataclass(frozen=True, slots=True)
class Targets:
    link: JoinLink
    announced: dict[ModuleId, Announcement]
    tensor: TensorSpec

    def contact(self, module: ModuleId) -> Contact:
        known = self.announced[module]
        return Contact(known.peer, known.addresses, known.certificate)

    def persona(self) -> Persona:
        persona = Persona(run=self.link.run)
        persona.book.contacts = {self.announced[module].peer: self.contact(module) for module in self.announced}
        return persona

    @property
    def victim(self) -> Contact:
        return self.contact(ModuleId(1))

    @property
    def data_node(self) -> Contact:
        return self.contact(ModuleId(0))

    @property
    def everybody(self) -> tuple[Contact, ...]:
        return tuple(self.contact(module) for module in self.announced)

    def anchor(self, module: ModuleId) -> AnchorVersion:
        anchor = self.announced[module].anchor
        assert anchor is not None
        return anchor

    def forward(self, persona: Persona, number: int = 0, module: ModuleId | None = None) -> Forward:
        """Hidden states for the victim, as a data node would send them, which the persona is."""
        last = Hop(ModuleId(2), self.contact(ModuleId(2)).peer)
        path = Path(persona.peer, (Hop(module or ModuleId(1), self.victim.peer), last))
        return self.signed(persona.identity, path, 0, number)

    def signed(self, data_node: Identity, path: Path, position: int, number: int) -> Forward:
        """One that is on its way along a path that its data node, which anybody can invent, has signed."""
        microbatch = MicrobatchId(data_node.peer, number)
        routes = Routes(data_node, self.link.run, Guests(self.link.run, data_node.peer))
        path = routes.signed(microbatch, path, Purpose.TRAIN, LONGEST_LIFETIME_S)
        return Forward(microbatch, path, position, Purpose.TRAIN, LONGEST_LIFETIME_S)

    def as_data_node(self, persona: Persona) -> bytes:
        """What the persona says of itself so that its own microbatches are taken."""
        return self.record(persona, ModuleId(0), state=PeerState.JOINING)

    def record(self, persona: Persona, module: ModuleId | None = None, **lies: object) -> bytes:
        return encode_record(self.announcement(persona, module, **lies), persona.identity)

    def announcement(self, persona: Persona, module: ModuleId | None = None, **lies: object) -> Announcement:
        now = time.time()
        honest = Announcement(
            run=self.link.run,
            peer=persona.peer,
            state=PeerState.VISITING if module is None else PeerState.SERVING,
            module=module,
            addresses=(NOWHERE,),
            certificate=persona.credentials.certificate_der,
            versions=PROTOCOL_VERSIONS,
            tokens_per_second=0.0 if module is None else 1e9,
            slots=0 if module is None else 65_536,
            free_slots=0 if module is None else 65_536,
            steps=0,
            anchor=None if module is None else self.anchor(module),
            incarnation=int(now * 1000),
            sequence=int(now * 1000),
            expires_at=now + RECORD_LIFETIME_S,
        )
        return replace(honest, **lies)  # type: ignore[arg-type]

    @asynccontextmanager
    async def attack(
        self,
        on: Contact | None = None,
        *,
        persona: Persona | None = None,
        record: bytes | None = None,
        introduced: bool = True,
        deaf: bool = False,
    ) -> AsyncIterator[tuple[PeerId, BareStream]]:
        """A stream to the victim, or another, on which anything can be said."""
        persona = persona or self.persona()
        record = self.record(persona) if record is None else record
        async with hostile_stream(on or self.victim, persona, record, introduced=introduced, deaf=deaf) as stream:
            yield persona.peer, stream

    @asynccontextmanager
    async def peer(
        self, serving: ModuleId | None = None, handler: Recorder | None = None, **lies: object
    ) -> AsyncIterator[Node]:
        persona = self.persona()
        record = self.record(persona, serving, **lies)
        async with node(persona, handler=handler, settings=SETTINGS, record=record) as intruder:
            yield intruder


@asynccontextmanager
async def hostile_stream(
    to: Contact,
    persona: Persona,
    record: bytes = b"",
    *,
    introduced: bool = True,
    deaf: bool = False,
    compression: grpc.Compression = grpc.Compression.NoCompression,
) -> AsyncIterator[BareStream]:
    stream = BareStream(DialledStream(_channel(to, persona, deaf=deaf, compression=compression)))
    try:
        if introduced:
            await stream.say(replace(hello_of(persona), announcement=record))
            assert isinstance(await stream.hear(), Hello)
        yield stream
    finally:
        await stream.stream.close()


def _channel(to: Contact, persona: Persona, *, deaf: bool, compression: grpc.Compression) -> grpc.aio.Channel:
    secured = grpc.ssl_channel_credentials(
        pem_of(to.certificate), persona.credentials.private_key_pem, persona.credentials.certificate_pem
    )
    options = (("grpc.ssl_target_name_override", to.peer), ("grpc.use_local_subchannel_pool", 1))
    options = (*options, *(HARD_OF_HEARING if deaf else ()), ("grpc.max_send_message_length", -1))
    return grpc.aio.secure_channel(to.addresses[0], secured, options, compression)


async def find_targets(link: JoinLink, tensor: TensorSpec, modules: Sequence[ModuleId]) -> Targets:
    announced = dict[ModuleId, Announcement]()
    async with visitors_directory(link) as directory:
        while announced.keys() != set(modules):
            with suppress(Unreachable):
                for a in await directory.look_up(modules):
                    if a.module is not None and a.state is PeerState.SERVING and a.anchor is not None:
                        announced[a.module] = a
            await asyncio.sleep(0.1)
    return Targets(link, announced, tensor)


def visitors_directory(link: JoinLink, identity: Identity | None = None) -> DhtDirectory:
    settings = DirectorySettings("127.0.0.1", 0, (), link.peers, client=True)
    return DhtDirectory(settings, identity or Identity.generate(), link.run, SystemClock())


def header(message: TensorMessage, tensor: TensorSpec, chunks: int | None = None) -> TensorFrame:
    fewest = -(-tensor.byte_length // MAX_CHUNK_BYTES)
    return TensorFrame(message, tensor, 1, fewest if chunks is None else chunks)
