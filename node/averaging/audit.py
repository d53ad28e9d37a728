"""Audits of rounds that have been committed: one random piece of another's shard is summed again from what its contributors have signed.

Everybody who committed knows each result: it is in the anchor's momentum. The reducer shows which hashes the others signed, the contributors send once more
what has these hashes, and what is then left of the result has to be what the reducer can have added itself (`swarm.rounds.audits`). Who finds
that it cannot tells all members, with the signed hashes; each of them does the same audit and believes nobody. The poisoned anchor stays: going back would let one
accuser cost everybody a round, and what a reducer can do to a single round is bounded by what its members object to before it is committed.

Of the latest exchange a member keeps hashes and signatures, 96 bytes a piece and contributor, and can encode its own contributions again until the next exchange
begins. The event loop never waits for it, and the arithmetic is done on the averaging thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

import numpy as np
from blake3 import blake3

from node.averaging.anchor import Anchor, Vector
from node.averaging.arrivals import piece_spec
from node.averaging.exchange import ExchangeMeans, ExchangeRecord
from node.averaging.pieces import Piece
from node.averaging.reduction import read_encoding
from node.averaging.shelf import Shelf
from node.averaging.vectors import add_scaled, squares
from node.compute import Priority
from protocol.codecs import encoded_bytes
from protocol.piece_signatures import hash_of_piece
from protocol.seams import Refusal
from protocol.tensor_spec import TensorSpec
from swarm.errors import PeerError, ProtocolViolation, StateError
from swarm.round_messages import (
    Accusation,
    AuditControl,
    AuditRefused,
    AuditRequest,
    Contribution,
    Evidence,
    RoundControl,
    SignedHash,
)
from swarm.rounds.audits import Reckoning, chance_of_audit, unexplained
from swarm.rounds.words import Caught, Event
from swarm.vocabulary import AnchorVersion, PeerId, short

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

ANSWER_S: Final = 30.0
"""For each answer of another member."""
PAUSES_S: Final = (0.05, 0.2, 0.5, 1.0)
"""After a refusal: whoever is asked may be a little behind us."""
PATIENCE: Final = 3
"""Audits in a row that a reducer leaves without an answer, and accusations of one accuser in which we find nothing, before it is an offence."""
MOST_DOUBTS: Final = 256
REQUESTS: Final = 32
"""That one member may ask of us in one round: an audit of its own and some for accusations, each a few times."""
AT_ONCE: Final = 4
"""Pieces in memory for audits of others, and for our own."""


@dataclass(slots=True)
class _Wanted:
    """A piece that we have asked for."""

    spec: TensorSpec
    whole: asyncio.Future[memoryview | None]
    buffer: memoryview | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A piece that is being summed again. Only on the averaging thread."""

    rest: Vector
    """The result less what has been taken away so far."""
    result: float
    shares: list[float]


