"""A server that imports everything once and forks nodes for a local swarm."""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from swarm.vocabulary.errors import ResourceExhausted

NUMBER_BYTES: Final = 8


def _serve(requests: socket.socket) -> list[str] | None:
    """Forks nodes on request. Returns the arguments in a forked node, None in the server at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps monitors
    while True:
        # Arguments of a node as JSON; its three streams and the socket that reports its end.
        message, descriptors, _, _ = socket.recv_fds(requests, 64 * 1024, 4)
        if not message:
            return None
        arguments: list[str] = json.loads(message)
        # A node's parent must outlive it, to report its end: each node has a monitor.
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_and_monitor(descriptors[:3], socket.socket(fileno=descriptors[3]))
            return arguments
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_and_monitor(streams: list[int], life: socket.socket) -> None:
    """Forks a node with these standard streams, and returns in it. Reports its process id and its end on `life`."""
    pid = os.fork()
    with contextlib.suppress(OSError):  # both do it: the group must exist before the client learns its id
        os.setpgid(pid, pid)
    if pid == 0:
        life.close()
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
    for descriptor in streams:
        os.close(descriptor)
    if pid == 0:
        return
    with contextlib.suppress(OSError):  # the client is gone
        life.send(pid.to_bytes(NUMBER_BYTES, signed=True))
    # WNOWAIT keeps the process id taken until the client has let go of it.
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    with contextlib.suppress(OSError):
        life.send(status.to_bytes(NUMBER_BYTES, signed=True))
        life.recv(1)
    os._exit(0)


def main() -> None:
    """Imports the modules that nodes need, then serves."""
    for module in ("node.__main__", "node.cli.join", "node.runtime.node"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # garbage collection in a node would copy the shared pages
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is None:
        os._exit(0)  # nodes outlive the server, so there is nothing to clean up
    sys.argv = ["skipstone", *arguments]
    runpy.run_module("node", run_name="__main__", alter_sys=True)


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

    async def start(self, arguments: Sequence[str]) -> "ForkedProcess | None":
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
        """Ends the server. Its nodes run on, and their ends are reported."""
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
        self._life.settimeout(5.0)
        try:
            received = self._life.recv(NUMBER_BYTES)
        except OSError:
            received = b""  # the monitor was killed, so it cannot report the end
        finally:
            self._life.close()
        return int.from_bytes(received, signed=True) if received else -signal.SIGKILL


if __name__ == "__main__":
    main()
