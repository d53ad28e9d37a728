"""Who has no part in a module's rounds, or not the one that it plays, changes nothing: the next round is held."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from protocol.frames.frames import Cancel, Farewell
from protocol.frames.tensors import TensorFrame, encode_chunk
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.averaging_messages import (
    Accepting,
    Commit,
    Contribution,
    Declined,
    DeclineReason,
    Dissolved,
    Entry,
    Invitation,
    Prepared,
    Progress,
    Pulse,
    Reduced,
    RoundId,
    RoundPiece,
    SignedRoster,
    StateChunk,
    StateRequest,
)
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import ControlMessage
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, PeerState
from tests.protocol.transport.link_peers import BareStream
from tests.security.siege import BESIEGED, MAY_GROW_BYTES, Siege

pytestmark = BESIEGED

MODULE = ModuleId(1)
PIECE = TensorSpec((64,), DType.FLOAT32)
FAR = 40


def versions(scene: Siege) -> tuple[AnchorVersion, AnchorVersion]:
    """The victim's anchor when it was looked up, and one that nobody has."""
    known = scene.targets.anchor(MODULE)
    return known, AnchorVersion(known.round + FAR, known.steps + 1, 2**47, known.fragment, os.urandom(32))


def lies(scene: Siege, own: PeerId, convener: PeerId) -> Iterator[ControlMessage]:
    """Every word of a round, about rounds of the near future."""
    base, made_up = versions(scene)
    victim = scene.targets.victim.peer
    for number in range(base.round, base.round + FAR):
        attempt = RoundId(MODULE, number + 1, 0, convener)
        entry = Entry(own, attempt, base, 2**40, 2**47, 1e300, (), made_up, bytes(64))
        yield Progress(MODULE, made_up, 2**40, 2**47)
        yield Invitation(attempt, base)
        yield Accepting(attempt)
        yield entry
        yield SignedRoster(attempt, base, (replace(entry, peer=victim), entry), Codec.NONE, "")
        yield Pulse(attempt, (victim,), (victim,))
        yield Prepared(attempt, made_up)
        yield Commit(attempt, made_up, tuple(dict.fromkeys((victim, own, convener))))
        yield Declined(attempt, DeclineReason.PAST, made_up)
        yield Dissolved(attempt, "a lie")


async def test_a_stranger_has_no_word_in_rounds(scene: Siege) -> None:
    """In its own name and in the victim's: who hosts nothing is not heard."""
    before = scene.peak_bytes(scene.targets.victim)
    async with scene.targets.peer() as intruder:
        for convener in (intruder.peer, scene.targets.victim.peer):
            for lie in lies(scene, intruder.peer, convener):
                await intruder.transport.tell(scene.targets.victim.peer, lie)
        committed = await scene.holds_a_round()
    assert intruder.peer not in committed.members
    assert committed.round < versions(scene)[1].round
    assert scene.peak_bytes(scene.targets.victim) - before < MAY_GROW_BYTES


async def test_one_replica_that_lies_about_everything_moves_nobody(scene: Siege) -> None:
    """It claims an anchor from the future with more tokens than anybody has, and is one of three."""
    targets, persona = scene.targets, scene.targets.persona()
    _, made_up = versions(scene)
    record = targets.record(persona, MODULE, anchor=made_up, state=PeerState.DRAINING)
    async with targets.attack(persona=persona, record=record) as (own, stream):
        for lie in lies(scene, own, own):
            await stream.say(lie)
        committed = await scene.holds_a_round()
    assert committed.round < made_up.round
    assert committed.digest != made_up.digest.hex()


def pieces(scene: Siege, own: PeerId) -> Iterator[RoundPiece]:
    """Of the rounds of the near future, in everybody's name who may convene them."""
    base = scene.targets.anchor(MODULE)
    replicas = [peer.peer for peer in scene.swarm.peers if peer.stage == MODULE.stage]
    for number in range(base.round, base.round + 4 * FAR):
        for convener in (*replicas, own):
            yield Contribution(RoundId(MODULE, number + 1, 0, convener), 0, 1, bytes(64))
            yield Reduced(RoundId(MODULE, number + 1, 0, convener), 0, 1)


UNREAD = 32


async def test_pieces_that_nobody_is_due_get_no_buffer(scene: Siege) -> None:
    """Also in the moment before a round's roster is known, when pieces of its members are kept."""
    refused = said = 0

    async def listen(stream: BareStream) -> None:
        nonlocal refused
        with suppress(PeerError):
            while (frame := await stream.hear()) is not None:
                assert not isinstance(frame, Farewell), frame
                refused += isinstance(frame, Cancel)

    async with scene.targets.attack() as (own, stream):
        listening = asyncio.create_task(listen(stream))
        held = asyncio.create_task(scene.holds_a_round())
        transfer = 1
        while not held.done():
            for piece in pieces(scene, own):
                await stream.say(TensorFrame(piece, PIECE, transfer, 1))
                await stream.say(encode_chunk(transfer, 0, memoryview(bytes(PIECE.byte_length))))
                transfer, said = transfer + 2, said + 1
                while said - refused > UNREAD and not held.done():  # a stranger's frames are read slowly
                    await asyncio.sleep(0.01)
                if held.done():
                    break
        async with asyncio.timeout(30):
            while refused < said:
                await asyncio.sleep(0.05)
        listening.cancel()
        committed = await held
    assert own not in committed.members


async def test_state_that_was_not_asked_for_gets_no_buffer(scene: Siege) -> None:
    base, made_up = versions(scene)
    async with scene.targets.attack() as (_, stream):
        for number, version in enumerate((base, made_up)):
            transfer = 2 * number + 1
            await stream.say(TensorFrame(StateChunk(MODULE, version.digest, 0), PIECE, transfer, 1))
            while (frame := await stream.hear()) != Cancel(transfer):
                assert frame is not None


async def test_a_flood_of_requests_for_state_holds_up_nobody(scene: Siege) -> None:
    """Five that ask for all there is, again and again, and read nothing of it."""
    base, _ = versions(scene)
    before = scene.peak_bytes(scene.targets.victim)
    for _ in range(5):
        async with scene.targets.attack(deaf=True) as (_, stream):
            for first in range(0, 2000, 2):
                await stream.say(StateRequest(MODULE, base.digest, (first % 100, first % 100 + 1)))
    await scene.holds_a_round()
    assert scene.peak_bytes(scene.targets.victim) - before < MAY_GROW_BYTES
