"""The record of a data node's microbatches."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LAUNCHED, HOME, LOST = "launched", "home", "lost"


@dataclass(frozen=True, slots=True)
class FlightMark:
    """What became of one microbatch."""

    at: float
    kind: str
    peers: tuple[str, ...]
    measured: int


class FlightWriter:
    """Appends marks to a file; each is there as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, kind: str, peers: tuple[str, ...], measured: int) -> None:
        mark = FlightMark(time.monotonic(), kind, peers, measured)
        self._file.write(json.dumps(asdict(mark), separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Nothing is written after this."""
        self._file.close()


def read_flights(path: Path) -> list[FlightMark]:
    """The marks that are there by now: none before the first, and not the one that is just being written."""
    tables = map(json.loads, whole_lines(path))
    return [FlightMark(table["at"], table["kind"], tuple(table["peers"]), table["measured"]) for table in tables]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that another process writes: none before it has begun, and not the one that is half there."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
