"""Splicing of two streams: bytes carried both ways, as fast as the slower one takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

READ_BYTES: Final = 128 * 1024
"""What asyncio's reader holds at most with its ordinary limit."""

Spend = Callable[[int], str]
"""Asked before so many bytes are carried: why they are not, or an empty text."""


def freely(amount: int) -> str:
    return ""


async def splice(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    spend: Spend,
    idle_s: float,
) -> str:
    """Carries bytes until one of the streams ends, `spend` objects, or nothing has moved for `idle_s` seconds.

    Back-pressure: nothing is read while the other side does not take what was read before. A stream that one side has
    ended is over for both (p2pd knows no half-closed streams). The streams are left open, for their owners to close.

    Returns: why it ended.
    """
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
