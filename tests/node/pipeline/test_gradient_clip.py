"""Gradients of one microbatch that are far longer than usual."""

import pytest
import torch

from node.pipeline.worker import ALONE_AT_MOST, GRADIENT_AT_MOST, NORMS_KEPT, GradientClip
from swarm.vocabulary.types import MicrobatchId, PeerId

HONEST, LIAR, OTHER = PeerId("honest"), PeerId("liar"), PeerId("other")


def gradient(norm: float, rows: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.ones(rows, 8, 4)
    return (values * (norm / values.norm() / rows**0.5)).to(dtype)


def warm(*data_nodes: PeerId, norm: float = 1.0) -> GradientClip:
    clip = GradientClip()
    for number in range(NORMS_KEPT):
        for peer in data_nodes:
            clip.clipped(MicrobatchId(peer, number), gradient(norm))
    return clip


def test_an_ordinary_gradient_is_the_same_and_a_long_one_is_shortened_to_three_usual_ones() -> None:
    clip, ordinary = warm(HONEST, OTHER), gradient(2.9)
    assert clip.clipped(MicrobatchId(HONEST, 100), ordinary) is ordinary
    assert clip.clipped(MicrobatchId(HONEST, 101), gradient(2.9, rows=4)).norm() == pytest.approx(1.45)
    for dtype in (torch.float32, torch.bfloat16):
        long = clip.clipped(MicrobatchId(HONEST, 102), gradient(1e12, dtype=dtype))
        assert long.norm().item() == pytest.approx(GRADIENT_AT_MOST, rel=0.01)
        assert long.dtype is dtype
    assert clip.clipped(MicrobatchId(HONEST, 103), gradient(1e30)).norm() == 0, "its square is infinite"


def test_many_long_gradients_of_one_data_node_do_not_become_usual_but_alone_it_has_more_room() -> None:
    clip = warm(HONEST, OTHER)
    for number in range(500):
        limited = clip.clipped(MicrobatchId(LIAR, number), gradient(1e12))
    assert limited.norm().item() == pytest.approx(GRADIENT_AT_MOST, rel=0.01)
    assert clip.clipped(MicrobatchId(HONEST, 999), gradient(1.0)).norm() == pytest.approx(1.0)
    clip = warm(HONEST)
    assert clip.clipped(MicrobatchId(HONEST, 100), gradient(99.0)).norm() == pytest.approx(99.0)
    assert clip.clipped(MicrobatchId(HONEST, 101), gradient(1e12)).norm() == pytest.approx(ALONE_AT_MOST)


def test_a_gradient_that_is_taken_back_is_scaled_as_when_it_was_added() -> None:
    clip = warm(HONEST, OTHER)
    added = clip.clipped(MicrobatchId(LIAR, 1), gradient(100.0))
    for number in range(200, 300):
        clip.clipped(MicrobatchId(HONEST, number), gradient(10.0))
    assert torch.equal(clip.clipped(MicrobatchId(LIAR, 1), gradient(100.0)), added)
