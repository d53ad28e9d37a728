"""Two networks of this machine with a cable between them that can be cut."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from node.local_swarm.setup import Place, node_command

Side = Literal["a", "b"]
_NETWORK = "10.91.0"
_counter = itertools.count()


def why_no_namespaces() -> str | None:
    """Why this machine cannot do it; None when it can."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if shutil.which("ip") is None:
        return "the `ip` command (iproute2) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"skipstone-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "name", "bridge0", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no network namespace or bridge can be made: {error.stderr.strip()}"
    finally:
        subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
    return None


@dataclass(frozen=True, slots=True)
class SplitNetwork:
    """`sides` says where each node is, by index; both bridges and the cable between them are in the namespace `hub`."""

    hub: str
    sides: str

    def place(self, index: int) -> Place:
        """For `node.local_swarm.local_swarm.LocalSwarm`."""
        return Place(host=_address(index), command=("ip", "netns", "exec", self._name(index), *node_command()))

    def side(self, side: Side) -> list[int]:
        """The nodes that are there."""
        return [index for index, where in enumerate(self.sides) if where == side]

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        ip("-n", self.hub, "link", "set", "dev", "cable-a", "down")

    def heal(self) -> None:
        ip("-n", self.hub, "link", "set", "dev", "cable-a", "up")

    def make(self) -> None:
        """Raises subprocess.CalledProcessError."""
        ip("netns", "add", self.hub)
        self._in_hub("link", "add", "name", "cable-a", "type", "veth", "peer", "name", "cable-b")
        for side in ("a", "b"):
            self._in_hub("link", "add", "name", f"bridge-{side}", "type", "bridge")
            self._in_hub("link", "set", "dev", f"bridge-{side}", "up")
            self._plug_in(f"cable-{side}", f"bridge-{side}")
        for index, side in enumerate(self.sides):
            name = self._name(index)
            ip("netns", "add", name)
            self._in_hub("link", "add", "name", f"port{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
            self._plug_in(f"port{index}", f"bridge-{side}")
            ip("-n", name, "address", "add", f"{_address(index)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", "dev", device, "up")

    def remove(self) -> None:
        """Whatever of it is there. Devices go with their namespaces."""
        for name in (*map(self._name, range(len(self.sides))), self.hub):
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)

    def _name(self, index: int) -> str:
        return f"{self.hub}-{index}"

    def _in_hub(self, *words: str) -> None:
        ip("-n", self.hub, *words)

    def _plug_in(self, device: str, bridge: str) -> None:
        self._in_hub("link", "set", "dev", device, "master", bridge)
        self._in_hub("link", "set", "dev", device, "up")


@contextmanager
def split_network(sides: str) -> Iterator[SplitNetwork]:
    """Made, and removed at the end. `sides` is `a` or `b` for each node in order, such as "aabb"."""
    network = SplitNetwork(f"skipstone-{os.getpid()}-{next(_counter)}", sides)
    try:
        network.make()
        yield network
    finally:
        network.remove()


def _address(index: int) -> str:
    return f"{_NETWORK}.{index + 1}"


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)
