"""What the nodes take of the machine while they run: memory, file descriptors and threads, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that any node's process has had at a time."""

    memory_bytes: int = 0
    descriptors: int = 0
    threads: int = 0


class Resources:
    """Remembers the peaks; `sample` may be called as often as one likes."""

    def __init__(self) -> None:
        self._peaks = Peaks()
        self._sampled_at = 0.0

    def sample(self, processes: Mapping[int, int]) -> None:
        """Looks at the processes (ids by peer), once a second at most."""
        if time.monotonic() - self._sampled_at < SAMPLE_S:
            return
        self._sampled_at = time.monotonic()
        for pid in processes.values():
            try:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:  # it has ended
                continue
            memory = 1024 * int(status.get("VmRSS", "0 kB").split()[0])
            peaks = self._peaks
            self._peaks = Peaks(
                max(peaks.memory_bytes, memory),
                max(peaks.descriptors, descriptors),
                max(peaks.threads, int(status.get("Threads", "0"))),
            )

    def peaks(self) -> Peaks:
        """So far."""
        return self._peaks
