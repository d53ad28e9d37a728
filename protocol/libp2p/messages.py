"""The messages of `proto/relay.proto` on a stream between two peers, and that stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from protocol.frames.codec import parsed, printable
from protocol.generated import relay_pb2
from swarm.vocabulary.errors import ProtocolViolation, Rejected, Unreachable
from swarm.vocabulary.types import PeerId

MAX_MESSAGE_BYTES: Final = 1024
MAX_REASON: Final = 200
CLOSE_PATIENCE_S: Final = 1.0  # Unsent bytes are dropped after so long
_LENGTH_BYTES: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class RelayStream:
    """A byte stream to a peer whose identity libp2p has proved."""

    peer: PeerId
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, message: relay_pb2.RelayMessage) -> None:
        """Sends a message; waits while the other side does not read. Raises Unreachable: the stream broke."""
        data = message.SerializeToString()
        assert len(data) <= MAX_MESSAGE_BYTES
        try:
            self.writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
            await self.writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: asyncio's, of a transport that is closing
            raise Unreachable("the stream broke") from error

    async def hear(self) -> relay_pb2.RelayMessage:
        """The next message. Raises Unreachable at the end, ProtocolViolation for unknown or long ones."""
        try:
            length = int.from_bytes(await self.reader.readexactly(_LENGTH_BYTES), "big")
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolViolation(f"relay: a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
            data = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Unreachable("the stream ended") from error
        message = parsed(relay_pb2.RelayMessage, data, "relay: bytes on the stream are no message")
        if message.WhichOneof("kind") is None:
            raise ProtocolViolation("relay: a message says nothing that is known")
        return message

    async def close(self) -> None:
        """Ends the stream after what is written, if the other side takes it soon. Raises only CancelledError."""
        self.writer.close()
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_PATIENCE_S):
                    await self.writer.wait_closed()
        finally:
            self.cut()

    def cut(self) -> None:
        """Ends the stream at once. Harmless when it has ended."""
        self.writer.transport.abort()


Dial = Callable[[str], Awaitable[RelayStream]]  # A new stream to a relay's multiaddr. Raises Unreachable.


async def ask(stream: RelayStream, message: relay_pb2.RelayMessage, timeout_s: float) -> None:
    """Sends the first message of a stream and waits for success. Raises Rejected, Unreachable, ProtocolViolation."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.say(message)
            answer = await stream.hear()
    except TimeoutError:
        raise Unreachable(f"the relay did not answer within {timeout_s:g} s") from None
    if answer.WhichOneof("kind") != "answer":
        raise ProtocolViolation(f"relay: {answer.WhichOneof('kind')} is no answer")
    if answer.answer.refused:
        raise Rejected(f"the relay refused: {printable(answer.answer.refused[:MAX_REASON])}")


def answer(refused: str = "") -> relay_pb2.RelayMessage:
    return relay_pb2.RelayMessage(answer=relay_pb2.RelayAnswer(refused=refused[:MAX_REASON]))


READ_BYTES: Final = 128 * 1024  # The limit of asyncio's reader

Spend = Callable[[int], str]  # Asked before bytes are carried; returns the objection


def freely(amount: int) -> str:
    return ""


async def splice(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    spend: Spend,
    idle_s: float,
) -> str:
    """Carries bytes both ways until a stream ends, `spend` objects, or nothing moves for `idle_s`. Returns why."""
    # Nothing is read while the other side does not take what was read before. The owners close the streams.
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(idle_s) as limit:

            def moved() -> None:
                limit.reschedule(loop.time() + idle_s)

            async with asyncio.TaskGroup() as tasks:
                ways = (
                    tasks.create_task(_pump(one[0], other[1], spend, moved)),
                    tasks.create_task(_pump(other[0], one[1], spend, moved)),
                )
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                ended = next(way for way in ways if way.done())
                for way in ways:
                    way.cancel()
            return ended.result()
    except TimeoutError:
        return f"nothing has moved for {idle_s:g} s"


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, spend: Spend, moved: Callable[[], None]
) -> str:
    try:
        while chunk := await source.read(READ_BYTES):
            if objection := spend(len(chunk)):
                return objection
            sink.write(chunk)
            await sink.drain()
            moved()
    except (OSError, RuntimeError) as error:  # RuntimeError: asyncio's, of a transport that is closing
        return f"a stream broke: {error}"
    return "one side has ended it"
