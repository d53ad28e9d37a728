"""A node that computes honestly but cheats in rounds: `python lab/lying_node.py --seed N -- ARGUMENTS`.

The seed chooses one lie per round. The real node does the rest, so the liar is invited, leads and reduces in turn.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from node.averaging.anchor.shared_vector import Vector
from node.averaging.exchange.pieces import Piece
from node.averaging.exchange.reduction import Reduction, UpdateSource
from node.averaging.round_runner import ReplicaSync, RoundRunner, Snapshot
from node.network.local_peer import LocalPeer
from protocol.codecs import encode_into
from protocol.identity.signatures import EntrySigner
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.transport.grpc_transport import GrpcTransport
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.averaging_messages import (
    Accusation,
    AuditRefused,
    AuditRequest,
    Commit,
    Contribution,
    Dissolved,
    Entry,
    Evidence,
    Prepared,
    Progress,
    Pulse,
    Reduced,
    RoundId,
    SignedRoster,
    StateChunk,
)
from swarm.vocabulary.pipeline_messages import ControlMessage, TensorMessage
from swarm.vocabulary.types import AnchorVersion, Codec, PeerId

# How much longer a pseudo-gradient gets; how many rounds ahead a liar claims to be.
LONG: Final = 1000.0
STRETCH: Final = 2.0
PIECES_FALSIFIED: Final = 4
FAR: Final = 2**24

# Keep the order: a seed chooses by position.
LIES: Final = (
    "contributes the negative, a thousand times as long",
    "contributes NaN",
    "contributes bytes that it did not sign",
    "contributes more than it declares",
    "claims far more steps and tokens",
    "claims an invented result",
    "reduces to the negative mean",
    "reduces to zero",
    "reduces to noise of the same length",
    "reduces to twice the mean",
    "falsifies one piece in four",
    "sends results that it did not sign",
    "omits a member from its rosters",
    "changes an entry in its rosters",
    "sends each member another roster",
    "commits an unprepared result",
    "dissolves every attempt that it leads",
    "rejects the data of every member",
    "waits for every member",
    "prepares a different result",
    "refuses audits",
    "shows auditors forged signatures",
    "accuses instead of auditing",
    "announces a round far ahead",
    "serves state that does not match its digest",
)


class Liar:
    """Choice of the lie that this process tells in a round, drawn from the seed and the round's number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lie = ""
        self.noise = np.random.default_rng(seed)

    def begin(self, number: int) -> None:
        self._lie = random.Random(f"{self._seed} {number}").choice(LIES)  # noqa: S311 - no secret

    def tells(self, lie: str) -> bool:
        assert lie in LIES
        return lie == self._lie


@dataclass(frozen=True, slots=True, eq=False)
class LyingSource(UpdateSource):
    """This replica's pseudo-gradient, falsely multiplied by `factor`."""

    factor: float
    noise: bool = False
    """Whether a random direction, the same for every liar, replaces the true one."""

    def write(self, part: slice, out: Vector, factor: float) -> None:
        UpdateSource.write(self, part, out, factor)
        if self.noise:
            _replace_by_noise(out, np.random.default_rng(part.start))
        np.multiply(out, np.float32(self.factor), out=out)

    def encode(self, part: slice, codec: Codec, out: memoryview, room: Vector) -> None:
        # A codec cannot encode NaN; without a codec it is sent as is.
        values = np.empty(part.stop - part.start, np.float32)
        self.write(part, values, 1.0)
        encode_into(codec, np.nan_to_num(values) if codec is not Codec.NONE else values, out)


def multiplied(source: UpdateSource, factor: float, *, noise: bool = False) -> LyingSource:
    """Returns the source of the same pseudo-gradient, multiplied by `factor`, or of noise of that length."""
    return LyingSource(source.anchor, source.snapshot, factor, noise)


def _replace_by_noise(values: Vector, numbers: np.random.Generator) -> None:
    noise = numbers.standard_normal(len(values)).astype(np.float32)
    values[:] = noise * (np.linalg.norm(values) / np.linalg.norm(noise))


def install(liar: Liar) -> None:
    """Patches the node's classes, so that every node of this process tells the lies of `liar`."""
    _lie_as_contributor(liar)
    _lie_as_reducer(liar)
    _lie_in_messages(liar)
    _lie_in_announcements(liar)


def _lie_as_contributor(liar: Liar) -> None:
    take, fix, signer = RoundRunner.take_snapshot, ReplicaSync.snapshot, EntrySigner.sign

    async def take_snapshot(self: RoundRunner, round_id: RoundId) -> Snapshot | None:
        liar.begin(round_id.number)
        return await take(self, round_id)

    async def snapshot(self: ReplicaSync) -> Snapshot:
        honest = await fix(self)
        if liar.tells("contributes the negative, a thousand times as long"):
            return replace(honest, source=multiplied(honest.source, -LONG), norm=honest.norm * LONG)
        if liar.tells("contributes NaN"):
            return replace(honest, source=multiplied(honest.source, float("nan")))
        if liar.tells("contributes more than it declares"):
            return replace(honest, norm=honest.norm * 1e-30)
        return honest

    def sign(self: EntrySigner, entry: Entry) -> Entry:
        if liar.tells("claims far more steps and tokens"):
            entry = replace(entry, steps=2**31, tokens=2**47)
        if liar.tells("claims an invented result"):
            made_up = AnchorVersion(entry.round.number, 1, 2**40, entry.base.fragment, os.urandom(32))
            entry = replace(entry, staged=made_up)
        return signer(self, entry)

    _replace(RoundRunner, take_snapshot=take_snapshot)
    _replace(ReplicaSync, snapshot=snapshot)
    _replace(EntrySigner, sign=sign)


