from __future__ import annotations

import pytest

from swarm.vocabulary.statistics import Ewma


def test_the_first_samples_count_alike_and_later_ones_by_the_weight() -> None:
    smoothed = Ewma(0.25)
    assert smoothed.mean == 0.0
    for sample, mean in ((2.0, 2.0), (4.0, 3.0), (6.0, 4.0), (8.0, 5.0), (9.0, 6.0), (2.0, 5.0)):
        smoothed.add(sample)
        assert smoothed.mean == pytest.approx(mean)
    assert smoothed.samples == 6
    assert smoothed.gain == 0.25
