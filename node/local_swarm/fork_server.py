"""A process that has imported what every node needs, and forks the nodes of a local swarm.

Importing costs a node 1.6 s of CPU time, torch most of it. Forked nodes have it done already and share its memory;
apart from that they are started as `python -P -m node` starts them. A fork copies one thread only, so the server has
just one, computes nothing and opens no connection.

It is run as `python -P -m node.local_swarm.fork_server FD` and serves until the socket FD ends, one request a message
(SOCK_SEQPACKET): the node's arguments as JSON, and with it four descriptors (SCM_RIGHTS): its standard input, output
and error, and its *life*, a socket over which the server tells the process id, and when the node has ended its wait
status. Until whoever asked closes it, an ended node is not reaped, so that nobody else gets its process group id.

It stands alone because it is run as a program.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Final

PRELOADED: Final = ("node.__main__", "node.cli.join", "node.runtime.node")
MAX_REQUEST_BYTES: Final = 64 * 1024
DESCRIPTORS: Final = 4
NUMBER_BYTES: Final = 8


@dataclass(slots=True)
class _Child:
    pid: int
    life: socket.socket | None
    """None once nobody asks after it any more."""
    ended: bool = False


class _Server:
    """The children that were forked, and what is to be told of them."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
        self._selector.register(self._wakes, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Serves requests.

        Returns:
            In a forked node its arguments; in the server None, when nobody asks any more.
        """
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
        """Forks a node. Returns whether this is it."""
        streams, life = descriptors[:3], socket.socket(fileno=descriptors[3])
        pid = os.fork()
        if pid == 0:
            life.close()
            self._become_a_node(streams)
            return True
        with contextlib.suppress(
            OSError
        ):  # the node does the same: whoever is first, it leads a group when it is known
            os.setpgid(pid, pid)
        for descriptor in streams:
            os.close(descriptor)
        child = _Child(pid, life)
        self._children.append(child)
        self._selector.register(life, selectors.EVENT_READ, child)
        self._tell(child, pid)
        return False

    def _become_a_node(self, streams: list[int]) -> None:
        """Leaves the server's process group, signals and descriptors behind."""
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
            if child.ended or os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            child.ended = True
            if child.life is not None:
                self._tell(child, _status(child.pid))
        self._reap()

    def _let_go(self, child: _Child) -> None:
        """Nobody asks after a node any more: it may be reaped."""
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
    def _tell(child: _Child, number: int) -> None:
        assert child.life is not None
        with contextlib.suppress(OSError):  # whoever asked is gone
            child.life.send(number.to_bytes(NUMBER_BYTES, signed=True))


def _status(pid: int) -> int:
    """How an ended child did so, as `subprocess` has it: its exit code, or minus the signal that ended it."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def main() -> None:
    """Imports what nodes need, then serves."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that a node's collections do not write to, and so copy, what it shares
    arguments = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if arguments is None:
        os._exit(0)  # its nodes are not its own to stop, and there is nothing else to clean up
    sys.argv = ["skipstone", *arguments]
    runpy.run_module("node", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
