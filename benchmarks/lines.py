"""Processes of this machine behind lines of a given rate and delay, packet by packet: any program's TCP, unchanged.

Each node is a network namespace whose packets a process of ours takes from a TUN device, because many kernels have no
`netem`: a packet waits in its sender's line, travels for half of the round trip, and waits in its receiver's line.
Needs root, `ip` and /dev/net/tun. Times are exact to 1 ms.
"""

import fcntl
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from ipaddress import IPv4Address
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from benchmarks.kit import hear, process
from tests.e2e.home_network import ip

MTU: Final = 1500
QUEUE_S: Final = 0.15  # longest wait in a line; a packet that would wait longer is dropped
BURST: Final = 32  # packets taken from a device at a time
NETWORK: Final = IPv4Address("10.88.0.0")
TUNSETIFF: Final = 0x400454CA
IFF_TUN_NO_PI: Final = 0x1001


Line = tuple[float, float]
"""Rate of each node's line in Mbit/s, the same up and down, and round trip between two nodes in ms."""


def line_of(word: str) -> Line | None:
    """The line of a word such as `20x80`; None for `lo`, the loopback device."""
    if word == "lo":
        return None
    rate, rtt_ms = map(float, word.split("x"))
    return rate, rtt_ms


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes by number, each in the namespace of its name. `device` has the address."""

    names: tuple[str, ...]
    device: str

    def address(self, node: int) -> str:
        return str(NETWORK + 1 + node)

    def inside(self, node: int) -> tuple[str, ...]:
        """Words in front of a command that runs in a node."""
        return ("ip", "netns", "exec", self.names[node])

    def sent(self, node: int, process_id: int) -> int:
        """Bytes that the node of a process has sent, with the headers of IP. Without lines: that all have sent."""
        rows = (row.split() for row in Path(f"/proc/{process_id}/net/dev").read_text().replace(":", ": ").splitlines())
        return next((int(row[9]) for row in rows if row[0] == f"{self.device}:"), 0)


@contextmanager
def nodes_behind(line: Line | None, nodes: int) -> Iterator[Nodes]:
    """Makes the nodes; at the end kills the processes in them."""
    name = f"skipstone-{os.getpid()}-"
    names = tuple(f"{name}{node if line else 'lo'}" for node in range(nodes))
    with ExitStack() as stack:
        for one in dict.fromkeys(names):
            ip("netns", "add", one)
            stack.callback(_removed, one)
            ip("-n", one, "link", "set", "dev", "lo", "up")
        made = Nodes(names, "w0" if line else "lo")
        if line is not None:
            hear(stack.enter_context(process(carry, line, made)))
        else:
            for node in range(nodes):
                ip("-n", names[0], "address", "add", f"{made.address(node)}/32", "dev", "lo")
        yield made


def _removed(name: str) -> None:
    while pids := subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    ip("netns", "del", name)


def _plugged_in(nodes: Nodes, node: int) -> int:
    """Makes the device of a node and returns its file."""
    file, name, own = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"w{os.getpid()}-{node}", nodes.names[node]
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN_NO_PI))
    ip("link", "set", "dev", name, "netns", own, "name", nodes.device)
    ip("-n", own, "address", "add", f"{nodes.address(node)}/24", "dev", nodes.device)
    ip("-n", own, "link", "set", "dev", nodes.device, "mtu", str(MTU), "up")
    return file


def carry(connection: Connection, line: Line, nodes: Nodes) -> None:
    """Carries packets until the connection ends."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)  # a late packet would look like a worse line
    files = [_plugged_in(nodes, node) for node in range(len(nodes.names))]
    node_of = {file: node for node, file in enumerate(files)}
    poll = select.epoll()
    for file in (*files, connection.fileno()):
        poll.register(file, select.EPOLLIN)
    connection.send(None)
    byte_s, numbers = 8e-6 / line[0], count()
    up, down = [0.0] * len(files), [0.0] * len(files)  # when each line is free
    under_way = list[tuple[float, int, int, bool, bytes]]()  # when, in order, to whom, whether it has its turn, packet

    def turn(free: list[float], node: int, now: float, size: int) -> float | None:
        """When the packet is through the line; None if it is dropped."""
        begins = max(now, free[node])
        if begins - now > QUEUE_S:
            return None
        free[node] = begins + size * byte_s
        return free[node]

    while True:
        ready = poll.poll(max(0.0, under_way[0][0] - time.monotonic()) if under_way else None)
        for file, _ in ready:
            if file not in node_of:
                return
            for _ in range(BURST):
                try:
                    packet = os.read(file, 2 * MTU)
                except BlockingIOError:
                    break
                to = int.from_bytes(packet[16:20]) - int(NETWORK) - 1
                if packet[0] >> 4 != 4 or not 0 <= to < len(files):
                    continue  # IPv6's own, and multicast
                through = turn(up, node_of[file], time.monotonic(), len(packet))
                if through is not None:
                    heappush(under_way, (through + line[1] / 2000, next(numbers), to, False, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            at, _, to, is_through, packet = heappop(under_way)
            if not is_through:
                through = turn(down, to, at, len(packet))
                if through is not None:
                    heappush(under_way, (through, next(numbers), to, True, packet))
                continue
            with suppress(OSError):  # the device's queue is full, or the node is gone
                os.write(files[to], packet)
