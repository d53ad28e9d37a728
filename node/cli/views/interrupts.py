"""Signals and the end of standard input: the first asks the process to stop, the second ends it."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from node.cli.views.output import tell

STOP_LIMIT_S = 20.0  # Limit of a clean stop, in seconds
STOPPING = "stopping cleanly; once more to stop at once"


class Interrupts:
    """Signal handlers: the first signal calls `ask` and prints `line`, the second signal calls `at_once`."""

    # Uses Python's signal handlers, not asyncio's: they run even if the event loop hangs.

    def __init__(self, ask: Callable[[], object], at_once: Callable[[int], None], line: str = STOPPING) -> None:
        self._ask, self._at_once, self._line = ask, at_once, line
        self._previous: dict[int, Any] = {}
        self._first: int | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self._first is None else 128 + self._first

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP; keep that
                self._previous[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = number
            self._ask()
            tell(self._line)  # last: a full pipe must not keep the process from stopping
        else:
            self._at_once(number)


def leave_at_once(number: int) -> None:
    """Ends this process without clean-up, together with its process group if it leads one."""
    if os.getpgrp() == os.getpid():
        # This process is in the group too; it still has to exit with its own code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    os._exit(128 + number)


def end_by(seconds: float) -> None:
    """Ends this process without clean-up after `seconds`, even if its event loop hangs."""

    def end() -> None:
        time.sleep(seconds)
        leave_at_once(signal.SIGKILL)

    threading.Thread(target=end, name="end-by", daemon=True).start()


def stop_on_end_of_input(ask: Callable[[], None]) -> None:
    """Calls `ask` when standard input ends, then ends the process if it has not stopped in time."""
    loop = asyncio.get_running_loop()  # a thread works with any kind of standard input, and even if the loop hangs

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(ask)
        end_by(STOP_LIMIT_S + 5)

    threading.Thread(target=watch, name="end-of-input", daemon=True).start()