class Auditor:
    """One replica's.

    Args:
        tell: sends a small message, or does not.
        report: told what the audits find.
        spawn: runs something beside everything else.
        random: whom it picks must not be known before the commit.
    """

    def __init__(
        self,
        own: PeerId,
        shelf: Shelf,
        means: ExchangeMeans,
        tell: Callable[[PeerId, RoundControl], None],
        report: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        random: Random,
    ) -> None:
        self.sent_bytes = self.received_bytes = 0
        """Of pieces, for audits."""
        self.verdicts = 0
        """Pieces that were summed again to the end, or somebody was caught."""
        self._own = own
        self._shelf = shelf
        self._means = means
        self._tell = tell
        self._report = report
        self._spawn = spawn
        self._random = random
        self._records: list[ExchangeRecord] = []
        """Of the latest two exchanges; only the last can be encoded again."""
        self._served: Counter[PeerId] = Counter()
        self._accusers: set[PeerId] = set()
        self._caught: set[PeerId] = set()
        """In the latest round."""
        self._unanswered: Counter[PeerId] = Counter()
        self._groundless: Counter[PeerId] = Counter()
        self._wanted: dict[tuple[PeerId, Contribution], _Wanted] = {}
        self._evidence: dict[tuple[PeerId, Contribution], asyncio.Future[Evidence | None]] = {}
        self._auditing = asyncio.Lock()
        self._under_way = 0
        self._sending, self._fetching = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE)

    @property
    def busy(self) -> bool:
        """Whether audits of ours are under way."""
        return self._under_way > 0

    # ---- the rounds' side --------------------------------------------------------------------------------------------

    def completed(self, record: ExchangeRecord) -> None:
        """An exchange is complete here: others that commit it before us may ask about it."""
        self.exchange_begins()
        self._records = [*self._records, record][-2:]
        self._served.clear()
        self._accusers.clear()
        self._caught.clear()

    def exchange_begins(self) -> None:
        """The memory that pieces of the last one could be encoded from is used for something else from now on. Hashes stay."""
        self._records = [replace(record, source=None, sent=None) for record in self._records]

    def committed(self, version: AnchorVersion) -> None:
        """The latest exchange holds. Audits one of its pieces, or none."""
        record = self._records[-1] if self._records else None
        if record is None or record.anchor.version != version:
            return
        pieces = [piece for piece in record.plan.pieces if piece.reducer != self._own]
        if pieces and self._random.random() < _chance(record, pieces):
            self._spawn(self.audit(record, self._random.choice(pieces)))

    def take_traffic(self) -> tuple[int, int]:
        """Bytes of pieces sent and received for audits since the last call."""
        traffic = self.sent_bytes, self.received_bytes
        self.sent_bytes = self.received_bytes = 0
        return traffic

    # ---- what comes in -----------------------------------------------------------------------------------------------

    def told(self, sender: PeerId, message: AuditControl) -> None:
        """Members of the latest exchanges are heard, about those."""
        record = next((record for record in self._records if record.plan.roster.round == message.round), None)
        if record is None or sender not in record.plan.members:
            if isinstance(message, AuditRequest):
                self._refuse(sender, message)
            return
        match message:
            case AuditRequest():
                self._asked(sender, record, message)
            case Evidence() | AuditRefused():
                self._answered(sender, message)
            case Accusation():
                self._accused(sender, record, message)

    def wants(self, sender: PeerId, message: object) -> bool:
        """Whether this is a piece that we have asked for."""
        return isinstance(message, Contribution) and (sender, message) in self._wanted

    def admit(self, sender: PeerId, message: Contribution, tensor: TensorSpec) -> memoryview | Refusal:
        """To be called for what it `wants`."""
        wanted = self._wanted[sender, message]
        if wanted.buffer is not None or tensor != wanted.spec:
            return Refusal(False, "this is not what was asked for")
        wanted.buffer = np.empty(tensor.byte_length, np.uint8).data
        return wanted.buffer

    def received(self, sender: PeerId, message: Contribution, buffer: memoryview) -> bool:
        """Whether it was asked for."""
        wanted = self._wanted.get((sender, message))
        if wanted is None or wanted.buffer is not buffer:
            return False
        self.received_bytes += buffer.nbytes
        if not wanted.whole.done():
            wanted.whole.set_result(buffer)
        return True

    def broken_off(self, sender: PeerId, message: Contribution, buffer: memoryview) -> bool:
        """Likewise."""
        wanted = self._wanted.get((sender, message))
        if wanted is None or wanted.buffer is not buffer:
            return False
        if not wanted.whole.done():
            wanted.whole.set_result(None)
        return True

    # ---- answering ---------------------------------------------------------------------------------------------------

    def _asked(self, sender: PeerId, record: ExchangeRecord, request: AuditRequest) -> None:
        piece = record.plan.piece_at(request.first_chunk, request.end_chunk)
        self._served[sender] += 1
        if piece is None or self._served[sender] > REQUESTS:
            self._refuse(sender, request)
        elif piece.reducer == self._own:
            signed = tuple(record.signed.get(piece, {}).values())
            self._tell(sender, Evidence(request.round, request.first_chunk, request.end_chunk, signed))
        elif piece in record.own:
            self._spawn(self._serve(sender, record, piece))
        else:
            self._refuse(sender, request)

    def _refuse(self, sender: PeerId, request: AuditRequest) -> None:
        self._tell(sender, AuditRefused(request.round, request.first_chunk, request.end_chunk))

    async def _serve(self, asker: PeerId, record: ExchangeRecord, piece: Piece) -> None:
        async with self._sending:
            message = record.plan.contribution(piece)
            data = await self._on_thread(record.encoded, piece)
            if data is None:
                self._refuse(asker, AuditRequest(message.round, message.first_chunk, message.end_chunk))
                return
            spec = piece_spec(record.plan.codecs.contribution, piece.elements)
            try:
                async with asyncio.timeout(ANSWER_S):
                    signed = replace(message, signature=record.own[piece].signature)
                    await self._means.transport.send(asker, signed, spec, data)
            except (PeerError, TimeoutError) as error:
                log.debug("%s did not take a piece that it asked for: %s", short(asker), error)
                return
            self.sent_bytes += data.nbytes

    # ---- asking ------------------------------------------------------------------------------------------------------

    async def audit(
        self, record: ExchangeRecord, piece: Piece, accuser: PeerId | None = None, shown: Sequence[SignedHash] = ()
    ) -> None:
        """Sums a piece again and reports whoever cannot be honest; when that is our own finding, all members are told.

        Args:
            accuser, shown: who wants the piece to be audited, and what it says that others have signed.
        """
        self._under_way += 1
        try:
            async with self._auditing:
                caught = await self._audited(record, piece, accuser, shown)
        finally:
            self._under_way -= 1
        if caught is None or caught.peer in self._caught:
            return
        if caught.certain:
            self._caught.add(caught.peer)
        self._report(caught)

    async def _audited(
        self, record: ExchangeRecord, piece: Piece, accuser: PeerId | None, shown: Sequence[SignedHash]
    ) -> Caught | None:
        begun = await self._on_thread(self._begin, record, piece)
        if begun is None:
            return None
        others = frozenset(record.plan.contributors) - {self._own, piece.reducer}
        signed: Mapping[PeerId, SignedHash] = {}
        if others:
            evidence = await self._evidence_of(record, piece)
            if evidence is None and not shown:
                why = "does not say what the contributors to its shard signed"
                return self._doubted(self._unanswered, _caught(record, piece.reducer, why, certain=False))
            if evidence is not None:
                self._unanswered.pop(piece.reducer, None)
            judged = await self._on_thread(self._check, record, piece, evidence, accuser, shown)
            if isinstance(judged, Caught):
                return judged
            signed = judged
        fetched = await asyncio.gather(
            *(self._take_away(record, piece, begun, signed[peer]) for peer in sorted(others))
        )
        found = next((one for one in fetched if isinstance(one, Caught)), None)
        if found is None and False in fetched:
            return None
        self.verdicts += 1
        found = found or await self._on_thread(self._judge, record, piece, begun, signed)
        if found is None and accuser is not None:
            why = f"accuses {short(piece.reducer)} of a piece that is as it should be"
            return self._doubted(self._groundless, _caught(record, accuser, why, certain=False))
        if found is not None and accuser is None and signed:
            self._accuse(record, piece, found.peer, signed)
        return found

    def _accuse(
        self, record: ExchangeRecord, piece: Piece, culprit: PeerId, signed: Mapping[PeerId, SignedHash]
    ) -> None:
        message = record.plan.contribution(piece)
        accusation = Accusation(message.round, message.first_chunk, message.end_chunk, tuple(signed.values()))
        for peer in record.plan.others:
            if peer != culprit:
                self._tell(peer, accusation)

    def _doubted(self, doubts: Counter[PeerId], caught: Caught) -> Caught | None:
        """What may happen once, and is an offence when it happens again and again."""
        doubts[caught.peer] += 1
        if doubts[caught.peer] >= PATIENCE:
            del doubts[caught.peer]
            return caught
        if len(doubts) > MOST_DOUBTS:
            doubts.clear()
        return None

    async def _evidence_of(self, record: ExchangeRecord, piece: Piece) -> Evidence | None:
        """What the reducer says that others have signed; None when it says nothing."""
        key = (piece.reducer, record.plan.contribution(piece))

        async def once() -> Evidence | None:
            self._evidence[key] = asyncio.get_running_loop().create_future()
            self._request(*key)
            try:
                return await self._evidence[key]
            finally:
                del self._evidence[key]

        return await _several_times(once)

    async def _take_away(
        self, record: ExchangeRecord, piece: Piece, begun: _Begun, signed: SignedHash
    ) -> Caught | bool:
        """Fetches what a contributor has signed and takes its part away from the rest. False when it cannot be had."""
        async with self._fetching:
            data = await self._fetch(record, piece, signed.peer)
            return False if data is None else await self._on_thread(self._subtract, record, piece, begun, signed, data)

    async def _fetch(self, record: ExchangeRecord, piece: Piece, peer: PeerId) -> memoryview | None:
        key = (peer, record.plan.contribution(piece))
        spec = piece_spec(record.plan.codecs.contribution, piece.elements)

        async def once() -> memoryview | None:
            wanted = self._wanted[key] = _Wanted(spec, asyncio.get_running_loop().create_future())
            self._request(*key)
            try:
                return await wanted.whole
            finally:
                del self._wanted[key]

        return await _several_times(once)

    def _request(self, peer: PeerId, piece: Contribution) -> None:
        self._tell(peer, AuditRequest(piece.round, piece.first_chunk, piece.end_chunk))

    def _answered(self, sender: PeerId, message: Evidence | AuditRefused) -> None:
        key = (sender, Contribution(message.round, message.first_chunk, message.end_chunk))
        waiting, wanted = self._evidence.get(key), self._wanted.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(message if isinstance(message, Evidence) else None)
        elif isinstance(message, AuditRefused) and wanted is not None and not wanted.whole.done():
            wanted.whole.set_result(None)

    def _accused(self, sender: PeerId, record: ExchangeRecord, accusation: Accusation) -> None:
        """One audit for each accuser and round."""
        piece = record.plan.piece_at(accusation.first_chunk, accusation.end_chunk)
        if piece is None or piece.reducer in (self._own, sender) or sender in self._accusers:
            return
        if piece.reducer in self._caught or record is not self._records[-1]:
            return
        self._accusers.add(sender)
        self._spawn(self.audit(record, piece, sender, accusation.signed))

    # ---- on the averaging thread -------------------------------------------------------------------------------------

    def _begin(self, record: ExchangeRecord, piece: Piece) -> _Begun | None:
        """The result less our own part of it. None when it cannot be had any more."""
        plan, source = record.plan, record.source
        if source is None:
            return None
        try:
            with ExitStack() as pins:
                for anchor in (source.anchor, record.anchor):
                    pins.enter_context(self._shelf.pinned(anchor))
                rest = _result(source.anchor, record.anchor, piece, self._means.rule.momentum)
        except StateError:
            return None
        result = math.sqrt(squares(rest))
        beside, member = record.beside[piece], plan.members[self._own]
        shares = [math.sqrt(beside.share)]
        if plan.contributes:
            data = record.encoded(piece)
            if data is None:
                return None
            room = np.empty(piece.elements, np.float32)
            add_scaled(read_encoding(plan.codecs.contribution, data, room), -member.coefficient, rest)
            shares.append(math.sqrt(beside.own_squares) / member.norm if member.norm else 0.0)
        return _Begun(rest, result, shares)

    def _check(
        self,
        record: ExchangeRecord,
        piece: Piece,
        evidence: Evidence | None,
        accuser: PeerId | None,
        shown: Sequence[SignedHash],
    ) -> Mapping[PeerId, SignedHash] | Caught:
        """Which hash each contributor but the reducer has signed, or who is caught by that already."""
        message, reducer = record.plan.contribution(piece), piece.reducer
        due = frozenset(record.plan.contributors) - {reducer}
        signed: dict[PeerId, SignedHash] = {}
        sources = ((reducer, () if evidence is None else evidence.signed), (accuser, shown))
        for source, listed in sources:
            for one in listed:
                if one.peer not in due or one == signed.get(one.peer):
                    continue
                if not self._means.signatures.holds(one.peer, message, one.hash, one.signature):
                    return _caught(
                        record, source or reducer, f"shows a signature of {short(one.peer)} that does not hold"
                    )
                if one.peer in signed and signed[one.peer].hash != one.hash:
                    both = {one.peer: signed[one.peer], reducer: one}
                    return _caught(record, one.peer, "signed two different contributions to one piece", both)
                signed[one.peer] = one
            if source == reducer and evidence is not None and due - signed.keys():
                return _caught(record, reducer, "cannot show what the contributors to its shard signed")
        return signed if due <= signed.keys() else _caught(record, accuser or reducer, "accuses without proof")

    def _subtract(
        self, record: ExchangeRecord, piece: Piece, begun: _Begun, signed: SignedHash, data: memoryview
    ) -> Caught | bool:
        if hash_of_piece(data) != signed.hash:
            return _caught(record, signed.peer, "sent an auditor something else than what it had signed")
        member, codecs = record.plan.members[signed.peer], record.plan.codecs
        try:
            values = read_encoding(codecs.contribution, data, np.empty(piece.elements, np.float32))
        except ProtocolViolation as error:
            return _caught(record, piece.reducer, f"took a contribution that is none: {error}")
        add_scaled(values, -member.coefficient, begun.rest)
        if not codecs.leave_over and member.norm:
            begun.shares.append(math.sqrt(squares(values)) / member.norm)
        return True

    def _judge(
        self, record: ExchangeRecord, piece: Piece, begun: _Begun, signed: Mapping[PeerId, SignedHash]
    ) -> Caught | None:
        reducer = record.plan.members[piece.reducer]
        rest = math.sqrt(squares(begun.rest))
        reckoning = Reckoning(piece.elements, rest, begun.result, tuple(begun.shares))
        why = unexplained(reckoning, reducer.coefficient, reducer.norm, record.plan.codecs.result)
        return None if why is None else _caught(record, reducer.peer, why, signed)

    async def _on_thread(self, job: Callable[..., Any], *arguments: object) -> Any:
        return await self._means.thread.run(Priority.UPKEEP, partial(job, *arguments))


