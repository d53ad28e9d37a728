"""Rounds of DiLoCo in one process whose pseudo-gradients, and the mean that comes back, go through the real
encoders."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.codec_learner import Learner
from benchmarks.error_feedback import DECAYS, ErrorFeedback
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.anchor.shared_vector import Vector
from protocol.codecs import decode_into, encode_into, encoded_bytes
from swarm.vocabulary.types import Codec


class Leftover(enum.Enum):
    """What becomes of what an encoding left out."""

    LOST = "lost"
    LATER = "sent later"
    """Error feedback: it is added to what is encoded in the next round."""
    STAYS = "stays in the replica"
    """The replica stands on the new anchor less its leftover, as if it had done that work since; so it is in its next
    pseudo-gradient. Out only."""


@dataclass(frozen=True, slots=True)
class Way:
    """How vectors go in one direction."""

    codec: Codec = Codec.NONE
    leftover: Leftover = Leftover.LOST


class Sender(Protocol):
    """One that sends a vector in each round."""

    def send(self, values: Vector) -> tuple[Vector, int]:
        """What the others have of it, and the bytes it took."""
        ...


class VectorSender:
    """By the codecs for vectors."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def send(self, values: Vector) -> tuple[Vector, int]:
        data = memoryview(bytearray(encoded_bytes(self._codec, len(values))))
        out = np.empty_like(values)
        encode_into(self._codec, values, data)
        decode_into(self._codec, data, out)
        return out, data.nbytes


class FeedbackSender:
    """Another one with error feedback."""

    def __init__(self, sender: Sender, elements: int, decay: float) -> None:
        self._sender = sender
        self._feedback = ErrorFeedback(elements, decay)

    def send(self, values: Vector) -> tuple[Vector, int]:
        wanted, whole = values.copy(), slice(0, len(values))
        self._feedback.compensate(whole, wanted)
        decoded, size = self._sender.send(wanted)
        self._feedback.keep(whole, wanted, decoded)
        self._feedback.commit()
        return decoded, size


def sender_of(way: Way, learner: Learner) -> Sender:
    """For vectors of the learner's parameters."""
    plain: Sender = VectorSender(way.codec)
    if way.leftover is Leftover.LATER:
        return FeedbackSender(plain, len(learner.vector()), DECAYS[way.codec])
    return plain


class Rounds:
    """Workers and their anchor. All work is weighted alike.

    Args:
        workers: equal.
        out: how pseudo-gradients go to who reduces them.
        back: how the mean goes to all.
    """

    def __init__(self, workers: Sequence[Learner], rule: OuterRule, out: Way, back: Way) -> None:
        self.anchor = workers[0].vector()
        self.out_bytes = self.back_bytes = 0
        """Of one worker's pseudo-gradient, and of the mean, in the last round."""
        self._workers = workers
        self._rule = rule
        self._momentum = np.zeros_like(self.anchor)
        self._stays = out.leftover is Leftover.STAYS
        self._out = [sender_of(out, worker) for worker in workers]
        self._back = sender_of(back, workers[0])

    def average(self) -> None:
        """A round: all workers stand on the next anchor after it, but for what stays with them."""
        mean, share = np.zeros_like(self.anchor), np.float32(1 / len(self._workers))
        leftovers = []
        for worker, sender in zip(self._workers, self._out, strict=True):
            gradient = self.anchor - worker.vector()
            decoded, self.out_bytes = sender.send(gradient)
            mean += share * decoded
            leftovers.append(gradient - decoded)
        result, self.back_bytes = self._back.send(mean)
        self._rule.step(result, self.anchor, self._momentum, self.anchor, self._momentum)
        for worker, leftover in zip(self._workers, leftovers, strict=True):
            worker.write(self.anchor - leftover if self._stays else self.anchor)

    @property
    def apart(self) -> float:
        """How far the workers stand from the anchor in the mean, as a share of the anchor's length."""
        away = [float(np.linalg.norm(worker.vector() - self.anchor)) for worker in self._workers]
        return sum(away) / len(away) / float(np.linalg.norm(self.anchor))

    def stand(self) -> None:
        """Puts all workers on the anchor, with nothing besides."""
        for worker in self._workers:
            worker.write(self.anchor)

    def download(self, codec: Codec) -> int:
        """All workers get the anchor anew through a codec, as joiners get it; the bytes of one of them."""
        self.anchor, size = VectorSender(codec).send(self.anchor)
        self.stand()
        return size
