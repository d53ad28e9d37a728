"""Task groups that raise their first error itself, and waiting with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from swarm.vocabulary.errors import SkipstoneError

Wanted = TypeVar("Wanted")


@asynccontextmanager
async def task_scope() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` that raises its first SkipstoneError, else its first error, instead of the group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise _telling(group) from group


async def set_or_after(event: asyncio.Event, seconds: float) -> None:
    """Waits until the event is set, and clears it, or until the time is over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    event.clear()


async def unless(stop: asyncio.Event, wanted: Awaitable[Wanted]) -> Wanted | None:
    """The result of `wanted`, or None when `stop` is set first; then the work on it is cancelled."""

    async def getting() -> Wanted:
        return await wanted

    async with task_scope() as tasks:
        work, stopping = tasks.create_task(getting()), tasks.create_task(stop.wait())
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not work.done():
            work.cancel()
            return None
    return work.result()


def _telling(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, SkipstoneError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
