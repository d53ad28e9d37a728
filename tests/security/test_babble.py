"""Members that talk well-formed nonsense, in every part that there is to play: nothing that decodes surprises a node.

More of it, with other seeds and for longer: `python -m tests.security.test_babble --frames 100000 --seed 7`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from protocol.frames.frames import Farewell, Ping, Pong
from protocol.interfaces.directory import Contact
from swarm.vocabulary.errors import PeerError, Unreachable
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerState
from tests.protocol.transport.link_peers import BareStream, Persona
from tests.security.babble import Babbler, Knowledge
from tests.security.siege import BESIEGED, MAY_GROW_BYTES, Siege, siege

pytestmark = BESIEGED

FRAMES = 700
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
    """Whoever is surprised ends with a traceback; what a microbatch loses shows in the account at the end of the
    siege."""
    victim = scene.targets.contact(PARTS[part][0])
    before = scene.peak_bytes(victim)
    links = await babble(scene, part, FRAMES, seed=1)
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


async def for_longer(count: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with siege(Path(folder)) as scene:
            for part in PARTS:
                await babble(scene, part, count, seed)
                await scene.goes_on()
                scene.is_unhurt()
                print(f"{part}: {count} frames, and nobody minds", flush=True)
            counts = await scene.to_the_end()
            print(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(for_longer(options.frames, options.seed))


if __name__ == "__main__":
    main()
