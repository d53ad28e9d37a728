"""Real directories on loopback, and the processes that belong to them, for tests."""

import dataclasses
import functools
import os
import sys
import time
import uuid
from pathlib import Path

import pytest

from protocol.dht.directory import DhtDirectory, DirectorySettings
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signed_records import encode_record
from protocol.interfaces.clock import SystemClock
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerState, RunId, VersionRange

RUN = RunId("5c" * 32)
OTHER_RUN = RunId("6d" * 32)
MODULE = ModuleId(1)


@functools.cache
def certificate_of(identity: Identity, run: RunId) -> bytes:
    return make_credentials(identity, run).certificate_der


def announced(identity: Identity, *, run: RunId = RUN, **changes: object) -> Announcement:
    now = time.time()
    peer = {"run": run, "peer": identity.peer, "certificate": certificate_of(identity, run)}
    place = {"state": PeerState.SERVING, "module": MODULE, "addresses": ("127.0.0.1:4000",)}
    figures = {"tokens_per_second": 10.0, "slots": 2, "free_slots": 1, "steps": 3, "anchor": None}
    life = {"incarnation": int(now * 1000), "sequence": int(now * 1000), "expires_at": now + 60}
    return Announcement(**{**peer, **place, **figures, **life, "versions": VersionRange(5, 5), **changes})


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def directory(identity: Identity, *joining: DhtDirectory, **changes: object) -> DhtDirectory:
    initial_peers = tuple(multiaddr for other in joining for multiaddr in other.multiaddrs())
    settings = DirectorySettings(host="127.0.0.1", experts=(1, 2, 2, 2), initial_peers=initial_peers)
    return DhtDirectory(dataclasses.replace(settings, **changes), identity, RUN, SystemClock())


async def publish(where: DhtDirectory, announcement: Announcement) -> None:
    """Publishes what the directory's own peer announces."""
    await where.publish(announcement, encode_record(announcement, where._identity))


class Marked:
    """Every process that descends from this test, found by a mark in its environment."""

    NAME = "SKIPSTONE_TEST_MARK"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.value = uuid.uuid4().hex
        monkeypatch.setenv(self.NAME, self.value)

    def processes(self) -> dict[int, str]:
        """Command lines by process id, without this process."""
        mark = f"{self.NAME}={self.value}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended meanwhile
        return found

    def network_daemons(self) -> set[int]:
        return {process for process, command in self.processes().items() if command.split(" ")[0].endswith("/p2pd")}

    def network_daemon_of(self, process: int | None) -> int:
        return next(daemon for daemon in self.network_daemons() if parent_of(daemon) == process)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
