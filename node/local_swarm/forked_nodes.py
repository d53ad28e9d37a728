"""Nodes that a fork server starts (`node.local_swarm.fork_server`, which says what is sent), as child processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

from node.local_swarm.fork_server import NUMBER_BYTES
from swarm.vocabulary.errors import ResourceExhausted

REAP_S: Final = 5.0
"""For the server to tell how a node that has been killed ended."""


def may_fork(command: Sequence[str]) -> bool:
    """Whether a fork is as good as this command: it starts a node of this program, and the system has what the server
    needs, and lets processes of one thread be forked safely."""
    return sys.platform == "linux" and tuple(command) == (sys.executable, "-P", "-m", "node")


class ForkServer:
    """A running fork server. `close` must be called; nodes outlive it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Starts the server, which all its nodes have the environment of.

        Raises:
            ResourceExhausted: the operating system could not start a process.
        """
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        command = (sys.executable, "-P", "-m", "node.local_swarm.fork_server", str(theirs.fileno()))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is our own, and no shell reads it
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # NumPy's library would start threads when it is imported, and a fork copies only one.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        except OSError as error:
            self._requests.close()
            raise ResourceExhausted(f"cannot start {command[0]}: {error.strerror or error}") from error
        finally:
            theirs.close()

    async def start(self, arguments: Sequence[str]) -> ForkedProcess | None:
        """Starts a node with such arguments, as `python -m node` would.

        Returns:
            None when the server has ended, or cannot fork.
        """
        (input_end, to_input), (from_output, output_end), (from_errors, errors_end) = (os.pipe() for _ in range(3))
        life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life.setblocking(False)
        streams = os.fdopen(to_input, "wb"), os.fdopen(from_output, "rb"), os.fdopen(from_errors, "rb")
        pid = 0
        try:
            self._hand_over(arguments, (input_end, output_end, errors_end, their_life.detach()))
            pid = int.from_bytes(await asyncio.get_running_loop().sock_recv(life, NUMBER_BYTES), signed=True)
        except OSError:
            pass
        finally:
            if not pid:  # or this was cancelled: a node that starts all the same finds its input closed, and stops
                for end in (life, *streams):
                    end.close()
        return ForkedProcess(pid, life, *streams) if pid else None

    def _hand_over(self, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
        """Asks for a node. The descriptors are the server's then."""
        try:
            socket.send_fds(self._requests, [json.dumps(list(arguments)).encode()], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Ends the server. Nodes that still run are nobody's children then."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A node that was forked (`node.local_swarm.child_process.StartedProcess`)."""

    def __init__(self, pid: int, life: socket.socket, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._life = life

    def when_ended(self, then: Callable[[], None]) -> None:
        """Calls `then` once the node, or the server, has ended. Until `reap` it keeps its process id."""
        loop = asyncio.get_running_loop()

        def told() -> None:
            loop.remove_reader(self._life)
            then()

        loop.add_reader(self._life, told)

    def reap(self) -> int:
        """Waits for the end of a node that has been killed. Returns its exit code, or minus the signal."""
        asyncio.get_running_loop().remove_reader(self._life)
        self._life.settimeout(REAP_S)
        try:
            told = self._life.recv(NUMBER_BYTES)
        except OSError:
            told = b""
        finally:
            self._life.close()
        return int.from_bytes(told, signed=True) if told else -signal.SIGKILL
