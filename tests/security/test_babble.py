"""Members that talk well-formed nonsense (more with SKIPSTONE_TEST_FRAMES): nothing surprises a node."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor

from protocol.frames.frames import Farewell, Ping, Pong, decode
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Contact
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Unreachable
from swarm.vocabulary.types import AnchorVersion, MicrobatchId, ModuleId, PeerId, PeerState
from tests.protocol.transport.link_peers import BareStream, Persona
from tests.security.siege import BESIEGED, MAY_GROW_BYTES, Siege

WORTHLESS: Final = frozenset({"chunk", "hello", "farewell"})
MOST_TRIES: Final = 50
NUMBERS: Final = (0, 1, 2, 3, 7, 63, 64, 255, 256, 65_535, 2**20 - 1, 2**31 - 1, 2**32 - 1, 2**48 - 1, 2**63)
MEASURES: Final = (0.0, 1.0, 1e-300, 1e300, 3.5, 60.0)
TEXTS: Final = ("", "nonsense", "\x1b]0;owned\x07\x1b[2J\nlevel=ERROR forged line\r", "\u202e\u2066" * 40)

_WHOLE: Final = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
    FieldDescriptor.TYPE_SINT32: 2**31 - 1,
}


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a babbler has picked up about its victim, and mixes into what it says."""

    own: PeerId
    peers: tuple[PeerId, ...]
    anchors: tuple[AnchorVersion, ...]
    microbatches: tuple[MicrobatchId, ...]
    tensor: TensorSpec


class Babbler:
    """Makes up frames. The same seed and knowledge give the same ones."""

    def __init__(self, knowledge: Knowledge, seed: int) -> None:
        self._known = knowledge
        self._random = Random(seed)
        self._transfer = 1

    def frames(self, count: int) -> Iterator[bytes]:
        """So many, of all kinds in turn; none that the victim's `decode` would object to."""
        kinds = sorted(field.name for field in wire.Frame.DESCRIPTOR.fields if field.name not in WORTHLESS)
        for number in range(count):
            yield self._decodable(kinds[number % len(kinds)])

    def _decodable(self, kind: str) -> bytes:
        for _ in range(MOST_TRIES):
            frame = wire.Frame()
            if kind == "announcement":
                frame.announcement = self._random.randbytes(100)
            else:
                message = getattr(frame, kind)
                message.SetInParent()
                self._fill(message)
            data = frame.SerializeToString()
            try:
                decode(data)
            except ProtocolViolation:
                continue
            return data
        return wire.Frame(ping=wire.Ping(token=1)).SerializeToString()

    def _fill(self, message: Any) -> None:
        """Every field, with what fits its type and, often, its name."""
        chooser = self._random
        groups = [[f.name for f in group.fields] for group in message.DESCRIPTOR.oneofs]
        left_out = {name for group in groups for name in group if name != chooser.choice(group)}
        for field in message.DESCRIPTOR.fields:
            if field.name in left_out:
                continue
            if field.message_type is not None and field.message_type.name == "TensorHeader":
                self._fill_header(getattr(message, field.name), message.DESCRIPTOR.name)
            elif field.message_type is not None and field.message_type.name == "AnchorVersion":
                self._fill_anchor(getattr(message, field.name))
            elif field.message_type is not None and field.message_type.name == "MicrobatchId":
                self._fill_microbatch(getattr(message, field.name))
            elif field.is_repeated:
                self._fill_repeated(getattr(message, field.name), field)
            elif field.message_type is not None:
                getattr(message, field.name).SetInParent()
                self._fill(getattr(message, field.name))
            else:
                setattr(message, field.name, self._value(field))

    def _fill_repeated(self, values: Any, field: FieldDescriptor) -> None:
        for _ in range(self._random.choice((0, 1, 1, 2, 3))):
            if field.message_type is not None:
                self._fill(values.add())
                continue
            value = self._value(field)
            if value not in values:
                values.append(value)

    def _value(self, field: FieldDescriptor) -> Any:
        chooser = self._random
        match field.type:
            case FieldDescriptor.TYPE_STRING if field.name in ("detail", "codec_reason", "refused"):
                return chooser.choice(TEXTS)
            case FieldDescriptor.TYPE_STRING:
                return chooser.choice((*self._known.peers, self._known.own))
            case FieldDescriptor.TYPE_BYTES:
                return chooser.choice(self._known.anchors).digest if chooser.random() < 0.7 else chooser.randbytes(8)
            case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
                return chooser.choice(MEASURES)
            case FieldDescriptor.TYPE_BOOL:
                return chooser.random() < 0.5
            case FieldDescriptor.TYPE_ENUM:
                return chooser.choice([value.number for value in field.enum_type.values])
            case kind if kind in _WHOLE:
                small = self._number_named(field.name)
                return min(_WHOLE[kind], chooser.choice(NUMBERS) if small is None or chooser.random() < 0.3 else small)
            case kind:
                raise AssertionError(f"no values for a field of type {kind}")

    def _number_named(self, name: str) -> int | None:
        near = {anchor.round + 1 for anchor in self._known.anchors} | {anchor.round for anchor in self._known.anchors}
        match name:
            case "number":
                return self._random.choice(sorted(near))
            case "stage" | "stages":
                return self._random.choice((0, 1, 1, 1, 2, 3))
            case "expert" | "attempt" | "fragment":
                return self._random.choice((0, 0, 0, 0, 1))
            case "position" | "first_chunk" | "end_chunk" | "chunk" | "chunks" | "route":
                return self._random.choice((0, 1, 2))
            case _:
                return None

    def _fill_header(self, header: Any, of: str) -> None:
        """A tensor that agrees with itself; mostly one that the run knows."""
        shape = self._known.tensor.shape if of in ("Forward", "Backward") else (self._random.choice((1, 64, 4096)),)
        spec = TensorSpec(shape, self._known.tensor.dtype)
        self._transfer += 2
        header.transfer, header.dtype, header.codec = self._transfer, spec.dtype.value, spec.codec.value
        header.shape[:] = shape
        header.byte_length, header.chunk_count = spec.byte_length, 1

    def _fill_anchor(self, version: Any) -> None:
        known = self._random.choice(self._known.anchors)
        version.round, version.steps, version.tokens = known.round, known.steps, known.tokens
        version.fragment, version.digest = known.fragment, known.digest
        if self._random.random() < 0.5:
            field = self._random.choice(("round", "steps", "tokens", "fragment"))
            setattr(version, field, self._random.choice(NUMBERS[:12]))
            version.digest = self._random.randbytes(32)

    def _fill_microbatch(self, microbatch: Any) -> None:
        known = self._random.choice(self._known.microbatches)
        microbatch.data_node, microbatch.number = known.data_node, known.number


