"""The examination: all checks, one after the other, local ones first."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from node.doctor.finding import Finding, Level, bounded
from node.doctor.machine import (
    look_at_device,
    look_at_disk,
    look_at_files,
    look_at_memory,
    look_at_port,
    look_at_room,
    look_at_versions,
    what_fits_of,
)
from node.doctor.network_checks import Doorway, Tell, look_in_the_run
from node.model.moments import MomentType
from protocol.manifest.join_link import JoinLink
from swarm.vocabulary.types import Reasoned

QUICK_S: Final = 10.0
DEVICE_S: Final = 60.0
"""Loading torch and waking a GPU take a while."""


@dataclass(frozen=True, slots=True)
class Patient:
    """This machine, as the node that it would run."""

    device: str
    doorway: Doorway
    dht_port: int
    folders: tuple[tuple[str, Path], ...]
    """Folders that the node would write to, by purpose."""
    link: JoinLink | None
    memory_limit: Reasoned[int] | None = None
    """Bytes of device memory that the node may take; None: all that are free."""
    moments: MomentType = MomentType.FLOAT32


async def examine(patient: Patient, tell: Tell) -> None:
    """Runs every check within its time limit and tells its findings as they come."""
    doorway = patient.doorway
    local: tuple[tuple[str, Callable[[], Sequence[Finding]], float], ...] = (
        ("versions", look_at_versions, QUICK_S),
        ("device", lambda: look_at_device(patient.device), DEVICE_S),
        ("memory", look_at_memory, QUICK_S),
        ("stage", lambda: look_at_room(patient.device, patient.memory_limit, patient.moments), DEVICE_S),
        ("disk", lambda: look_at_disk((*patient.folders, ("temporary files", Path(tempfile.gettempdir())))), QUICK_S),
        ("files", look_at_files, QUICK_S),
    )
    for check, look, limit_s in local:
        tell(await bounded(check, look, limit_s))
    ports = [doorway.port] if patient.dht_port == 0 else [doorway.port, patient.dht_port]
    free = True
    for port in ports:
        found = await bounded("port", lambda port=port: look_at_port(doorway.listen, port), QUICK_S)  # type: ignore[misc]
        free = free and all(finding.level is Level.OK for finding in found)
        tell(found)
    if patient.link is None:
        tell([Finding("clock", Level.SKIP, "compared with peers of a run: `skipstone doctor LINK`")])
        tell([Finding("reach", Level.SKIP, "found out by peers of a run: `skipstone doctor LINK`")])
    elif not free:
        tell([Finding("reach", Level.SKIP, "the port cannot be listened on")])
    else:
        fits = partial(what_fits_of, patient.device, patient.memory_limit, patient.moments)
        await look_in_the_run(patient.link, doorway, fits, tell)
