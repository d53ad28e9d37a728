"""How the benchmark of a swarm of experts counts and sums up."""

from __future__ import annotations

from benchmarks.experts_swarm import WINDOW, summed_up, unevenness

LEFT, RIGHT = ("1.0", "2.0"), ("1.1", "2.0")


def test_unevenness_is_that_of_the_worst_window() -> None:
    assert unevenness([LEFT, RIGHT] * WINDOW) == 1.0
    assert unevenness([LEFT] * WINDOW + [RIGHT] * WINDOW) == 2.0
    assert unevenness([LEFT] * WINDOW) == 1.0, "a stage with one module"
    assert unevenness([LEFT, RIGHT]) == 1.0, "too few to say"


def test_figures_are_of_medians() -> None:
    run = {"tokens_per_s": 100.0, "bytes_a_token": 50.0, "unevenness": 1.0}
    dense = [run, {**run, "tokens_per_s": 200.0}, {**run, "tokens_per_s": 10.0}]
    experts = [{**run, "tokens_per_s": 95.0, "unevenness": 1.125}] * 3
    figures = summed_up({"dense": dense, "experts": experts})["figures"]
    assert figures == {"tokens_per_s": 0.95, "bytes_a_token": 1.0, "unevenness": 1.125}