async def _several_times(ask: Callable[[], Awaitable[Answer | None]]) -> Answer | None:
    """The first answer that is none of None; None when the time is over."""
    try:
        async with asyncio.timeout(ANSWER_S):
            for pause_s in PAUSES_S:
                answer = await ask()
                if answer is not None:
                    return answer
                await asyncio.sleep(pause_s)
            return await ask()
    except TimeoutError:
        return None


def _result(before: Anchor, after: Anchor, piece: Piece, momentum: float) -> Vector:
    """What the outer step was taken with: it is the new momentum less what was left of the old one (`node.averaging.outer`)."""
    result = np.multiply(before.momentum[piece.part], np.float32(-momentum))
    np.add(after.momentum[piece.part], result, out=result)
    return result


def _chance(record: ExchangeRecord, pieces: Sequence[Piece]) -> float:
    """That we audit one of these pieces."""
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


def _caught(
    record: ExchangeRecord,
    peer: PeerId,
    why: str,
    signed: Mapping[PeerId, SignedHash] | None = None,
    certain: bool = True,
) -> Caught:
    hashes = (one.hash + one.signature for _, one in sorted((signed or {}).items()))
    proof = blake3(b"".join(hashes)).hexdigest() if signed else ""
    return Caught(peer, record.plan.roster.round.number, why, proof, certain)