pytestmark = BESIEGED

FRAMES, SEED = (int(os.environ.get(f"SKIPSTONE_TEST_{name}", usual)) for name, usual in (("FRAMES", 700), ("SEED", 1)))
AT_ONCE = 7
PARTS = {
    "a visitor to a data node": (ModuleId(0), None, PeerState.VISITING),
    "a visitor to a hop": (ModuleId(1), None, PeerState.VISITING),
    "a data node to a data node": (ModuleId(0), ModuleId(0), PeerState.SERVING),
    "a replica to a replica": (ModuleId(1), ModuleId(1), PeerState.DRAINING),
    "a replica to a lone one": (ModuleId(2), ModuleId(2), PeerState.DRAINING),
}


@pytest.mark.parametrize("part", PARTS)
async def test_nothing_that_decodes_surprises_a_node(scene: Siege, part: str) -> None:
    victim = scene.targets.contact(PARTS[part][0])
    before = scene.peak_bytes(victim)
    links = await babble(scene, part, FRAMES, SEED)
    assert 1 < links < FRAMES // AT_ONCE, "some of it was a violation, and most was not"
    assert scene.peak_bytes(victim) - before < MAY_GROW_BYTES


async def babble(scene: Siege, part: str, count: int, seed: int) -> int:
    """Says so many frames, dialling again whenever the link is ended. How many links that took."""
    module, claimed, state = PARTS[part]
    targets, persona = scene.targets, scene.targets.persona()
    frames, links = Babbler(knowledge(scene, persona), seed).frames(count), 0
    left = count
    while left > 0:
        links += 1
        record = targets.record(persona, claimed, state=state, tokens_per_second=0.0)
        with suppress(PeerError, AssertionError):
            async with targets.attack(targets.contact(module), persona=persona, record=record) as (_, stream):
                while left > 0:
                    left -= AT_ONCE
                    await say(stream, list(islice(frames, AT_ONCE)))
    return links


async def say(stream: BareStream, frames: list[bytes]) -> None:
    """Says them, and returns when all have been heard. Raises PeerError when the victim has ended the link."""
    for frame in frames:
        await stream.say(frame)
    token = 2**40
    await stream.say(Ping(token))
    while (heard := await stream.hear()) != Pong(token):
        if heard is None or isinstance(heard, Farewell):
            raise Unreachable("it has had enough")


def knowledge(scene: Siege, persona: Persona) -> Knowledge:
    """Of microbatches, those that are likely to be under way."""
    targets, step = scene.targets, scene.swarm.progress.step
    others: tuple[Contact, ...] = targets.everybody
    data_node = targets.data_node.peer
    near = range(4 * step, 4 * step + 40, 3)
    under_way = [MicrobatchId(data_node, scene.first_number() + n) for n in near]
    own = [MicrobatchId(persona.peer, number) for number in range(3)]
    anchors = tuple(announced.anchor for announced in targets.announced.values() if announced.anchor is not None)
    return Knowledge(persona.peer, tuple(c.peer for c in others), anchors, (*under_way, *own), targets.tensor)
