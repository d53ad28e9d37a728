"""The event logs in a folder, as `lab.audit.audit` reads them: process after process, line after line.

It stands alone because the audit itself does no IO.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lab.audit.audit import Report, check_logs
from lab.audit.findings import Spot
from node.observability.event_json import MAX_LINE_BYTES
from swarm.vocabulary.errors import ConfigError

_NAME = re.compile(r"(?P<life>.+-(?P<began>\d+))(?:\.(?P<part>\d+))?\.jsonl")


def check_folder(folder: Path) -> Report:
    """Judges the logs in a folder. Raises ConfigError when they cannot be read."""
    return check_logs([lines_of(parts) for parts in lives_in(folder)])


def lives_in(folder: Path) -> list[list[Path]]:
    """The files of each process, its parts in order; processes in the order of their start.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", hint="Name the folder that the nodes were given as --log-dir.")
    found: dict[tuple[int, str], list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found.setdefault((int(name["began"]), name["life"]), []).append((int(name["part"] or 1), path))
    return [[path for _, path in sorted(parts)] for _, parts in sorted(found.items())]


def lines_of(parts: list[Path]) -> Iterator[tuple[Spot, bytes]]:
    """The lines of a process's files, with no more than one in memory. A line that is too long comes in pieces, which
    are no events.
    """
    for path in parts:
        try:
            with path.open("rb") as file:
                number = 0
                while line := file.readline(MAX_LINE_BYTES):
                    number += 1
                    yield Spot(path.name, number), line
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