def _lie_as_reducer(liar: Liar) -> None:
    finish_sum = Reduction.finish

    def finish(self: Reduction, piece: Piece) -> memoryview:
        total = self._sum(piece)
        if liar.tells("reduces to the negative mean"):
            np.multiply(total, np.float32(-1), out=total)
        elif liar.tells("reduces to zero"):
            total.fill(0.0)
        elif liar.tells("reduces to noise of the same length"):
            _replace_by_noise(total, liar.noise)
        elif liar.tells("reduces to twice the mean"):
            np.multiply(total, np.float32(STRETCH), out=total)
        elif liar.tells("falsifies one piece in four") and liar.noise.integers(PIECES_FALSIFIED) == 0:
            total[:] = liar.noise.permutation(total)
        return finish_sum(self, piece)

    _replace(Reduction, finish=finish)


def _lie_in_messages(liar: Liar) -> None:
    send_control_honestly, send_honestly = GrpcTransport.send_control, GrpcTransport.send

    async def send_control(self: GrpcTransport, peer: PeerId, message: ControlMessage) -> None:
        await send_control_honestly(self, peer, _changed(liar, peer, message))

    async def send(
        self: GrpcTransport, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview
    ) -> None:
        other_bytes = (
            (isinstance(message, Contribution) and liar.tells("contributes bytes that it did not sign"))
            or (isinstance(message, StateChunk) and liar.tells("serves state that does not match its digest"))
            or (isinstance(message, Reduced) and liar.tells("sends results that it did not sign"))
        )
        await send_honestly(self, peer, message, tensor, memoryview(os.urandom(data.nbytes)) if other_bytes else data)

    _replace(GrpcTransport, send_control=send_control, send=send)


def _changed(liar: Liar, peer: PeerId, message: ControlMessage) -> ControlMessage:
    """Returns the control message to send to `peer`: a false one if the current lie requires it, else `message`."""
    match message:
        case SignedRoster(entries=entries) if liar.tells("omits a member from its rosters"):
            others = [entry for entry in entries if entry.peer not in (peer, message.round.convener)]
            return replace(message, entries=tuple(entry for entry in entries if entry not in others[:1]))
        case SignedRoster(entries=entries) if liar.tells("changes an entry in its rosters"):
            return replace(message, entries=tuple(replace(entry, tokens=entry.tokens // 64) for entry in entries))
        case SignedRoster(entries=entries) if liar.tells("sends each member another roster"):
            return replace(
                message, entries=tuple(entry for entry in entries if entry.peer in (peer, message.round.convener))
            )
        case Pulse(attempt) if liar.tells("dissolves every attempt that it leads"):
            return Dissolved(attempt, "for no reason")
        case Pulse() if liar.tells("rejects the data of every member"):
            return replace(message, rejected=(peer,))
        case Pulse() if liar.tells("waits for every member"):
            return replace(message, waiting_for=(peer,))
        case Prepared(_, version) if liar.tells("prepares a different result"):
            return replace(message, version=replace(version, digest=os.urandom(32)))
        case Commit(_, version) if liar.tells("commits an unprepared result"):
            return replace(message, version=replace(version, digest=os.urandom(32)))
        case Evidence(attempt, first, end) if liar.tells("refuses audits"):
            return AuditRefused(attempt, first, end)
        case Evidence(signed=signed) if liar.tells("shows auditors forged signatures"):
            return replace(message, signed=tuple(replace(each, signature=os.urandom(64)) for each in signed))
        case AuditRequest(attempt, first, end) if liar.tells("accuses instead of auditing"):
            return Accusation(attempt, first, end, ())
        case Progress() if liar.tells("claims far more steps and tokens"):
            return replace(message, steps=2**31, tokens=2**47)
        case _:
            return message


def _lie_in_announcements(liar: Liar) -> None:
    announce = LocalPeer.announcement

    def announcement(self: LocalPeer) -> Announcement:
        honest = announce(self)
        if honest.anchor is None or not liar.tells("announces a round far ahead"):
            return honest
        return replace(honest, anchor=replace(honest.anchor, round=honest.anchor.round + FAR, tokens=2**47))

    _replace(LocalPeer, announcement=announcement)


def _replace(kind: type, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        # A renamed method must fail loudly.
        assert callable(getattr(kind, name)), f"{kind.__name__}.{name} is gone, so the lie would have no effect"
        setattr(kind, name, function)


def main() -> None:
    """Installs the lies, then runs `skipstone ARGUMENTS`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("arguments", nargs="+")
    given = parser.parse_args()
    install(Liar(given.seed))
    sys.argv = ["skipstone", *given.arguments]
    from node.cli.app import main as skipstone

    skipstone()


if __name__ == "__main__":
    main()
