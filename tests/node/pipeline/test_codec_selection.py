"""The codecs of a node's links: what was measured decides, coarse data rules a codec out, and a lost link is
forgotten."""

from __future__ import annotations

from node.pipeline.runner import MAX_LINKS, LinkCodecs
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.compression.microbatch_codecs import Traffic
from swarm.vocabulary.types import Codec, PeerId
from tests.node.small_manifest import small_manifest

TENSOR = TensorSpec((4, 512, 512), DType.FLOAT32)
A, B = PeerId("a"), PeerId("b")
VISIT_S = 0.4


class Links:
    """Links that carry what the test says."""

    def __init__(self, activations: str = "int4", gradients: str = "int8") -> None:
        self.carried: dict[PeerId, float] = {}
        manifest = small_manifest(codecs={"activations": activations, "gradients": gradients})
        self.codecs = LinkCodecs(manifest, TENSOR, lambda peer: VISIT_S, lambda peer: self.carried.get(peer, 0.0))

    def carry(self, to: PeerId, mbit_per_s: float) -> None:
        self.carried[to] = mbit_per_s / 8 * 1e6

    def chosen(self, to: PeerId) -> tuple[Codec, Codec]:
        return self.codecs.choose(to, Traffic.ACTIVATIONS), self.codecs.choose(to, Traffic.GRADIENTS)


def test_each_link_and_each_kind_of_traffic_gets_its_own() -> None:
    links = Links()
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)
    links.carry(A, 1000)
    links.carry(B, 20)
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)
    assert links.chosen(B) == (Codec.INT4, Codec.INT8)
    links.carry(B, 1000)
    assert links.chosen(B) == (Codec.NONE, Codec.NONE)


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
    links.chosen(A)
    links.codecs.lost(A)
    assert links.codecs.describe().links == {}
    for number in range(MAX_LINKS + 10):
        links.codecs.choose(PeerId(str(number)), Traffic.ACTIVATIONS)
    assert len(links.codecs._chosen) == MAX_LINKS
