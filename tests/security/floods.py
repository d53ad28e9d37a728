"""Floods of one message, and what each costs: `python -m tests.security.floods [--seconds 10] [--attackers 1,8]`."""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.frames.frames import AnnouncementFrame, Frame, Ping, QuestionFrame, encode
from protocol.interfaces.transport import Contact, Question, QuestionAbout
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import Recall, Unsettled
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, PeerId
from swarm.vocabulary.types import Path as Route
from tests.protocol.transport.link_peers import BareStream
from tests.security.adversary import Targets
from tests.security.siege import Siege, siege

Flood = Callable[[Targets, PeerId, int], Frame]


def pings(targets: Targets, own: PeerId, number: int) -> Frame:
    return Ping(number)


def questions(targets: Targets, own: PeerId, number: int) -> Frame:
    """More than may be open at once; the manifest is the longest answer."""
    return QuestionFrame(1 + number, Question((QuestionAbout.MANIFEST, QuestionAbout.STATUS)[number % 2]))


def forged_records(targets: Targets, own: PeerId, number: int) -> Frame:
    """Each is another one, whole but for its signature."""
    if targets.link.run not in _RECORDS:
        _RECORDS[targets.link.run] = targets.record(targets.persona())
    record = bytearray(_RECORDS[targets.link.run])
    at = 40 + number % 60  # in the signature
    record[at] ^= 1 + number // 60 % 255
    return AnnouncementFrame(bytes(record))


def unsettled(targets: Targets, own: PeerId, number: int) -> Frame:
    """A question of a hop to a data node: each is answered."""
    return Unsettled(MicrobatchId(targets.data_node.peer, number))


def recalls(targets: Targets, own: PeerId, number: int) -> Frame:
    path = Route(own, (Hop(ModuleId(1), targets.victim.peer), Hop(ModuleId(2), own)))
    return Recall(MicrobatchId(own, number), path, 0)


FLOODS: dict[str, tuple[Flood, ModuleId]] = {
    "pings": (pings, ModuleId(1)),
    "questions": (questions, ModuleId(1)),
    "forged records": (forged_records, ModuleId(0)),
    "unsettled": (unsettled, ModuleId(0)),
    "recalls": (recalls, ModuleId(1)),
}
_RECORDS: dict[str, bytes] = {}
PREPARED = 1000


@dataclass(slots=True)
class Poured:
    said: int = 0
    heard: int = 0
    cut_off: int = 0


@asynccontextmanager
async def flooded(targets: Targets, kind: str, attackers: int, *, deaf: bool = False) -> AsyncIterator[Poured]:
    """The flood goes on as long as the block does. Attackers that are deaf read nothing."""
    make, module = FLOODS[kind]
    poured = Poured()

    async def listen(stream: BareStream) -> None:
        while await stream.stream.read() is not None:
            poured.heard += 1

    async def pour(stream: BareStream, frames: list[bytes]) -> None:
        while True:
            for frame in frames:
                await stream.say(frame)
                poured.said += 1
            await asyncio.sleep(0)

    async def attack(own: PeerId, stream: BareStream) -> None:
        frames = [encode(make(targets, own, number)) for number in range(PREPARED)]
        with suppress(PeerError):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_quietly(pour(stream, frames)))
                if not deaf:
                    tasks.create_task(_quietly(listen(stream)))
        poured.cut_off += 1

    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(targets.attack(targets.contact(module), deaf=deaf))
            for _ in range(attackers)
        ]
        attacking = [asyncio.create_task(attack(own, stream)) for own, stream in streams]
        try:
            yield poured
        finally:
            for task in attacking:
                task.cancel()
            await asyncio.wait(attacking)


async def _quietly(work: object) -> None:
    with suppress(PeerError):
        await work  # type: ignore[misc]


async def rate(scene: Siege, seconds: float) -> float:
    begun, first = time.monotonic(), scene.swarm.progress.step
    await asyncio.sleep(seconds)
    return (scene.swarm.progress.step - first) / (time.monotonic() - begun)


async def measure(seconds: float, attackers: list[int]) -> list[dict[str, object]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        async with siege(Path(folder)) as scene:
            for kind, (_, module) in FLOODS.items():
                for count in attackers:
                    for deaf in (False, True):
                        rows.append(await one(scene, kind, module, count, deaf, seconds))
                        print(json.dumps(rows[-1]), flush=True)
            await scene.to_the_end()
    return rows


async def one(scene: Siege, kind: str, module: ModuleId, count: int, deaf: bool, seconds: float) -> dict[str, object]:
    target: Contact = scene.targets.contact(module)
    before, peak = await rate(scene, seconds), scene.peak_bytes(target)
    async with flooded(scene.targets, kind, count, deaf=deaf) as poured:
        during = await rate(scene, seconds)
        return {
            "flood": kind,
            "attackers": count,
            "deaf": deaf,
            "steps a second before": round(before, 2),
            "during": round(during, 2),
            "frames a second": round(poured.said / seconds),
            "cut off": poured.cut_off,
            "peak MB": round((scene.peak_bytes(target) - peak) / 1e6, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attackers", default="1,8")
    options = parser.parse_args()
    asyncio.run(measure(options.seconds, [int(count) for count in options.attackers.split(",")]))


if __name__ == "__main__":
    main()
