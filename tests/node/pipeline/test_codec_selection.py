"""The codecs of a node's links: what was measured decides, coarse data rules a codec out, and a lost link is
forgotten."""

from __future__ import annotations

import pytest

from node.pipeline.codec_selection import MAX_LINKS, LinkCodecs
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.compression.microbatch_codecs import Traffic
from swarm.vocabulary.types import Codec, PeerId
from tests.node.network.small_swarm import ManualClock
from tests.node.small_manifest import small_manifest

TENSOR = TensorSpec((4, 512, 512), DType.FLOAT32)
A, B = PeerId("a"), PeerId("b")
VISIT_S = 0.4


class Links:
    """Links whose tensors take as long as the test says."""

    def __init__(self, activations: str = "int4", gradients: str = "int8") -> None:
        self.clock = ManualClock()
        manifest = small_manifest(codecs={"activations": activations, "gradients": gradients})
        self.codecs = LinkCodecs(manifest, TENSOR, self.clock, lambda peer: VISIT_S, lambda peer: 0.0)

    def carry(self, to: PeerId, mbit_per_s: float) -> None:
        """A megabyte, at this rate."""
        self.codecs.sending(to, "tensor", 1_000_000)
        self.clock.now += 8 / mbit_per_s
        self.codecs.accepted(to, "tensor")

    def chosen(self, to: PeerId) -> tuple[Codec, Codec]:
        return self.codecs.choose(to, Traffic.ACTIVATIONS), self.codecs.choose(to, Traffic.GRADIENTS)


def test_each_link_and_each_kind_of_traffic_gets_its_own() -> None:
    links = Links()
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)
    links.carry(A, 1000)
    links.carry(B, 20)
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)
    assert links.chosen(B) == (Codec.INT4, Codec.INT8)
    for _ in range(300):
        links.carry(B, 1000)
    assert links.chosen(B) == (Codec.NONE, Codec.NONE)


def test_the_best_link_tells_what_this_node_can_send() -> None:
    links = Links()
    assert links.codecs.best_bytes_per_s() == 0.0
    links.carry(A, 8)
    links.carry(B, 80)
    assert links.codecs.best_bytes_per_s() == pytest.approx(10e6)
    links.codecs.lost(B)
    assert links.codecs.best_bytes_per_s() == pytest.approx(1e6)


def test_what_is_not_accepted_says_nothing_of_the_link() -> None:
    links = Links()
    links.codecs.sending(A, "tensor", 1_000_000)
    links.clock.now += 100
    links.codecs.not_accepted(A, "tensor")
    links.codecs.accepted(A, "tensor")
    links.codecs.accepted(B, "of a peer that nothing was sent to")
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)


def test_a_codec_that_is_too_coarse_for_the_data_is_not_used_for_that_kind_again() -> None:
    links = Links("int4", "int4")
    links.carry(A, 1)
    links.codecs.measured(Traffic.GRADIENTS, Codec.INT4, 0.1)
    assert links.chosen(A) == (Codec.INT4, Codec.INT4)
    links.codecs.measured(Traffic.GRADIENTS, Codec.INT4, 0.5)
    assert links.chosen(A) == (Codec.INT4, Codec.INT8)
    assert links.codecs.describe().too_coarse == ("gradients: int4",)


def test_the_choice_and_its_reason_are_told() -> None:
    links = Links()
    links.carry(A, 20)
    links.chosen(A)
    described = links.codecs.describe()
    assert described.allowed == {
        "activations": ("none", "bf16", "int8", "int4"),
        "gradients": ("none", "bf16", "int8"),
    }
    choice = described.links["a"].activations
    assert choice is not None
    assert choice.codec == "int4"
    assert "20 Mbit/s" in choice.why


def test_lost_links_are_forgotten_and_only_so_many_remembered() -> None:
    links = Links()
    links.carry(A, 1)
    links.codecs.lost(A)
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)
    for number in range(MAX_LINKS + 10):
        links.codecs.choose(PeerId(str(number)), Traffic.ACTIVATIONS)
    assert len(links.codecs._links) == MAX_LINKS
