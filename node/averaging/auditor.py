"""Audits of committed rounds: a member recomputes a random piece that another one summed, from signed contributions.

An auditor sends its accusation to all members, and each of them audits the piece too. A wrong anchor stays in use,
because otherwise one accusation could undo a round.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from blake3 import blake3

from node.averaging.anchor.anchor import hash_of
from node.averaging.anchor.shared_vector import Vector, add_scaled, squares
from node.averaging.exchange.all_reduce import ExchangeMeans, ExchangeRecord
from node.averaging.exchange.pieces import Piece, piece_spec
from node.averaging.exchange.reduction import opposed, read_encoding, sample_of
from node.concurrency.compute_thread import Priority
from protocol.codecs import encoded_bytes
from protocol.identity.signatures import PieceSignatures
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal
from swarm.averaging.round_events import Caught, Event
from swarm.averaging.trust import ROUNDS_BETWEEN, TIMES_OPPOSED, Opponents, Reckoning, chance_of_audit, unexplained
from swarm.compression.round_codecs import LEAVES_OVER
from swarm.vocabulary import averaging_messages as messages
from swarm.vocabulary.averaging_messages import Contribution, SignedHash
from swarm.vocabulary.errors import PeerError, ProtocolViolation, StateError
from swarm.vocabulary.types import AnchorVersion, PeerId, short

log = logging.getLogger(__name__)


class Recount:
    """Recomputation of one piece that another member summed. Raises StateError if the inputs were overwritten."""

    def __init__(self, record: ExchangeRecord, piece: Piece, momentum: float) -> None:
        plan, source = record.plan, record.source
        if source is None or record.anchor is None:
            raise StateError("the next exchange has started")
        self._record, self._piece = record, piece
        # The two anchors' momentum gives the mean that was applied. Without all contributions, only rounding remains.
        self._rest: Vector = np.multiply(source.anchor.momentum[piece.part], np.float32(-momentum))
        np.add(record.anchor.momentum[piece.part], self._rest, out=self._rest)
        self._result = math.sqrt(squares(self._rest))
        member, fragment = plan.members[plan.own], plan.layout.range_of(plan.first_chunk, plan.end_chunk)
        self._shares = [math.sqrt(piece.elements / (fragment.stop - fragment.start))]
        self.samples: dict[PeerId, Vector] = {}
        if plan.contributes:  # our own contribution needs no download
            data = record.encoded(piece)
            if data is None:
                raise StateError("the next snapshot is being taken")
            values = read_encoding(plan.codec, data, np.empty(piece.elements, np.float32))
            self.samples[plan.own] = sample_of(values)
            add_scaled(values, -member.coefficient, self._rest)
            self._shares.append(math.sqrt(source.squares(piece.part)) / member.norm if member.norm else 0.0)

    def check(
        self,
        signatures: PieceSignatures,
        evidence: messages.Evidence | None,
        accuser: PeerId | None,
        shown: Sequence[SignedHash],
    ) -> Mapping[PeerId, SignedHash] | Caught:
        """Checks the signed hashes shown by the piece's reducer and an accuser. Returns them by signer, or a liar."""
        message, reducer = self._record.plan.contribution(self._piece), self._piece.reducer
        due = frozenset(self._record.plan.contributors) - {reducer}
        signed: dict[PeerId, SignedHash] = {}
        # Check the reducer's evidence before the accuser's.
        for source, listed in ((reducer, () if evidence is None else evidence.signed), (accuser, shown)):
            for one in listed:
                if one.peer not in due or one == signed.get(one.peer):  # skip non-contributors and repetitions
                    continue
                if not signatures.holds(one.peer, message, one.hash, one.signature):
                    why = f"shows an invalid signature of {short(one.peer)}"
                    return self.caught(source or reducer, why)
                if one.peer in signed and signed[one.peer].hash != one.hash:  # two signatures on one piece prove a lie
                    why = "signed two different contributions to one piece"
                    return self.caught(one.peer, why, (signed[one.peer], one))
                signed[one.peer] = one
            # A reducer keeps the signature of every contribution that it sums.
            if source == reducer and evidence is not None and due - signed.keys():
                return self.caught(reducer, "cannot show the signed contributions to its shard")
        return signed if due <= signed.keys() else self.caught(accuser or reducer, "accuses without proof")

    def take_away(self, signed: SignedHash, data: memoryview) -> Caught | None:
        if hash_of(data) != signed.hash:
            return self.caught(signed.peer, "sent an auditor other bytes than it had signed")
        plan = self._record.plan
        member = plan.members[signed.peer]
        try:
            values = read_encoding(plan.codec, data, np.empty(self._piece.elements, np.float32))
        except ProtocolViolation as error:
            return self.caught(self._piece.reducer, f"accepted an invalid contribution: {error}")
        self.samples[signed.peer] = sample_of(values)
        add_scaled(values, -member.coefficient, self._rest)
        # With a codec that drops values, the encoding is shorter than the declared norm.
        if plan.codec not in LEAVES_OVER and member.norm:
            self._shares.append(math.sqrt(squares(values)) / member.norm)
        return None

    def judge(self, signed: Mapping[PeerId, SignedHash]) -> Caught | None:
        if self._piece.reducer in self._record.plan.contributors:
            self.samples[self._piece.reducer] = sample_of(self._rest)
        reducer, rest = self._record.plan.members[self._piece.reducer], math.sqrt(squares(self._rest))
        reckoning = Reckoning(self._piece.elements, rest, self._result, tuple(self._shares))
        why = unexplained(reckoning, reducer.coefficient, reducer.norm, self._record.plan.result_codec)
        return None if why is None else self.caught(reducer.peer, why, tuple(signed.values()))

    def caught(self, peer: PeerId, why: str, signed: Sequence[SignedHash] = (), certain: bool = True) -> Caught:
        hashes = b"".join(sorted(one.peer.encode() + one.hash + one.signature for one in signed))
        proof = blake3(hashes).hexdigest() if signed else ""
        return Caught(peer, self._record.plan.roster.round.number, why, proof, certain)


