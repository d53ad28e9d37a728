"""Proofs of work: replicas confirmed by shared rounds and by the data nodes that this node works for."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from typing import Final

from node.network.session import NetworkSession
from node.observability.status import parse_status
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.membership.rebalancing import LEAST_VOUCHED, proven_by
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId

REMEMBERED_MICROBATCHES: Final = 1024  # Recent microbatches whose data nodes are asked
ASKED_DATA_NODES: Final = 8
MAX_VOUCHED: Final = 256  # Replicas confirmed by one data node
MOST: Final = 0.5  # Required share of data nodes if none has given us work
ASK_TIMEOUT_S: Final = 5.0
ASK_AGAIN_S: Final = 5.0


class Vouched:
    """The replicas whose visits a data node completed last."""

    def __init__(self) -> None:
        self._peers: OrderedDict[PeerId, None] = OrderedDict()

    def add(self, peer: PeerId) -> None:
        self._peers[peer] = None
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_VOUCHED:
            self._peers.popitem(last=False)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._peers)


class Proofs:
    """The proofs that a node has in one module."""

    def __init__(self, session: NetworkSession) -> None:
        self._in_round = frozenset[PeerId]()
        self._session = session
        self._work: deque[PeerId] = deque(maxlen=REMEMBERED_MICROBATCHES)
        self._measured: frozenset[PeerId] = frozenset()
        self._asked_at = -math.inf

    @property
    def proven(self) -> frozenset[PeerId]:
        """Replicas proven to work by the last `refresh` and the last round."""
        return self._measured | self._in_round

    def shared_round(self, contributors: frozenset[PeerId]) -> None:
        """Notes the other contributors of the round that made our anchor; empty if it came another way."""
        self._in_round = contributors

    def worked_on(self, microbatch: MicrobatchId) -> None:
        """Notes that our gradient of this microbatch counts."""
        self._work.append(microbatch.data_node)

    async def refresh(self) -> None:
        """Asks data nodes whose visits they completed, unless that was done a moment ago."""
        now = self._session.own.clock.monotonic()
        if now - self._asked_at < ASK_AGAIN_S:
            return
        self._asked_at = now
        words: dict[PeerId, frozenset[PeerId]] = {}

        async def ask(peer: PeerId) -> None:
            try:
                answer = await self._session.transport.ask(peer, Question(QuestionAbout.STATUS), ASK_TIMEOUT_S)
                # Bounded, so that a data node cannot confirm a crowd of invented peers.
                words[peer] = frozenset(map(PeerId, parse_status(answer).measured[:MAX_VOUCHED]))
            except PeerError:
                return

        # A node without work asks all data nodes. Otherwise a stalled module could hold a node forever: it may not
        # leave unproven replicas.
        idle = not self._work
        data_nodes = (announced.peer for announced in self._session.membership.replicas(ModuleId(0), now))
        work = Counter(data_nodes if idle else self._work)
        hosting = [peer for peer, _ in work.most_common() if self._session.membership.hosts(peer, ModuleId(0))]
        await asyncio.gather(*(ask(peer) for peer in hosting[:ASKED_DATA_NODES]))
        self._measured = proven_by(words, work, MOST if idle else LEAST_VOUCHED)
