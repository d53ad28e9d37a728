"""Blocking work in a daemon thread beside the event loop.

It stands alone because only work that may never end is done so; all other has the compute thread or a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def aside(work: Callable[[], Result], limit_s: float) -> Result:
    """Runs `work` in a daemon thread and returns or raises what it does. The thread is a daemon: unlike an executor's,
    it holds up neither the loop's end nor the process's.

    Raises:
        TimeoutError: it took more than `limit_s` seconds; it goes on in its thread, and what comes of it is dropped.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # None only where that is the result

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="aside", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await outcome
