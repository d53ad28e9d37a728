"""The codecs of this node's microbatches: what each link carries, and what is chosen for it
(`swarm.compression.microbatch_codecs`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from node.observability.status import CodecChoice, CodecStatus, LinkStatus
from node.pipeline.admission import allowed_codecs
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from swarm.compression.goodput import Goodput
from swarm.compression.microbatch_codecs import MOST_ERROR, Traffic, choose
from swarm.vocabulary.types import Codec, PeerId, Reasoned, short

MAX_LINKS: Final = 1024
"""That are remembered; the transport holds fewer open."""
DESCRIBED: Final = 64


@dataclass(slots=True)
class _Link:
    goodput: Goodput = field(default_factory=Goodput)
    chosen: dict[Traffic, Reasoned[Codec]] = field(default_factory=dict)


class LinkCodecs:
    """Used on the event loop.

    Args:
        tensor: of the hidden states, as they are.
        visit_s: how long a microbatch is computed at the slower of the two ends of a link to a peer; 0 when not known.
        round_trip_s: of the link to a peer; 0 when not known.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensor: TensorSpec,
        clock: Clock,
        visit_s: Callable[[PeerId], float],
        round_trip_s: Callable[[PeerId], float],
    ) -> None:
        self._rungs = allowed_codecs(manifest)
        self._sizes = {codec: TensorSpec(tensor.shape, tensor.dtype, codec).byte_length for codec in MOST_ERROR}
        self._sizes[Codec.NONE] = tensor.raw_bytes
        self._clock = clock
        self._visit_s, self._round_trip_s = visit_s, round_trip_s
        self._links: dict[PeerId, _Link] = {}
        self._too_coarse: set[tuple[Traffic, Codec]] = set()

    def choose(self, to: PeerId, traffic: Traffic) -> Codec:
        """For the next tensor of this kind that goes to the peer."""
        link = self._link(to)
        rungs = self._rungs[traffic]
        while len(rungs) > 1 and (traffic, rungs[-1]) in self._too_coarse:
            rungs = rungs[:-1]
        before = link.chosen.get(traffic)
        current = None if before is None else before.value
        chosen = choose(rungs, self._sizes, current, link.goodput.bytes_per_s, self._visit_s(to))
        link.chosen[traffic] = chosen
        return chosen.value

    def measured(self, traffic: Traffic, codec: Codec, error: float) -> None:
        """The relative error of an encoding. One that is too large rules the codec out for this kind of traffic, as
        long as the node runs."""
        if error > MOST_ERROR.get(codec, float("inf")):
            self._too_coarse.add((traffic, codec))

    def sending(self, to: PeerId, tensor: Hashable, size_bytes: int) -> None:
        """A tensor begins to go to the peer."""
        self._link(to).goodput.sent(tensor, size_bytes, self._clock.monotonic())

    def accepted(self, by: PeerId, tensor: Hashable) -> None:
        """The peer says that it has all of it."""
        link = self._links.get(by)
        if link is not None:
            link.goodput.accepted(tensor, self._round_trip_s(by), self._clock.monotonic())

    def not_accepted(self, by: PeerId, tensor: Hashable) -> None:
        """The peer did not want it."""
        link = self._links.get(by)
        if link is not None:
            link.goodput.gave_up(tensor)

    def lost(self, peer: PeerId) -> None:
        """The link ended; nothing that was measured holds for the next one."""
        self._links.pop(peer, None)

    def best_bytes_per_s(self) -> float:
        """Of all links; 0 when none has been measured."""
        return max((link.goodput.bytes_per_s for link in self._links.values()), default=0.0)

    def describe(self) -> CodecStatus:
        """For `status`: which codecs are allowed, and what is used on each link, why."""
        links = list(self._links.items())[:DESCRIBED]
        return CodecStatus(
            {traffic.value: tuple(codec.name.lower() for codec in rungs) for traffic, rungs in self._rungs.items()},
            tuple(sorted(f"{traffic.value}: {codec.name.lower()}" for traffic, codec in self._too_coarse)),
            {short(peer): _described(link) for peer, link in links if link.chosen},
        )

    def _link(self, peer: PeerId) -> _Link:
        link = self._links.get(peer)
        if link is None:
            while len(self._links) >= MAX_LINKS:
                del self._links[next(iter(self._links))]
            link = self._links[peer] = _Link()
        return link


def _described(link: _Link) -> LinkStatus:
    choices = {t.value: CodecChoice(c.value.name.lower(), c.reason) for t, c in link.chosen.items()}
    return LinkStatus(round(link.goodput.bytes_per_s), **choices)
