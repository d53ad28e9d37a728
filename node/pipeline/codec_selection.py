"""The codec of each of this node's links, by what it carries (`swarm.compression.microbatch_codecs`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from node.observability.status import CodecChoice, CodecStatus, LinkStatus
from node.pipeline.admission import allowed_codecs
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from swarm.compression.microbatch_codecs import MOST_ERROR, Traffic, choose
from swarm.vocabulary.types import Codec, PeerId, Reasoned, short

MAX_LINKS: Final = 1024
"""That are remembered; the transport holds fewer open."""
DESCRIBED: Final = 64


Choices = dict[Traffic, Reasoned[Codec]]


class LinkCodecs:
    """The codecs in use on this node's links.

    Args:
        tensor: of the hidden states, as they are.
        visit_s: how long a microbatch is computed at the slower of the two ends of a link to a peer; 0 when not known.
        goodput: bytes per second of the link to a peer; 0 when not known.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensor: TensorSpec,
        visit_s: Callable[[PeerId], float],
        goodput: Callable[[PeerId], float],
    ) -> None:
        self._rungs = allowed_codecs(manifest)
        self._sizes = {codec: TensorSpec(tensor.shape, tensor.dtype, codec).byte_length for codec in MOST_ERROR}
        self._sizes[Codec.NONE] = tensor.raw_bytes
        self._visit_s, self._goodput = visit_s, goodput
        self._chosen: dict[PeerId, Choices] = {}
        self._too_coarse: set[tuple[Traffic, Codec]] = set()

    def choose(self, to: PeerId, traffic: Traffic) -> Codec:
        """Chooses the codec of the next tensor of this kind that goes to the peer."""
        rungs = self._rungs[traffic]
        while len(rungs) > 1 and (traffic, rungs[-1]) in self._too_coarse:
            rungs = rungs[:-1]
        choices = self._choices(to)
        current = choices[traffic].value if traffic in choices else None
        choices[traffic] = choose(rungs, self._sizes, current, self._goodput(to), self._visit_s(to))
        return choices[traffic].value

    def measured(self, traffic: Traffic, codec: Codec, error: float) -> None:
        """Takes the relative error of an encoding. One that is too large rules the codec out for this kind of traffic,
        as long as the node runs.
        """
        if error > MOST_ERROR.get(codec, float("inf")):
            self._too_coarse.add((traffic, codec))

    def lost(self, peer: PeerId) -> None:
        """Forgets the choices for a link that ended."""
        self._chosen.pop(peer, None)

    def describe(self) -> CodecStatus:
        """The codec status: which codecs are allowed, and what is used on each link, why."""
        links = list(self._chosen.items())[:DESCRIBED]
        return CodecStatus(
            {traffic.value: tuple(codec.name.lower() for codec in rungs) for traffic, rungs in self._rungs.items()},
            tuple(sorted(f"{traffic.value}: {codec.name.lower()}" for traffic, codec in self._too_coarse)),
            {short(peer): self._described(peer, choices) for peer, choices in links},
        )

    def _described(self, peer: PeerId, choices: Choices) -> LinkStatus:
        codecs = {t.value: CodecChoice(c.value.name.lower(), c.reason) for t, c in choices.items()}
        return LinkStatus(round(self._goodput(peer)), **codecs)

    def _choices(self, peer: PeerId) -> Choices:
        while peer not in self._chosen and len(self._chosen) >= MAX_LINKS:
            del self._chosen[next(iter(self._chosen))]
        return self._chosen.setdefault(peer, {})
