"""Rounds of DiLoCo in one process whose pseudo-gradients, and the mean that comes back, go through the real encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.codec_learner import Learner
from node.averaging.anchor import Vector
from node.averaging.error_feedback import DECAYS, ErrorFeedback
from node.averaging.outer import OuterRule
from protocol.codecs import decode, decode_into, encode, encode_into, encode_low_rank, encoded_bytes
from swarm.vocabulary import Codec


@dataclass(frozen=True, slots=True)
class Way:
    """How vectors go in one direction."""

    codec: Codec = Codec.NONE
    decay: float = 0.0
    """Of the residual of error feedback; 0 for none."""
    rank: int = 0
    """LOW_RANK only."""


def with_feedback(codec: Codec, rank: int = 0) -> Way:
    """With the product's decay for the codec."""
    return Way(codec, DECAYS[codec], rank)


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


class MatrixSender:
    """By LOW_RANK, matrix by matrix, each with a warm start; what is no matrix, or smaller than the rank, as BF16."""

    def __init__(self, places: Sequence[tuple[int, tuple[int, ...]]], rank: int) -> None:
        self._places = places
        self._rank = rank
        self._starts: dict[int, Tensor] = {}

    def send(self, values: Vector) -> tuple[Vector, int]:
        out, size = np.empty_like(values), 0
        for start, shape in self._places:
            part = slice(start, start + int(np.prod(shape)))
            tensor = torch.from_numpy(values[part]).view(shape)
            if len(shape) == 2 and min(shape) > self._rank:
                sent, self._starts[start] = encode_low_rank(tensor, self._rank, self._starts.get(start))
            else:
                sent = encode(tensor, Codec.BF16)
            decode(sent.spec, sent.data, torch.from_numpy(out[part]).view(shape))
            size += len(sent.data)
        return out, size


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
    places = learner.matrices()
    plain = MatrixSender(places, way.rank) if way.codec is Codec.LOW_RANK else VectorSender(way.codec)
    return FeedbackSender(plain, len(learner.vector()), way.decay) if way.decay else plain


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
        """Of one worker's pseudo-gradients, and of the means, over all rounds."""
        self._workers = workers
        self._rule = rule
        self._momentum = np.zeros_like(self.anchor)
        self._out = [sender_of(out, worker) for worker in workers]
        self._back = sender_of(back, workers[0])

    def average(self) -> None:
        """A round: all workers stand on the next anchor after it."""
        mean, share = np.zeros_like(self.anchor), np.float32(1 / len(self._workers))
        for worker, sender in zip(self._workers, self._out, strict=True):
            decoded, size = sender.send(self.anchor - worker.vector())
            mean += share * decoded
        self.out_bytes += size
        result, size = self._back.send(mean)
        self.back_bytes += size
        self._rule.step(result, self.anchor, self._momentum, self.anchor, self._momentum)
        self.stand()

    def download(self, codec: Codec) -> None:
        """All workers get the anchor anew, through a codec, as joiners get it."""
        self.anchor, _ = VectorSender(codec).send(self.anchor)
        self.stand()

    def stand(self) -> None:
        """Puts all workers on the anchor."""
        for worker in self._workers:
            worker.write(self.anchor)
