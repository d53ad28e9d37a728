"""Proof that replicas work: tallies signed by data nodes. Without tallies, shared averaging rounds."""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping
from typing import Final

from node.network.session import NetworkSession
from protocol.frames.frames import decode_tallies, encode_tallies
from protocol.identity.signatures import EntrySigner
from protocol.interfaces.transport import MAX_ACCUSED, Question, QuestionAbout
from swarm.averaging.proven_work import Tallies, WorkLedger, outvoted, proven_work, to_carry
from swarm.vocabulary.averaging_messages import WorkTally
from swarm.vocabulary.errors import PeerError, ProtocolViolation
from swarm.vocabulary.types import ModuleId, PeerId

ASKED_AT_ONCE: Final = 8
ASK_TIMEOUT_S: Final = 5.0
ASK_AGAIN_S: Final = 5.0
ACCUSED_S: Final = 3 * ASK_AGAIN_S  # Time for which an accusation counts

Heard = Callable[[WorkTally], None]  # Receives each verified tally of the module


class Proofs:
    """Proven work of the replicas of one module, and of this node's own data node."""

    def __init__(
        self, session: NetworkSession, module: ModuleId, signer: EntrySigner, heard: Heard = lambda tally: None
    ) -> None:
        self.ledger = WorkLedger(session.own.peer)
        self.signer, self.heard = signer, heard
        self._module, self._session = module, session
        self._tallies = Tallies()
        self.in_round = frozenset[PeerId]()  # The other contributors to the round that made our anchor, if one did
        self.accused: Callable[[], Collection[PeerId]] = frozenset  # Returns the liars that our rounds exclude
        self._accusations: dict[PeerId, tuple[float, Collection[PeerId]]] = {}
        self._asked_at = -math.inf

    @property
    def tallies(self) -> tuple[WorkTally, ...]:
        return self._tallies.valid(self._session.own.clock.monotonic())

    @property
    def proven(self) -> frozenset[PeerId]:
        """Replicas with proven work; if there is no tally, the contributors to the round of our anchor."""
        return frozenset(proven_work(self.tallies)) or self.in_round

    async def refresh(self) -> None:
        """Asks data nodes for their tallies, at most once in ASK_AGAIN_S seconds."""
        session, clock = self._session, self._session.own.clock
        now = clock.monotonic()
        if now - self._asked_at < ASK_AGAIN_S:
            return
        self._asked_at = now
        self._add(self._own_tally(self._module))
        hosting = [a.peer for a in session.membership.replicas(ModuleId(0), now) if a.peer != session.own.peer]
        random.shuffle(hosting)
        # Half of the questions go to data nodes that have proven work: names and silent ones cannot keep us from these.
        known = {tally.data_node for tally in self.tallies}
        hosting.sort(key=lambda peer: peer not in session.membership.linked)
        good = [peer for peer in hosting if peer in known][: ASKED_AT_ONCE // 2]
        others = [peer for peer in hosting if peer not in good]
        await asyncio.gather(*map(self._ask, (*good, *others[: ASKED_AT_ONCE - len(good)])))

    async def keep_fresh(self) -> None:
        """Asks for tallies periodically, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(ASK_AGAIN_S)

    async def answer(self, asker: PeerId, question: Question) -> bytes:
        """Answers a peer's question with our own tally of a module, or with the tallies of our module that we keep."""
        module = question.module or self._module
        own = self._own_tally(module)
        if own is not None:
            self._hear(asker, question, proven_work((own,)))
        found = (own,) if own is not None else self.tallies if module == self._module else ()
        return encode_tallies(to_carry(found))

    def _hear(self, asker: PeerId, question: Question, work: Mapping[PeerId, float]) -> None:
        """Gives no work to replicas of a module that most others accuse, by the work that we have counted."""
        now, module, membership = self._session.own.clock.monotonic(), question.module, self._session.membership
        if module is not None and asker in work:
            named = {peer for peer in question.accused if membership.hosts(peer, module)}
            recent = {peer: said for peer, said in self._accusations.items() if now - said[0] < ACCUSED_S}
            self._accusations = recent | {asker: (now, named)}
            membership.outvoted[module] = outvoted({peer: said for peer, (_, said) in self._accusations.items()}, work)

    async def _ask(self, peer: PeerId) -> None:
        accused = tuple(sorted(self.accused()))[:MAX_ACCUSED]
        question = Question(QuestionAbout.WORK, module=self._module, accused=accused)
        try:
            for tally in decode_tallies(await self._session.transport.ask(peer, question, ASK_TIMEOUT_S)):
                self._add(tally)
        except (PeerError, ProtocolViolation):
            return

    def _add(self, tally: WorkTally | None) -> None:
        if tally is not None and tally.module == self._module and self.signer.vouches(tally):
            self._tallies.add(tally, self._session.own.clock.monotonic())
            self.heard(tally)

    def _own_tally(self, module: ModuleId) -> WorkTally | None:
        clock = self._session.own.clock
        tally = self.ledger.tally(module, clock.monotonic(), clock.wall())
        return None if tally is None else self.signer.sign_tally(tally)
