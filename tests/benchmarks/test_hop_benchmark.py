"""The benchmark of one hop still finds the node's parts as it needs them: two processes of it move a tensor there and
back. It is by itself because nothing else holds `benchmarks.hop_skipstone` together with the node."""

from __future__ import annotations

from benchmarks.hop import skipstone
from benchmarks.samples import SAMPLES_PER_ROUND


def test_a_round_of_the_hop_moves_tensors_there_and_back() -> None:
    with skipstone((2, 16, 64)) as a_round:
        samples = a_round()
    assert len(samples) == SAMPLES_PER_ROUND - 1
    assert all(0 < sample.forward_s < sample.forward_backward_s for sample in samples)
