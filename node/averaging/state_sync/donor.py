"""Serves chunks of anchors to replicas that catch up, without delaying training or rounds."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.state_sync.download import codec_for
from node.concurrency.compute_thread import ComputeThread, Priority
from node.concurrency.task_groups import TaskTracker
from node.network.dispatcher import Dispatcher
from node.start.cut_model import CutModel, FirstAnchor
from protocol.codecs import Encoded, encode
from protocol.codecs.memory import tensor_of
from protocol.frames.frames import HashList, encode_hash_list
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Transport
from swarm.vocabulary.averaging_messages import StateChunk, StateRefusal, StateRefused, StateRequest
from swarm.vocabulary.errors import ConfigError, PeerError, Rejected, StateError
from swarm.vocabulary.types import Codec, ModuleId, PeerId, short

log = logging.getLogger(__name__)

CHUNKS_OF_ONE: Final = 32
ASKERS: Final = 32  # Peers that may have chunks queued. Others get BUSY.
LINKS_AT_ONCE: Final = 8
REFUSALS_WAITING: Final = 64  # Refusals in flight. Beyond this, requests are not answered.
LEASE_S: Final = 60.0  # Lease of an anchor after the latest request, in seconds
LONGEST_LEASE_S: Final = 600.0  # Lease of an anchor after the first request at most, in seconds
SLOWEST_BYTES_PER_S: Final = 16 * 1024
SEND_GRACE_S: Final = 10.0


_Queue = deque[tuple[ModuleId, bytes, int]]  # Chunks that one peer waits for: module, digest, number


@dataclass(slots=True, eq=False)
class Donor:
    """Server of the hosted module's anchors, and of `start`, the model that the run started from (None: not here)."""

    module: ModuleId
    store: AnchorStore
    clock: Clock
    codecs: frozenset[Codec]
    averaging: ComputeThread
    transport: Transport
    start: CutModel | None = None
    sent_bytes: int = 0
    _askers: dict[PeerId, _Queue] = field(default_factory=dict)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LINKS_AT_ONCE))
    _hashing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _first_asked: dict[bytes, float] = field(default_factory=dict)
    _refusals: int = 0
    _tasks: TaskTracker = field(default_factory=TaskTracker)

    def receiving(self, dispatcher: Dispatcher) -> AbstractContextManager[None]:
        return dispatcher.registered(
            messages={StateRequest: self.receive}, answers={QuestionAbout.STATE: self.answer}, link_down=self.link_down
        )

    async def run(self) -> None:
        async with self._tasks.running():
            await asyncio.get_running_loop().create_future()

    async def answer(self, asker: PeerId, question: Question) -> bytes:
        """Returns the chunk hashes of the requested state, encoded. Raises Rejected if the state is not here."""
        module, digest = question.module, question.digest
        anchor = None if module is None else self._find(module, digest) or await self._hashed(module, digest)
        if anchor is None:
            raise Rejected(f"this peer does not have state {question.digest.hex()[:12]} of module {question.module}")
        self._lease(anchor)
        layout = anchor.layout
        return encode_hash_list(HashList(anchor.version, layout.elements, layout.chunk_elements, anchor.hashes))

    def receive(self, sender: PeerId, request: StateRequest) -> None:
        if not self._tasks.are_running:
            return
        anchor = self._find(request.module, request.digest)
        # An unknown state, or a chunk number out of range.
        if anchor is None or max(request.chunks) >= 2 * anchor.layout.chunks:
            self._refuse(sender, request, StateRefusal.GONE)
            return
        queue = self._askers.get(sender)
        waiting = 0 if queue is None else len(queue)
        # Bounds the queue of one peer, and the number of peers.
        if waiting + len(request.chunks) > CHUNKS_OF_ONE or (queue is None and len(self._askers) >= ASKERS):
            self._refuse(sender, request, StateRefusal.BUSY)
            return
        self._lease(anchor)
        if queue is None:
            queue = self._askers[sender] = deque()
            self._tasks.begin(self._serve(sender, queue))
        queue.extend((request.module, request.digest, chunk) for chunk in request.chunks)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        """Drops the chunks queued for a disconnected peer. The peer requests them again after it reconnects."""
        self._askers.get(peer, deque()).clear()

    def _find(self, module: ModuleId, digest: bytes) -> Anchor | FirstAnchor | None:
        """Returns the anchor with this digest from the store, or from `start` if already hashed, else None."""
        anchor = self.store.get(digest) if module == self.module else None
        return anchor if anchor is not None or self.start is None else self.start.hashed(module, digest)

    async def _hashed(self, module: ModuleId, digest: bytes) -> FirstAnchor | None:
        """Reads and hashes a module of `start`, the model that the run started from. Returns None if it is not here."""
        if self.start is None or not self.start.has(module, digest):
            return None
        async with self._hashing:
            return await asyncio.to_thread(self.start.first_anchor, module.stage)

    def _lease(self, anchor: Anchor | FirstAnchor) -> None:
        # First anchors are read from the model's folder, so they need no lease.
        if isinstance(anchor, FirstAnchor):
            return
        now, digest = self.clock.monotonic(), anchor.version.digest
        # Bound the total lease, or a slow reader could pin an anchor forever.
        self._first_asked = {d: first for d, first in self._first_asked.items() if self.store.get(d) is not None}
        left = self._first_asked.setdefault(digest, now) + LONGEST_LEASE_S - now
        if left > 0:
            self.store.lease(digest, min(LEASE_S, left))

    async def _serve(self, peer: PeerId, queue: _Queue) -> None:
        try:
            while queue:
                async with self._turns:
                    if queue:  # empty if the link broke while we waited
                        await self._send_next(peer, queue)
        except PeerError as error:
            log.info("could not send state to %s: %s", short(peer), error)
        except TimeoutError:
            log.info("%s receives the state too slowly; it may ask again", short(peer))
        finally:
            if self._askers.get(peer) is queue:
                del self._askers[peer]

    async def _send_next(self, peer: PeerId, queue: _Queue) -> None:
        module, digest, chunk = queue.popleft()
        anchor = self._find(module, digest)
        try:
            if anchor is None:
                raise StateError("it was dropped")
            first = isinstance(anchor, FirstAnchor)
            data = await asyncio.to_thread(anchor.chunk, chunk) if first else anchor.chunk(chunk)
            await self._send_chunk(peer, StateChunk(module, digest, chunk), data)
        except (StateError, ConfigError) as error:
            log.info("cannot serve module %s in state %s: %s", module, digest.hex()[:12], error)
            # Refuse all queued chunks of this state at once.
            chunks = (chunk, *(number for *other, number in queue if other == [module, digest]))
            others = [entry for entry in queue if entry[:2] != (module, digest)]
            queue.clear()
            queue.extend(others)
            self._refuse(peer, StateRequest(module, digest, chunks), StateRefusal.GONE)

    async def _send_chunk(self, peer: PeerId, message: StateChunk, data: memoryview) -> None:
        link = self.transport.figures().get(peer)
        if codec_for(self.codecs, 0.0 if link is None else link.goodput_bytes_per_s) is Codec.NONE:
            encoded = Encoded(TensorSpec((data.nbytes // DType.FLOAT32.size_bytes,), DType.FLOAT32), data)
        else:
            planes = partial(encode, tensor_of(np.frombuffer(data, np.float32)), Codec.PLANES)
            encoded = await self.averaging.run(Priority.TRAIN, planes)
        size = encoded.spec.byte_length
        async with asyncio.timeout(SEND_GRACE_S + size / SLOWEST_BYTES_PER_S):
            await self.transport.send(peer, message, encoded.spec, encoded.data)
        self.sent_bytes += size

    def _refuse(self, peer: PeerId, request: StateRequest, reason: StateRefusal) -> None:
        # A peer that does not read must not make refusals pile up.
        if self._tasks.are_running and self._refusals < REFUSALS_WAITING:
            self._refusals += 1  # `_send_refusal` decrements it
            refused = StateRefused(request.module, request.digest, request.chunks, reason)
            self._tasks.begin(self._send_refusal(peer, refused))

    async def _send_refusal(self, peer: PeerId, refused: StateRefused) -> None:
        try:
            await self.transport.send_control(peer, refused)
        except PeerError as error:
            log.debug("could not send %s a refusal: %s", short(peer), error)
        finally:
            self._refusals -= 1
