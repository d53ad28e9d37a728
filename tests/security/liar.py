"""A node that computes honestly and lies in rounds: `python -m tests.security.liar KIND join ...`, the rest as `skipstone` has it.

It is the real node but for what it contributes, so it is invited, convenes on its turn and reduces a shard like the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from node.averaging.anchor import Vector
from node.averaging.keeper import ReplicaKeeper, Snapshot
from node.averaging.pieces import Piece
from node.averaging.reduction import Reduction
from node.averaging.source import Source
from node.cli.app import main
from protocol.tensor_spec import TensorSpec
from protocol.transport import GrpcTransport
from swarm.messages import TensorMessage
from swarm.round_messages import Contribution
from swarm.vocabulary import Codec, PeerId

MILLION = 1e6

Sent = tuple[Contribution, TensorSpec, memoryview]


class _Scaled(Source):
    """A million times our update."""

    factor = MILLION

    def write(self, part: slice, out: Vector, factor: float) -> None:
        super().write(part, out, factor)
        np.multiply(out, np.float32(self.factor), out=out)

    def encode(self, part: slice, codec: Codec, out: memoryview, room: Vector) -> None:
        assert codec is Codec.NONE
        super().encode(part, codec, out, room)
        values = np.frombuffer(out, dtype=np.float32)
        np.multiply(values, np.float32(self.factor), out=values)


class _NotANumber(_Scaled):
    factor = float("nan")


def another_source(kind: type[_Scaled], norm: float) -> Callable[[], None]:
    """The pseudo-gradient is another one; its declared norm is this many times that of the real one."""

    honestly = ReplicaKeeper.snapshot

    async def snapshot(self: ReplicaKeeper) -> Snapshot:
        honest = await honestly(self)
        source = kind(honest.source.anchor, honest.source.snapshot)
        return replace(honest, source=source, norm=honest.norm * norm)

    def install() -> None:
        ReplicaKeeper.snapshot = snapshot  # type: ignore[method-assign]

    return install


def another_message(change: Callable[[Sent], Sent]) -> Callable[[], None]:
    """Contributions are changed on their way out."""
    honestly = GrpcTransport.send

    async def send(
        self: GrpcTransport, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview
    ) -> None:
        if isinstance(message, Contribution):
            message, tensor, data = change((message, tensor, data))
        await honestly(self, peer, message, tensor, data)

    def install() -> None:
        GrpcTransport.send = send  # type: ignore[method-assign]

    return install


def another_mean(change: Callable[[Vector], Vector]) -> Callable[[], None]:
    """What it reduces comes out as something else, for all alike, itself included."""
    honestly = Reduction.finish

    def finish(self: Reduction, piece: Piece) -> memoryview:
        mean = np.frombuffer(honestly(self, piece), dtype=np.float32)
        others = len(self._plan.others) > 1
        return np.ascontiguousarray(change(mean) if others else mean, np.float32).view(np.uint8).data

    def install() -> None:
        Reduction.finish = finish  # type: ignore[method-assign]

    return install


def half_of_it(sent: Sent) -> Sent:
    message, tensor, data = sent
    less = TensorSpec((tensor.shape[0] // 2,), tensor.dtype, tensor.codec)
    return message, less, data[: less.byte_length]


def of_the_next_round(sent: Sent) -> Sent:
    message, tensor, data = sent
    return replace(message, round=replace(message.round, number=message.round.number + 1)), tensor, data


def any_bytes(sent: Sent) -> Sent:
    message, tensor, data = sent
    return message, tensor, memoryview(os.urandom(data.nbytes))


def the_truth() -> None:
    """For comparison: a replica more, and no lie."""


LIES: dict[str, Callable[[], None]] = {
    "honest": the_truth,
    "nan": another_source(_NotANumber, norm=1.0),
    "million": another_source(_Scaled, norm=1.0),
    "million-declared": another_source(_Scaled, norm=MILLION),
    "shapes": another_message(half_of_it),
    "round": another_message(of_the_next_round),
    "garbage": another_message(any_bytes),
    "mean-reversed": another_mean(np.negative),
    "mean-elsewhere": another_mean(lambda mean: np.roll(mean, len(mean) // 2 + 1)),
}

if __name__ == "__main__":
    LIES[sys.argv.pop(1)]()
    main()
