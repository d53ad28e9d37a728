"""The forecast of a run: memory a peer, bytes a token and a round, tokens a second over slow and fast links.

Estimated from the manifest and from what is assumed of cards, and told as such: nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node.model.memory_need import need_of
from node.model.moments import MomentType
from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.manifest.manifest import Manifest
from swarm.membership.room import Need
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.types import Codec, ModuleId

LINKS_MBIT_S: Final = (20, 100, 1000)
LARGE_CARD: Final = 24 * 10**9
ASSUMED_FLOPS: Final = (20e12, 55e12)
"""bfloat16 operations a second that a card below and from `LARGE_CARD` on reaches: four fifths of the peak of an RTX
3060 and of an RTX 3090."""
OPERATIONS: Final = 8
"""For each parameter and token: two forward, four backward, and two for the forward pass again where its graph was not
kept."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of a run with one peer a stage."""

    data_node: Need
    stage: Need
    """Of the stage that takes most after stage 0."""
    stage_8bit: Need
    """The same with `--moments 8bit`."""
    token_bytes: float
    """Sent by each peer for each token, as the manifest's codecs allow; as many are received."""
    round_bytes: int
    """Sent by a replica of that stage in each round at most, for all fragments together."""
    tokens_per_s: dict[int, float]
    """By the Mbit/s that each peer can send."""
    computed_per_s: float
    """Tokens that the slowest stage computes, by what is assumed of its card."""
    total_tokens: int

    def seconds(self, mbit_s: int) -> float:
        """How long the whole run takes over such links."""
        return self.total_tokens / self.tokens_per_s[mbit_s]


def forecast(manifest: Manifest, card: int) -> Forecast:
    """Forecasts a run on peers with a card of so many bytes each."""
    blocks = manifest.stages.blocks
    largest = max(range(1, len(blocks)), key=lambda stage: blocks[stage])
    data_node, stage = (need_of(manifest, (ModuleId(each),), DEFAULT_SLOTS) for each in (0, largest))
    stage_8bit = need_of(manifest, (ModuleId(largest),), DEFAULT_SLOTS, MomentType.EIGHT_BIT)
    parameters = parameter_bytes(parameter_shapes(manifest, ModuleId(largest))) // BYTES_PER_PARAMETER
    head = manifest.model.vocabulary * manifest.model.hidden
    token_bytes = _token_bytes(manifest)
    pseudo = TensorSpec((parameters,), DType.FLOAT32, Codec[manifest.codecs.pseudo_gradients.upper()])
    flops = ASSUMED_FLOPS[card >= LARGE_CARD]
    computed = flops / OPERATIONS / max(parameters, head)
    links = {mbit: min(computed, mbit * 1e6 / 8 / token_bytes) for mbit in LINKS_MBIT_S}
    total = manifest.training.schedule_tokens[1]
    return Forecast(data_node, stage, stage_8bit, token_bytes, 2 * pseudo.byte_length, links, computed, total)


def _token_bytes(manifest: Manifest) -> float:
    """A hidden state one way and a gradient the other leave each peer for each token: at a data node the first hop's
    and the last one's."""
    dtype = DType.BFLOAT16 if manifest.model.dtype == "bfloat16" else DType.FLOAT32
    codecs = (Codec[name.upper()] for name in (manifest.codecs.activations, manifest.codecs.gradients))
    sizes = (TensorSpec(manifest.hidden_shape, dtype, codec).byte_length for codec in codecs)
    return sum(sizes) / manifest.microbatch_tokens
