"""One module's state towards the links: what is given to others, and what is fetched from them."""

from __future__ import annotations

from node.averaging.catch_up import CatchingUp
from node.averaging.donor import Donor
from protocol.seams import Refusal
from protocol.tensor_spec import TensorSpec
from swarm.errors import PeerError
from swarm.round_messages import StateChunk, StateControl, StateRequest
from swarm.vocabulary import PeerId


class StateDesk:
    """The part of `node.reception.RoundReceiver` that has to do with state. `donor` is None until there is an anchor to give."""

    def __init__(self, catching_up: CatchingUp, donor: Donor | None = None) -> None:
        self.catching_up = catching_up
        self.donor = donor

    def admit(self, sender: PeerId, message: StateChunk, tensor: TensorSpec) -> memoryview | Refusal:
        """Raises ProtocolViolation."""
        return self.catching_up.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> None:
        self.catching_up.received(sender, message, buffer)

    def broken_off(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> None:
        self.catching_up.broken_off(sender, message, buffer)

    def told(self, sender: PeerId, message: StateControl) -> None:
        if not isinstance(message, StateRequest):
            self.catching_up.told(sender, message)
        elif self.donor is not None:
            self.donor.told(sender, message)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self.catching_up.link_down(peer)
        if self.donor is not None:
            self.donor.link_down(peer)
