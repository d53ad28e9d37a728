"""Proof that other replicas work: shared averaging rounds, and confirmation by data nodes that send us work."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from typing import Final

from node.network.session import NetworkSession
from node.observability.status import parse_status
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.membership.rebalancing import LEAST_CONFIRMED, proven_by
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId

REMEMBERED_MICROBATCHES: Final = 1024  # Recent microbatches whose data nodes are asked
ASKED_DATA_NODES: Final = 8
MAX_CONFIRMED: Final = 256  # Replicas confirmed by one data node
MOST: Final = 0.5  # Required share of data nodes if none has given us work
ASK_TIMEOUT_S: Final = 5.0
ASK_AGAIN_S: Final = 5.0


class ConfirmedReplicas:
    """Replicas that took part in a data node's latest completed microbatches."""

    def __init__(self) -> None:
        self._peers: OrderedDict[PeerId, None] = OrderedDict()

    def add(self, peer: PeerId) -> None:
        self._peers[peer] = None
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_CONFIRMED:
            self._peers.popitem(last=False)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._peers)


class Proofs:
    """Replicas of a node's module that proved to work: they shared a round with it, or data nodes confirm them."""

    def __init__(self, session: NetworkSession) -> None:
        self._in_round = frozenset[PeerId]()
        self._session = session
        self._work: deque[PeerId] = deque(maxlen=REMEMBERED_MICROBATCHES)
        self._measured: frozenset[PeerId] = frozenset()
        self._asked_at = -math.inf

    @property
    def proven(self) -> frozenset[PeerId]:
        """Replicas that data nodes confirmed at the last `refresh`, or that contributed to our anchor's round."""
        return self._measured | self._in_round

    def shared_round(self, contributors: frozenset[PeerId]) -> None:
        """Records the other contributors to the round that made our anchor; empty if the anchor came from no round."""
        self._in_round = contributors

    def worked_on(self, microbatch: MicrobatchId) -> None:
        """Records that the data node confirmed our gradient of this microbatch."""
        self._work.append(microbatch.data_node)

    async def refresh(self) -> None:
        """Asks data nodes which replicas they confirm, at most once in ASK_AGAIN_S seconds."""
        now = self._session.own.clock.monotonic()
        if now - self._asked_at < ASK_AGAIN_S:
            return
        self._asked_at = now
        claims: dict[PeerId, frozenset[PeerId]] = {}

        async def ask(peer: PeerId) -> None:
            try:
                answer = await self._session.transport.ask(peer, Question(QuestionAbout.STATUS), ASK_TIMEOUT_S)
                # Bounded, so that a data node cannot confirm a crowd of invented peers.
                claims[peer] = frozenset(map(PeerId, parse_status(answer).measured[:MAX_CONFIRMED]))
            except PeerError:
                return

        # A node without work asks all data nodes. Otherwise a stalled module could hold a node forever: it may not
        # leave unproven replicas.
        idle = not self._work
        data_nodes = (announced.peer for announced in self._session.membership.replicas(ModuleId(0), now))
        work = Counter(data_nodes if idle else self._work)
        hosting = [peer for peer, _ in work.most_common() if self._session.membership.hosts(peer, ModuleId(0))]
        await asyncio.gather(*(ask(peer) for peer in hosting[:ASKED_DATA_NODES]))
        self._measured = proven_by(claims, work, MOST if idle else LEAST_CONFIRMED)
