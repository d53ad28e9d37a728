"""A node as a child process. It stops when its standard input closes, so it cannot outlive its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, cast

from node.local_swarm.forked_nodes import ForkedProcess
from swarm.vocabulary.errors import ResourceExhausted

MAX_STDERR_LINES = 40
_LAST_OUTPUT_S = 5.0  # Limit for output after the child and its group have ended, in seconds


@dataclass(frozen=True, slots=True)
class ChildEnd:
    exit_code: int  # 128 + n if signal n ended it
    stderr: tuple[str, ...]


class SpawnedProcess:
    """A child process started with `subprocess`. It leads its own group, and has pipes for its streams."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
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
        self.pid = self._process.pid
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self.stdin, self.stdout, self.stderr = (cast(IO[bytes], pipe) for pipe in pipes)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Calls `then` on the running loop once the process has ended. The process id stays reserved until `reap`."""
        # asyncio's subprocesses also wait for the pipes, which a grandchild can hold open.
        loop = asyncio.get_running_loop()

        def wait() -> None:
            with contextlib.suppress(ChildProcessError):
                # WNOWAIT leaves the zombie, so that its group id is not reused before `reap`.
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(then)

        threading.Thread(target=wait, name=f"wait-{self.pid}", daemon=True).start()

    def reap(self) -> int:
        """Waits for the end of a killed process. Returns its exit code, or minus the signal."""
        return self._process.wait()


class ChildProcess:
    """A running child. `follow` must be awaited exactly once; it returns when the child and its group are gone."""

    def __init__(self, process: SpawnedProcess | ForkedProcess) -> None:
        self._process, self.pid = process, process.pid
        self._code: int | None = None

    def ask_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def terminate(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def signal_group(self, number: signal.Signals) -> None:
        if self._code is None:
            _signal_group(self.pid, number)

    async def follow(self, on_line: Callable[[bytes], None]) -> ChildEnd:
        """Passes lines of output to `on_line` until the child ends or this task is cancelled; then kills its group."""
        stderr: deque[bytes] = deque(maxlen=MAX_STDERR_LINES)
        ended = asyncio.Event()
        self._process.when_ended(ended.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                readers = (
                    tasks.create_task(_read(self._process.stdout, on_line)),
                    tasks.create_task(_read(self._process.stderr, stderr.append)),
                )
                await ended.wait()
                self._end_group()
                # A grandchild may still hold the pipes open.
                _, unfinished = await asyncio.wait(readers, timeout=_LAST_OUTPUT_S)
                for reader in unfinished:
                    reader.cancel()
        finally:
            self._end_group()
            self.ask_to_stop()
        assert self._code is not None
        last = tuple(line[:1000].decode(errors="replace").rstrip() for line in stderr)
        return ChildEnd(128 - self._code if self._code < 0 else self._code, last)

    def _end_group(self) -> None:
        if self._code is None:  # kill the group before reaping the child: until then its group id cannot be reused
            _signal_group(self.pid, signal.SIGKILL)
            self._code = self._process.reap()


def _signal_group(group: int, number: signal.Signals) -> None:
    # macOS raises PermissionError for a group whose last member is a zombie.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _read(pipe: IO[bytes], on_line: Callable[[bytes], None]) -> None:
    reader = asyncio.StreamReader(limit=64 * 1024)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than the limit: drop it
                on_line(b"")
                continue
            if not line:
                return
            on_line(line.rstrip(b"\n"))
    finally:
        transport.close()