def chance(record: ExchangeRecord, pieces: Sequence[Piece]) -> float:
    """Returns the probability with which this member audits one of `pieces`, all summed by other members."""
    plan, codec, result = record.plan, record.plan.codec, record.plan.result_codec
    if not plan.shards[plan.own]:
        return 1.0  # it receives no contributions otherwise, so this adds no traffic
    contributors, members = frozenset(plan.contributors), len(plan.members)

    def contributed(piece: Piece, without: frozenset[PeerId]) -> int:
        return encoded_bytes(codec, piece.elements) * len(contributors - without)

    all_bytes = sum(
        contributed(piece, frozenset({piece.reducer})) + encoded_bytes(result, piece.elements) * (members - 1)
        for piece in plan.pieces
    )
    fetched = sum(contributed(piece, frozenset({piece.reducer, plan.own})) for piece in pieces) // len(pieces)
    return chance_of_audit(all_bytes, members, fetched)


Answer = TypeVar("Answer")
Result = TypeVar("Result")


ANSWER_S: Final = 30.0
PAUSES_S: Final = (0.05, 0.2, 0.5, 1.0)  # Pauses before retries after a refusal. The peer may be slightly behind us
PATIENCE: Final = 3  # Unanswered audits of one reducer, or unfounded accusations by one accuser, before it is reported
REQUESTS: Final = 32  # Requests per member and round: its own audit and some for accusations, each with retries
AT_ONCE: Final = 4  # Pieces in memory at once, both for audits by others and for our own


@dataclass(slots=True)
class _Wanted:
    """A contribution that an audit requested from another member, and its arrival."""

    spec: TensorSpec
    whole: asyncio.Future[memoryview | None]
    buffer: memoryview | None = None


