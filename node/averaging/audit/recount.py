"""The recount of one piece of a committed round: what an audit computes and concludes. Runs on the averaging thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from blake3 import blake3

from node.averaging.anchor.anchor import Anchor
from node.averaging.anchor.shared_vector import Vector
from node.averaging.anchor.vector_math import add_scaled, squares
from node.averaging.exchange.all_reduce import ExchangeRecord
from node.averaging.exchange.partition import Piece
from node.averaging.exchange.reducer import read_encoding
from protocol.codecs import encoded_bytes
from protocol.identity.signatures import PieceSignatures, hash_of_piece
from swarm.averaging.audits import Reckoning, chance_of_audit, unexplained
from swarm.averaging.round_events import Caught
from swarm.vocabulary.averaging_messages import Evidence, SignedHash
from swarm.vocabulary.errors import ProtocolViolation, StateError
from swarm.vocabulary.types import PeerId, short


class Recount:
    """The recount of one piece of another's shard: the result, less what each contributor but the reducer has in it.

    Raises:
        StateError: the memory that it needs has been used for something else meanwhile.
    """

    def __init__(self, record: ExchangeRecord, piece: Piece, momentum: float) -> None:
        plan, source = record.plan, record.source
        if source is None or record.anchor is None:
            raise StateError("the next exchange has begun")
        self._record, self._piece = record, piece
        self._rest = _result(source.anchor, record.anchor, piece, momentum)
        self._result = math.sqrt(squares(self._rest))
        member, fragment = plan.members[plan.own], plan.layout.range_of(plan.first_chunk, plan.end_chunk)
        self._shares = [math.sqrt(piece.elements / (fragment.stop - fragment.start))]
        if plan.contributes:
            data = record.encoded(piece)
            if data is None:
                raise StateError("the next snapshot is being taken")
            room = np.empty(piece.elements, np.float32)
            add_scaled(read_encoding(plan.codecs.contribution, data, room), -member.coefficient, self._rest)
            self._shares.append(math.sqrt(source.squares(piece.part)) / member.norm if member.norm else 0.0)

    def check(
        self,
        signatures: PieceSignatures,
        evidence: Evidence | None,
        accuser: PeerId | None,
        shown: Sequence[SignedHash],
    ) -> Mapping[PeerId, SignedHash] | Caught:
        """The hash that each contributor but the reducer has signed, or who is caught by that already.

        Args:
            evidence: what the reducer shows; None when it did not answer.
            accuser, shown: who wants the audit, if it is not we, and what it shows.
        """
        message, reducer = self._record.plan.contribution(self._piece), self._piece.reducer
        due = frozenset(self._record.plan.contributors) - {reducer}
        signed: dict[PeerId, SignedHash] = {}
        for source, listed in ((reducer, () if evidence is None else evidence.signed), (accuser, shown)):
            for one in listed:
                if one.peer not in due or one == signed.get(one.peer):
                    continue
                if not signatures.holds(one.peer, message, one.hash, one.signature):
                    why = f"shows a signature of {short(one.peer)} that does not hold"
                    return self.caught(source or reducer, why)
                if one.peer in signed and signed[one.peer].hash != one.hash:
                    why = "signed two different contributions to one piece"
                    return self.caught(one.peer, why, (signed[one.peer], one))
                signed[one.peer] = one
            if source == reducer and evidence is not None and due - signed.keys():
                return self.caught(reducer, "cannot show what the contributors to its shard signed")
        return signed if due <= signed.keys() else self.caught(accuser or reducer, "accuses without proof")

    def take_away(self, signed: SignedHash, data: memoryview) -> Caught | None:
        """Subtracts what a contributor says that it signed from the rest."""
        if hash_of_piece(data) != signed.hash:
            return self.caught(signed.peer, "sent an auditor something else than what it had signed")
        plan = self._record.plan
        member = plan.members[signed.peer]
        try:
            room = np.empty(self._piece.elements, np.float32)
            values = read_encoding(plan.codecs.contribution, data, room)
        except ProtocolViolation as error:
            return self.caught(self._piece.reducer, f"took a contribution that is none: {error}")
        add_scaled(values, -member.coefficient, self._rest)
        if not plan.codecs.leave_over and member.norm:
            self._shares.append(math.sqrt(squares(values)) / member.norm)
        return None

    def judge(self, signed: Mapping[PeerId, SignedHash]) -> Caught | None:
        """Whether what is left can be the reducer's own part, when all others' have been taken away."""
        reducer, rest = self._record.plan.members[self._piece.reducer], math.sqrt(squares(self._rest))
        reckoning = Reckoning(self._piece.elements, rest, self._result, tuple(self._shares))
        why = unexplained(reckoning, reducer.coefficient, reducer.norm, self._record.plan.codecs.result)
        return None if why is None else self.caught(reducer.peer, why, tuple(signed.values()))

    def caught(self, peer: PeerId, why: str, signed: Sequence[SignedHash] = (), certain: bool = True) -> Caught:
        """The finding against a replica. `signed` proves it to others."""
        hashes = b"".join(sorted(one.peer.encode() + one.hash + one.signature for one in signed))
        proof = blake3(hashes).hexdigest() if signed else ""
        return Caught(peer, self._record.plan.roster.round.number, why, proof, certain)


def _result(before: Anchor, after: Anchor, piece: Piece, momentum: float) -> Vector:
    """What the outer step was taken with: it is the new momentum less what was left of the old one
    (`node.averaging.anchor.outer_step`)."""
    result = np.multiply(before.momentum[piece.part], np.float32(-momentum))
    np.add(after.momentum[piece.part], result, out=result)
    return result


def chance(record: ExchangeRecord, pieces: Sequence[Piece]) -> float:
    """The probability with which a member audits one of these pieces, which are those of others' shards."""
    plan, codecs = record.plan, record.plan.codecs
    contributors, members = frozenset(plan.contributors), len(plan.members)

    def contributed(piece: Piece, without: frozenset[PeerId]) -> int:
        return encoded_bytes(codecs.contribution, piece.elements) * len(contributors - without)

    all_bytes = sum(
        contributed(piece, frozenset({piece.reducer})) + encoded_bytes(codecs.result, piece.elements) * (members - 1)
        for piece in plan.pieces
    )
    fetched = sum(contributed(piece, frozenset({piece.reducer, plan.own})) for piece in pieces) // len(pieces)
    return chance_of_audit(all_bytes, members, fetched)
