"""The doctor says how large a stage fits, and which of a run's."""

from __future__ import annotations

import pytest

from node.lab.doctor.finding import Level
from node.lab.doctor.fitting import look_at_room, what_fits_of
from node.model.memory_need import CPU_BYTES, needs_of, round_bytes
from node.model.moments import MomentType
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.types import ModuleId, Reasoned
from tests.node.small_manifest import small_manifest

MANIFEST = small_manifest(stages__blocks=(0, 4, 40))
NEEDS = needs_of(MANIFEST, DEFAULT_SLOTS)


def limit(size_bytes: int) -> Reasoned[int]:
    return Reasoned(size_bytes, "under --memory-limit")


def test_the_largest_stage_is_told_in_parameters() -> None:
    size_bytes = 3 * 10**6 * (CPU_BYTES + 8 + int(round_bytes(1)))
    (finding,) = look_at_room("cpu", limit(size_bytes))
    assert finding.level is Level.OK
    in_fragments = f"{int(size_bytes / (CPU_BYTES + 8 + round_bytes(8))) // 10**5 / 10} in a run with 8 fragments"
    assert finding.found.startswith(f"room for a stage of at most 3.0 million parameters, {in_fragments}: ")
    assert finding.found.endswith("are free under --memory-limit")


def test_moments_in_8_bits_leave_room_for_more() -> None:
    (finding,) = look_at_room("cpu", limit(3 * 10**6 * (CPU_BYTES + 8 + 20)), MomentType.EIGHT_BIT)
    assert finding.found.startswith("room for a stage of at most 3.4 million parameters, ")


@pytest.mark.parametrize(
    ("size_bytes", "level", "said"),
    [
        (NEEDS[ModuleId(2)].all, Level.OK, "every stage fits; the largest, 2, takes"),
        (NEEDS[ModuleId(2)].all - 1, Level.OK, "there is room for stages 0, 1; of the others stage 2 takes"),
        (NEEDS[ModuleId(0)].all, Level.OK, "there is room for stage 0; of the others stage 1 takes"),
        (NEEDS[ModuleId(0)].all - 1, Level.FAIL, "no stage fits; the smallest, 0 takes"),
    ],
)
def test_the_stages_of_a_run_are_named(size_bytes: int, level: Level, said: str) -> None:
    (finding,) = what_fits_of("cpu", limit(size_bytes), MomentType.FLOAT32, MANIFEST)
    assert (finding.level, finding.found[: len(said)]) == (level, said)
