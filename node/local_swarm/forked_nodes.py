"""A server that imports everything once and forks nodes for a local swarm."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from swarm.vocabulary.errors import ResourceExhausted

PRELOADED: Final = ("node.__main__", "node.cli.join", "node.runtime.node")
# Arguments of a node as JSON; then its three streams and the socket that reports its end.
MAX_REQUEST_BYTES: Final = 64 * 1024
DESCRIPTORS: Final = 4
NUMBER_BYTES: Final = 8


@dataclass(slots=True)
class _Child:
    pid: int
    life: socket.socket | None
    ended: bool = False


class _Server:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        # The wake-up pipe turns SIGCHLD into a readable descriptor for the selector.
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, Python writes nothing to the pipe
        self._selector.register(self._wakes, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Forks nodes on request. Returns the arguments in a forked node, None in the server at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._requests:
                    message, descriptors, _, _ = socket.recv_fds(self._requests, MAX_REQUEST_BYTES, DESCRIPTORS)
                    if not message:
                        return None
                    arguments: list[str] = json.loads(message)
                    if self._fork(descriptors):
                        return arguments
                elif key.fileobj == self._wakes:
                    os.read(self._wakes, MAX_REQUEST_BYTES)
                    self._look_for_ended()
                else:
                    self._let_go(key.data)

    def _fork(self, descriptors: list[int]) -> bool:
        """Forks a node with these standard streams. Returns True in the node, False in the server."""
        streams, life = descriptors[:3], socket.socket(fileno=descriptors[3])
        pid = os.fork()
        if pid == 0:
            life.close()
            self._become_a_node(streams)
            return True
        # The node does this too: the group must exist before the client learns its id.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        for descriptor in streams:
            os.close(descriptor)
        child = _Child(pid, life)
        self._children.append(child)
        self._selector.register(life, selectors.EVENT_READ, child)
        self._send(child, pid)
        return False

    def _become_a_node(self, streams: list[int]) -> None:
        """Detaches a forked node from the server: process group, signal handlers and descriptors."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        self._selector.close()
        for each in (self._requests, *(child.life for child in self._children if child.life)):
            each.close()
        for descriptor in (*streams, self._wakes, self._wake):
            os.close(descriptor)

    def _look_for_ended(self) -> None:
        for child in self._children:
            # WNOWAIT keeps the process id taken until the client has let go of it.
            if child.ended or os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            child.ended = True
            if child.life is not None:
                self._send(child, _status(child.pid))
        self._reap()

    def _let_go(self, child: _Child) -> None:
        assert child.life is not None
        self._selector.unregister(child.life)
        child.life.close()
        child.life = None
        self._reap()

    def _reap(self) -> None:
        for child in [each for each in self._children if each.ended and each.life is None]:
            os.waitpid(child.pid, 0)
            self._children.remove(child)

    @staticmethod
    def _send(child: _Child, number: int) -> None:
        assert child.life is not None
        with contextlib.suppress(OSError):  # the client is gone
            child.life.send(number.to_bytes(NUMBER_BYTES, signed=True))


def _status(pid: int) -> int:
    """Returns the exit code of an ended child, or minus its signal."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def main() -> None:
    """Imports the modules that nodes need, then serves."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # garbage collection in a node would copy the shared pages
    arguments = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if arguments is None:
        os._exit(0)  # nodes outlive the server, so there is nothing to clean up
    sys.argv = ["skipstone", *arguments]
    runpy.run_module("node", run_name="__main__", alter_sys=True)


REAP_S: Final = 5.0


def may_fork(command: Sequence[str]) -> bool:
    """Whether a fork can replace `command`: only for the unchanged command of a node, on Linux."""
    return sys.platform == "linux" and tuple(command) == (sys.executable, "-P", "-m", "node")


class ForkServer:
    """Client of a running fork server. `close` must be called; nodes outlive the server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Starts the server. All its nodes inherit `environment`. Raises ResourceExhausted."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        command = (sys.executable, "-P", "-m", "node.local_swarm.forked_nodes", str(theirs.fileno()))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is our own, and no shell reads it
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # OpenBLAS would start threads at import, and a fork copies only one thread.
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
        """Starts a node with these arguments. None if the server has ended or cannot fork."""
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
            if not pid:  # or cancelled: a node that starts anyway finds its input closed and stops
                for end in (life, *streams):
                    end.close()
        return ForkedProcess(pid, life, *streams) if pid else None

    def _hand_over(self, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self._requests, [json.dumps(list(arguments)).encode()], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Ends the server. Its running nodes become orphans."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True, eq=False)
class ForkedProcess:
    """A node forked by the server, with the methods of `node.local_swarm.child_process.SpawnedProcess`."""

    pid: int
    _life: socket.socket
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def when_ended(self, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def received() -> None:
            loop.remove_reader(self._life)
            then()

        loop.add_reader(self._life, received)

    def reap(self) -> int:
        asyncio.get_running_loop().remove_reader(self._life)
        self._life.settimeout(REAP_S)
        try:
            received = self._life.recv(NUMBER_BYTES)
        except OSError:
            received = b""  # the server is gone, so it cannot report the end
        finally:
            self._life.close()
        return int.from_bytes(received, signed=True) if received else -signal.SIGKILL


if __name__ == "__main__":
    main()
