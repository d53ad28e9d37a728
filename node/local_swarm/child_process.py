"""One node as a child process that cannot outlive its parent and leaves nothing behind.

The child reads a pipe as its standard input and stops in good order when the pipe closes. The parent closes it to ask
for that; the kernel closes it when the parent dies, however it dies. The child leads a process group of its own, so
that a terminal's Ctrl-C reaches the parent alone, and so that what the child has started can be ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from swarm.vocabulary.errors import ResourceExhausted

MAX_STDERR_LINES = 40
_LINE_LIMIT_BYTES = 64 * 1024
_LAST_OUTPUT_S = 5.0
"""How long output may still come after the child and its group have ended."""


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a child."""

    exit_code: int
    """As a shell counts: 128 + n when signal n ended it."""
    stderr: tuple[str, ...]
    """The last lines it wrote there."""


class ChildProcess:
    """A running child. `follow` must be awaited exactly once, and returns when everything of it is gone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the child.

        Raises:
            ResourceExhausted: the operating system could not start a process.
        """
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is our own, and no shell reads it
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                process_group=0,
            )
        except OSError as error:
            raise ResourceExhausted(f"cannot start {command[0]}: {error.strerror or error}") from error
        self._gone = False

    @property
    def pid(self) -> int:
        """The process id, and that of its process group."""
        return self._process.pid

    def ask_to_stop(self) -> None:
        """Closes the child's standard input. Asking again changes nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def terminate(self) -> None:
        """Sends SIGTERM to the child alone. Nothing happens when it is gone."""
        if not self._gone:
            self._process.terminate()

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the child and everything it has started. Nothing happens when it is gone."""
        if not self._gone:
            _signal_group(self.pid, number)

    async def follow(self, on_line: Callable[[bytes], None]) -> ChildEnd:
        """Hands every line of standard output to `on_line` until the child has ended, then ends what is left of its
        group.

        A line longer than 64 KiB arrives in pieces that are no events. When cancelled, the group is killed first.
        """
        stderr: deque[str] = deque(maxlen=MAX_STDERR_LINES)
        ended = self._watch()
        try:
            async with asyncio.TaskGroup() as tasks:
                readers = (
                    tasks.create_task(_read(self._process.stdout, on_line)),
                    tasks.create_task(_read(self._process.stderr, lambda line: stderr.append(_text(line)))),
                )
                await ended.wait()
                self._end_group()
                _, unfinished = await asyncio.wait(readers, timeout=_LAST_OUTPUT_S)
                for reader in unfinished:
                    reader.cancel()
        finally:
            self._end_group()
            self.ask_to_stop()
        code = self._process.returncode
        return ChildEnd(128 - code if code < 0 else code, tuple(stderr))

    def _end_group(self) -> None:
        """Kills what is left of the group, then reaps the child: until then nobody else can get its process group
        id."""
        if not self._gone:
            _signal_group(self.pid, signal.SIGKILL)
            self._process.wait()
            self._gone = True

    def _watch(self) -> asyncio.Event:
        """An event that is set when the child has ended.

        Not asyncio's own subprocesses: those wait for the pipes to close too, which a grandchild can hold open.
        """
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile; nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait, name=f"wait-{self.pid}", daemon=True).start()
        return ended


def _signal_group(group: int, number: signal.Signals) -> None:
    # PermissionError: macOS says so of a group whose last member is a zombie.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _read(pipe: IO[bytes] | None, on_line: Callable[[bytes], None]) -> None:
    assert pipe is not None
    reader = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        async for line in _lines(reader):
            on_line(line)
    finally:
        transport.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        try:
            line = await reader.readline()
        except ValueError:  # longer than the limit; what was read of it is dropped
            yield b""
            continue
        if not line:
            return
        yield line.rstrip(b"\n")


def _text(line: bytes) -> str:
    return line[:1000].decode(errors="replace").rstrip()
