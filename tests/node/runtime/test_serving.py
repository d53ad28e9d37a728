"""What a node does last in its module."""

from __future__ import annotations

import asyncio

import pytest

from node.concurrency.task_groups import unless
from node.runtime.serving import hand_over


async def test_what_is_to_be_handed_over_is_waited_for() -> None:
    done: list[int] = []

    async def finish() -> None:
        await asyncio.sleep(0)
        done.append(1)

    await hand_over(finish, 60.0)
    assert done == [1]


async def test_what_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await hand_over(endless, 0.01)
    assert cancelled.is_set()
    assert "gave up" in caplog.text


async def test_what_is_wanted_comes_unless_the_stop_comes_first() -> None:
    async def five() -> int:
        return 5

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    stop = asyncio.Event()
    assert await unless(stop, five()) == 5
    stop.set()
    assert await unless(stop, never()) is None
