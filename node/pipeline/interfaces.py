"""The interfaces of the runner of microbatches to the rest of the node: who computes, and who wants the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from node.model.optimizer import StepFigures
from protocol.codecs import Encoded
from protocol.interfaces.tensor_spec import TensorSpec
from swarm.pipeline.custody_events import Key, Work
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import Forward, Purpose, Receipt
from swarm.vocabulary.types import Codec, MicrobatchId, Path, PeerId


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a computation. `tensor` is sent on; `loss` is in nats per token; `step_due` asks for an inner step
    before anything else.
    """

    tensor: Encoded | None = None
    loss: float | None = None
    step_due: bool = False
    error: float | None = None
    """Relative, of the tensor's encoding, when the job asked for it."""


@dataclass(frozen=True, slots=True)
class Job:
    """The description of one computation. `ticket` names the holding it is for: the same microbatch come by a second
    way has another.
    """

    ticket: int
    key: Key
    work: Work
    purpose: Purpose
    input: Encoded | None = None
    """The received hidden states; None at a data node's start."""
    gradient: Encoded | None = None
    """The received gradient of the output, once it is there."""
    documents: tuple[int, ...] = ()
    """Tokens of each document of the microbatch; empty where it is rows of one stream."""
    codec: Codec = Codec.NONE
    """For what is sent on."""
    check_codec: bool = False
    """Whether to say how large the encoding's error is."""
    labels: int = 0
    """Tokens of the microbatch that are predicted; 0 where all are."""


class Worker(Protocol):
    """The computations of one replica. Every method but `tensor` runs on the compute thread."""

    @property
    def tensor(self) -> TensorSpec:
        """The specification of the hidden states and their gradients."""
        ...

    def compute(self, job: Job) -> Output:
        """Does the job. Its tensors stay as they are until `forget(ticket)`; so does `Output.tensor`, which may be the
        same memory.

        Raises:
            SkipstoneError: it could not be done, and nothing was accumulated.
        """
        ...

    def retract(self, job: Job) -> bool:
        """Takes back the gradient that a BACKWARD or REPLAY of this holding has added, from its input and gradient.

        Says whether there was anything to take back. Between the two an inner step may have been taken: then that step
        was taken with it, and the negative goes into the next sum.

        Raises:
            SkipstoneError: it could not be computed; the gradient stays.
        """
        ...

    def forget(self, ticket: int) -> None:
        """Frees what was kept for the holding, if anything was; then the memory that its tensors came in may be
        written again."""
        ...

    def step(self) -> StepFigures | None:
        """Takes the inner step that is due; None when an earlier call took it. (Two results in a row may both ask for
        it.)"""
        ...


class PathEnds:
    """A data node's interest in its own microbatches. As it stands here: of a peer that starts no paths."""

    def expects(self, message: Forward) -> bool:
        """Whether this microbatch of ours is still under way."""
        return False

    def loss_known(self, microbatch: MicrobatchId, path: Path, purpose: Purpose, loss: float) -> None:
        """Takes a microbatch's loss, in nats per token."""

    def finished(self, microbatch: MicrobatchId, path: Path) -> None:
        """Takes note that a microbatch has come home along `path`, whose gradients are the ones that count."""

    def lost(self, microbatch: MicrobatchId, detail: str) -> None:
        """Takes note that a microbatch cannot go on."""

    def may_hold(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        """Whether the peer hosts a module on the microbatch's path. Which replica has it may have changed on the
        way."""
        return False

    def may_have_held(self, peer: PeerId, microbatch: MicrobatchId) -> bool:
        """Whether the peer may have held the microbatch, as `may_hold`, also of one that has come home, as long as
        receipts for it are expected.
        """
        return False

    def passed(self, sender: PeerId, receipt: Receipt) -> None:
        """Takes note that a peer says that it has passed one of our microbatches on, which may be home already."""


class Host(Protocol):
    """The node's interest in the microbatches at its replica."""

    def visited(self, microbatch: MicrobatchId) -> None:
        """Takes note that a gradient that was added counts."""
        ...

    def retracted(self, microbatch: MicrobatchId) -> None:
        """Takes note that a gradient that was added did not count, and has been taken back."""
        ...

    def stepped(self, figures: StepFigures) -> None:
        """Takes note that an inner step has been taken."""
        ...

    def not_reached(self, peer: PeerId, error: PeerError) -> None:
        """Takes note that something could not be sent."""
        ...
