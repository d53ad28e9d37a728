"""What `benchmarks/rounds_live.py` makes of what it sees. That it runs, it shows itself."""

from __future__ import annotations

import math

import pytest

from benchmarks.rounds_live import Round, Setting, compare
from node.model.shapes import parameter_shapes
from swarm.vocabulary.types import ModuleId
from tests.e2e.small_run import write_text

SETTING = Setting(peers=4, parameters=10_000_000, inner_steps=6, codec="int8", forward_s=0.1)
ROUNDS = [Round(10.0 * number, 10.0 * number + 2.0, 4) for number in range(1, 8)]


def homes(slowed: float) -> list[float]:
    """Ten a second between rounds, and so many times that from a round's beginning until a visit after its end."""
    found, at = list[float](), 0.0
    while at < 100.0:
        found.append(at)
        in_a_round = at >= 10.0 and at % 10.0 < 2.0 + SETTING.visit_s
        at = round(at + (0.1 / slowed if in_a_round else 0.1), 6)
    return found


@pytest.mark.parametrize("slowed", [1.0, 0.8, 0.5])
def test_the_ratio_is_that_of_the_paces(slowed: float) -> None:
    found = compare(homes(slowed), ROUNDS, SETTING)
    assert found["pace_ratio"] == pytest.approx(slowed, abs=0.02)
    assert found["median_ratio"] == pytest.approx(slowed, abs=0.02)
    assert found["rounds"] == len(ROUNDS) - 2, "not the first, and not the last, with nothing after it"
    assert found["not_of_all"] == 0
    assert found["of_the_emulated"][1] == pytest.approx(10.0 / (4 / 0.3), abs=0.02)


def test_rounds_without_time_between_them_are_no_figures() -> None:
    dense = [Round(float(n), n + 0.9, 4) for n in range(10)]
    for rounds in (ROUNDS[:2], dense):
        with pytest.raises(RuntimeError, match="fewer than three rounds, or no time between"):
            compare(homes(1.0), rounds, SETTING)


@pytest.mark.parametrize("parameters", [40_000, 1_000_000, 10_000_000, 50_000_000])
def test_a_stage_has_the_parameters_that_were_asked_for(parameters: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    setting = Setting(2, parameters, 6, "int8", 0.1)
    shapes = parameter_shapes(setting.manifest(write_text(tmp_path / "text")), ModuleId(1))
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(parameters, rel=0.15)