class Auditor:
    """Auditor of the sums that other replicas computed. Also answers other replicas' audits of this one."""

    def __init__(
        self,
        own: PeerId,
        means: ExchangeMeans,
        send: Callable[[PeerId, messages.AuditControl], object],
        report: Callable[[Event], None],
        begin: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.sent_bytes = self.received_bytes = 0
        self.verdicts = 0  # Audits that reached a verdict
        self._own = own
        self._means = means
        self._send = send
        self._report = report
        self._begin = begin
        self._random = means.random
        # Latest two exchanges. Only the last one's contributions can be encoded again.
        self._records: list[ExchangeRecord] = []
        self._served: Counter[PeerId] = Counter()
        self._accusers: set[PeerId] = set()
        self._caught: set[PeerId] = set()
        self._unanswered: Counter[PeerId] = Counter()
        self._groundless: Counter[PeerId] = Counter()
        self._wanted: dict[tuple[PeerId, Contribution], _Wanted] = {}
        self._evidence: dict[tuple[PeerId, Contribution], asyncio.Future[messages.Evidence | None]] = {}
        self._opponents = Opponents()
        self._suspected_in = -ROUNDS_BETWEEN
        self._auditing = asyncio.Lock()
        self._running = 0
        self._sending, self._fetching = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE)

    @property
    def busy(self) -> bool:
        return self._running > 0

    def completed(self, record: ExchangeRecord) -> None:
        """Records a complete exchange before its commit, because members that commit earlier may already audit it."""
        self.exchange_begins()
        self._records = [*self._records, record][-2:]
        self._served.clear()
        self._accusers.clear()
        self._caught.clear()

    def exchange_begins(self) -> None:
        """Drops the data from which contributions to earlier exchanges could be encoded again. Keeps their hashes."""
        self._records = [replace(record, anchor=None, source=None, sent=None) for record in self._records]

    def committed(self, version: AnchorVersion) -> None:
        """Audits a piece of the latest exchange, if `version` is its result: a suspicious one, or any by chance."""
        record = self._records[-1] if self._records else None
        if record is None or record.anchor is None or record.anchor.version != version:
            return
        self._compare(record, record.samples)
        pieces = [piece for piece in record.plan.pieces if piece.reducer != self._own]
        suspected = [piece for piece in pieces if piece.reducer == record.suspect]
        if suspected and version.round - self._suspected_in >= ROUNDS_BETWEEN:
            self._suspected_in = version.round
            self._begin(self.audit(record, self._random.choice(suspected)))
        elif pieces and self._random.random() < chance(record, pieces):
            self._begin(self.audit(record, self._random.choice(pieces)))

    def take_traffic(self) -> tuple[int, int]:
        traffic, self.sent_bytes, self.received_bytes = (self.sent_bytes, self.received_bytes), 0, 0
        return traffic

    def receive(self, sender: PeerId, message: messages.AuditControl) -> None:
        """Handles a message about an audit. Refuses or ignores peers that were not in one of the last two exchanges."""
        if isinstance(message, messages.Evidence | messages.AuditRefused):
            self._answered(sender, message)  # our audit may be of an older exchange
            return
        record = next((record for record in self._records if record.plan.roster.round == message.round), None)
        if record is None or sender not in record.plan.members:
            if isinstance(message, messages.AuditRequest):  # refuse explicitly, or the peer would wait for a timeout
                self._refuse(sender, message)
        elif isinstance(message, messages.AuditRequest):
            self._asked(sender, record, message)
        else:
            self._accused(sender, record, message)

    def admit(self, sender: PeerId, message: Contribution, tensor: TensorSpec) -> memoryview | Refusal | None:
        """Returns a buffer for a piece requested by an audit, a Refusal if it is malformed, or None for others."""
        wanted = self._wanted.get((sender, message))
        if wanted is None:
            return None
        if wanted.buffer is not None or tensor != wanted.spec:
            return Refusal(False, "this piece differs from the request")
        wanted.buffer = np.empty(tensor.byte_length, np.uint8).data
        return wanted.buffer

    def received(self, sender: PeerId, message: Contribution, buffer: memoryview, whole: bool) -> bool:
        """Gives a piece (complete if `whole`) to the audit that requested it. Returns False for other pieces."""
        wanted = self._wanted.get((sender, message))
        if wanted is None or wanted.buffer is not buffer:
            return False
        self.received_bytes += buffer.nbytes if whole else 0
        if not wanted.whole.done():
            wanted.whole.set_result(buffer if whole else None)
        return True

    def _asked(self, sender: PeerId, record: ExchangeRecord, request: messages.AuditRequest) -> None:
        piece = record.plan.piece_at(request.first_chunk, request.end_chunk)
        self._served[sender] += 1  # bounds the work that one member can cause
        if piece is None or self._served[sender] > REQUESTS:
            self._refuse(sender, request)
        elif piece.reducer == self._own:
            signed = tuple(record.signed.get(piece, {}).values())
            self._send(sender, messages.Evidence(request.round, request.first_chunk, request.end_chunk, signed))
        elif piece in record.own:
            self._begin(self._serve(sender, record, piece))
        else:
            self._refuse(sender, request)

    def _refuse(self, sender: PeerId, request: messages.AuditRequest) -> None:
        self._send(sender, messages.AuditRefused(request.round, request.first_chunk, request.end_chunk))

    async def _serve(self, asker: PeerId, record: ExchangeRecord, piece: Piece) -> None:
        async with self._sending:
            message = record.plan.contribution(piece)
            data = await self._on_thread(partial(record.encoded, piece))
            if data is None:
                self._refuse(asker, messages.AuditRequest(message.round, message.first_chunk, message.end_chunk))
                return
            spec = piece_spec(record.plan.codec, piece.elements)
            try:
                async with asyncio.timeout(ANSWER_S):
                    signed = replace(message, signature=record.own[piece].signature)
                    await self._means.transport.send(asker, signed, spec, data)
            except (PeerError, TimeoutError) as error:
                log.debug("%s did not take a piece it had requested: %s", short(asker), error)
                return
            self.sent_bytes += data.nbytes

    async def audit(
        self, record: ExchangeRecord, piece: Piece, accuser: PeerId | None = None, shown: Sequence[SignedHash] = ()
    ) -> None:
        """Recomputes a piece and reports a member that lied. `shown`: signed hashes that an `accuser` sent as proof."""
        self._running += 1
        try:
            async with self._auditing:
                caught = await self._audited(record, piece, accuser, shown)
        finally:
            self._running -= 1
        if caught is None or caught.peer in self._caught:
            return
        if caught.certain:  # Report a proven liar once. Doubts may recur
            self._caught.add(caught.peer)
        self._report(caught)

    async def _audited(
        self, record: ExchangeRecord, piece: Piece, accuser: PeerId | None, shown: Sequence[SignedHash]
    ) -> Caught | None:
        try:
            recount = await self._on_thread(partial(Recount, record, piece, self._means.rule.momentum))
        except StateError as error:
            log.debug("cannot audit round %d: %s", record.plan.roster.round.number, error)
            return None
        others = frozenset(record.plan.contributors) - {self._own, piece.reducer}
        signed: Mapping[PeerId, SignedHash] = {}
        if others:
            evidence = await self._evidence_of(record, piece)
            if evidence is None and not shown:
                why = "does not show the signed contributions to its shard"
                return self._doubted(self._unanswered, recount.caught(piece.reducer, why, certain=False))
            if evidence is not None:
                self._unanswered.pop(piece.reducer, None)
            check = partial(recount.check, self._means.signatures, evidence, accuser, shown)
            checked = await self._on_thread(check)
            if isinstance(checked, Caught):
                return checked
            signed = checked
        fetched = await asyncio.gather(*(self._take_away(record, piece, recount, signed[of]) for of in sorted(others)))
        found = next((one for one in fetched if isinstance(one, Caught)), None)
        if found is None and False in fetched:  # a contribution is missing, so there is no verdict
            return None
        self.verdicts += 1
        found = found or await self._on_thread(partial(recount.judge, signed))
        if found is None:
            self._compare(record, recount.samples)
        if found is None and accuser is not None:
            why = f"accuses {short(piece.reducer)} of a piece that is correct"
            return self._doubted(self._groundless, recount.caught(accuser, why, certain=False))
        if found is not None and accuser is None and signed:
            self._accuse(record, piece, found.peer, signed)
        return found

    def _compare(self, record: ExchangeRecord, samples: Mapping[PeerId, Vector]) -> None:
        """Reports contributors to a correct sum that have opposed most others for several rounds."""
        for peer in self._opponents.observed(samples, opposed(samples)):
            why = f"its contributions pointed away from most others, {TIMES_OPPOSED} times"
            if peer != self._own:
                self._report(Caught(peer, record.plan.roster.round.number, why, certain=False))

    def _doubted(self, doubts: Counter[PeerId], caught: Caught) -> Caught | None:
        doubts[caught.peer] += 1  # a peer may be slow or restarting, so only repeated doubts count
        if doubts[caught.peer] >= PATIENCE:
            del doubts[caught.peer]
            return caught
        if len(doubts) > 256:  # Bounds the memory. Forgetting a doubt does no harm
            doubts.clear()
        return None

    def _accuse(self, record: ExchangeRecord, piece: Piece, liar: PeerId, signed: Mapping[PeerId, SignedHash]) -> None:
        message = record.plan.contribution(piece)
        accusation = messages.Accusation(message.round, message.first_chunk, message.end_chunk, tuple(signed.values()))
        for peer in record.plan.others:  # the other members audit the piece themselves
            if peer != liar:
                self._send(peer, accusation)

    async def _evidence_of(self, record: ExchangeRecord, piece: Piece) -> messages.Evidence | None:
        key = (piece.reducer, record.plan.contribution(piece))

        async def once() -> messages.Evidence | None:
            self._evidence[key] = asyncio.get_running_loop().create_future()
            self._request(*key)
            try:
                return await self._evidence[key]
            finally:
                del self._evidence[key]

        return await _several_times(once)

    async def _take_away(
        self, record: ExchangeRecord, piece: Piece, recount: Recount, signed: SignedHash
    ) -> Caught | bool:
        """Downloads a signed contribution and subtracts it from the claimed sum. Returns False if not available."""
        async with self._fetching:
            data = await self._fetch(record, piece, signed.peer)
            if data is None:
                return False
            return await self._on_thread(partial(recount.take_away, signed, data)) or True

    async def _fetch(self, record: ExchangeRecord, piece: Piece, peer: PeerId) -> memoryview | None:
        key = (peer, record.plan.contribution(piece))
        spec = piece_spec(record.plan.codec, piece.elements)

        async def once() -> memoryview | None:
            wanted = self._wanted[key] = _Wanted(spec, asyncio.get_running_loop().create_future())
            self._request(*key)
            try:
                return await wanted.whole
            finally:
                del self._wanted[key]

        return await _several_times(once)

    def _request(self, peer: PeerId, piece: Contribution) -> None:
        self._send(peer, messages.AuditRequest(piece.round, piece.first_chunk, piece.end_chunk))

    def _answered(self, sender: PeerId, message: messages.Evidence | messages.AuditRefused) -> None:
        key = (sender, Contribution(message.round, message.first_chunk, message.end_chunk))
        waiting, wanted = self._evidence.get(key), self._wanted.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(message if isinstance(message, messages.Evidence) else None)
        elif isinstance(message, messages.AuditRefused) and wanted is not None and not wanted.whole.done():
            wanted.whole.set_result(None)

    def _accused(self, sender: PeerId, record: ExchangeRecord, accusation: messages.Accusation) -> None:
        piece = record.plan.piece_at(accusation.first_chunk, accusation.end_chunk)
        if piece is None or piece.reducer in (self._own, sender) or sender in self._accusers:
            return
        # Members that commit late may accuse a peer already caught, or refer to an older exchange.
        if piece.reducer in self._caught or record is not self._records[-1]:
            return
        self._accusers.add(sender)
        self._begin(self.audit(record, piece, sender, accusation.signed))

    async def _on_thread(self, job: Callable[[], Result]) -> Result:
        return await self._means.thread.run(Priority.TRAIN, job)


async def _several_times(ask: Callable[[], Awaitable[Answer | None]]) -> Answer | None:
    """Calls `ask` until it returns an answer. Returns None after ANSWER_S seconds or the last retry."""
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
