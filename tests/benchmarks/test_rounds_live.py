"""What `benchmarks/rounds_live.py` makes of what it sees. That it runs, it shows itself."""

from __future__ import annotations

import math

import pytest

from benchmarks.rounds_live import Round, Seen, Setting, compare
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


def computed(home: list[float]) -> list[tuple[float, float]]:
    """Each microbatch out and back, on one of four devices, before it comes home."""
    return [(at - SETTING.visit_s, SETTING.visit_s) for at in home]


@pytest.mark.parametrize("slowed", [1.0, 0.8, 0.5])
def test_the_ratio_is_that_of_the_paces(slowed: float) -> None:
    home = homes(slowed)
    found = compare(Seen(home, computed(home), ROUNDS), SETTING)
    assert found["pace_ratio"] == pytest.approx(slowed, abs=0.02)
    assert found["median_ratio"] == pytest.approx(slowed, abs=0.02)
    assert found["rounds"] == len(ROUNDS) - 2, "not the first, and not the last, with nothing after it"
    assert found["not_of_all"] == 0
    assert found["of_the_emulated"][1] == pytest.approx(10.0 / (4 / 0.3), abs=0.02)
    assert found["computed_of_home"] == pytest.approx(1.0, abs=0.04)


def test_devices_that_compute_less_during_rounds_are_seen_whatever_comes_home() -> None:
    """Four devices that rest for a tenth of each round's time, and a data node that hears of all of it later."""
    work = [(0.5 * n, 0.45 if 0.5 * n >= 10.0 and 0.5 * n % 10.0 < 2.0 else 0.5) for n in range(200)] * 4
    found = compare(Seen(homes(1.0), sorted(work), ROUNDS), SETTING)
    assert found["pace_ratio"] == pytest.approx(1.0, abs=0.02)
    in_round = (0.9 * 2.0 + SETTING.visit_s) / (2.0 + SETTING.visit_s)
    assert found["computed"] == pytest.approx([in_round, 1.0], abs=0.002)
    assert found["computed_ratio"] == pytest.approx(in_round, abs=0.002)


def test_rounds_without_time_between_them_are_no_figures() -> None:
    dense = [Round(float(n), n + 0.9, 4) for n in range(10)]
    for rounds in (ROUNDS[:2], dense):
        with pytest.raises(RuntimeError, match="fewer than three rounds, or no time between"):
            compare(Seen(homes(1.0), computed(homes(1.0)), rounds), SETTING)


@pytest.mark.parametrize("parameters", [40_000, 1_000_000, 10_000_000, 50_000_000])
def test_a_stage_has_the_parameters_that_were_asked_for(parameters: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    setting = Setting(2, parameters, 6, "int8", 0.1)
    shapes = parameter_shapes(setting.manifest(write_text(tmp_path / "text")), ModuleId(1))
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(parameters, rel=0.15)
