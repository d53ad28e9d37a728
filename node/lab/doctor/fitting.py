"""The checks of what fits into this machine: how large a stage, and which stages of a run.

It stands alone because memory that is free and a stage that fits are two questions. Torch is loaded when
they are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from node.lab.doctor.finding import Finding, Level
from node.model.moments import MomentType
from protocol.manifest.manifest import Manifest
from swarm.membership.room import Room, size_text
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.types import Reasoned

ROUGH: Final = 10**5
"""Parameters are told in whole steps of so many."""
MANY_FRAGMENTS: Final = 8
"""As `new --size` gives runs of large stages."""
FIX: Final = "Close other programs, raise --memory-limit if there is one, or ask for a run with smaller stages."


def look_at_room(wish: str, limit: Reasoned[int] | None, moments: MomentType = MomentType.FLOAT32) -> Sequence[Finding]:
    """Tells how large a stage a node with `--device WISH`, this limit and such moments could take.

    Raises:
        ConfigError: the device is not there.
    """
    from node.model.memory_need import parameters_that_fit

    room = _room(wish, limit)
    there = room.memory if room.device is None else room.device
    at_once, in_fragments = (parameters_that_fit(room, moments, fragments) for fragments in (1, MANY_FRAGMENTS))
    if at_once is None or in_fragments is None or there.value is None:
        return [Finding("stage", Level.SKIP, "this system does not say how much memory is free")]
    found = f"room for a stage of at most {_rough(at_once)} million parameters"
    if _rough(in_fragments) != _rough(at_once):
        found += f", {_rough(in_fragments)} in a run with {MANY_FRAGMENTS} fragments"
    return [Finding("stage", Level.OK, f"{found}: {size_text(there.value)} are free {there.reason}")]


def what_fits_of(wish: str, limit: Reasoned[int] | None, moments: MomentType, manifest: Manifest) -> Sequence[Finding]:
    """Tells which stages of a run such a node could take.

    Raises:
        ConfigError: the device is not there.
    """
    from node.model.memory_need import what_fits

    fits = what_fits(manifest, _room(wish, limit), DEFAULT_SLOTS, moments)
    if not fits.value:
        return [Finding("fits", Level.FAIL, fits.reason, FIX)]
    return [Finding("fits", Level.OK, fits.reason)]


def _rough(parameters: int) -> str:
    return f"{parameters // ROUGH * ROUGH / 1e6:,.1f}"


def _room(wish: str, limit: Reasoned[int] | None) -> Room:
    from node.model.device import choose_devices
    from node.model.memory_need import room_on

    return room_on(choose_devices(wish).value[0]).within(limit)
