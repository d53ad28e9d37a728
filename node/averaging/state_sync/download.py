"""Download of an anchor from its donors: first chunk hashes that match the digest, then chunks that match these."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

import numpy as np
import torch

from node.averaging.anchor.anchor import Anchor, AnchorStore, chunk_bytes, hash_of, version_of
from node.averaging.anchor.shared_vector import Layout, SharedVector, StateVectors, empty_vector
from node.concurrency.machine_runner import MachineRunner
from node.concurrency.task_groups import TaskTracker, task_scope
from node.network.dispatcher import Dispatcher
from node.network.session import NetworkSession
from node.observability.failpoints import crash_point
from node.start.cut_model import CutModel, FirstAnchor
from protocol.codecs import decode
from protocol.codecs.memory import BufferPool, octets_of_tensor
from protocol.frames.frames import HashList, decode_hash_list, encode_hash_list
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal, Transport
from swarm.averaging import chunk_download as machine
from swarm.vocabulary import errors
from swarm.vocabulary.averaging_messages import StateChunk, StateRefusal, StateRefused, StateRequest
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, short


class PartialState:
    """Vectors of a state being downloaded, filled on a separate thread."""

    def __init__(self, hash_list: HashList, space: "Space") -> None:
        self.parameters, self.momentum = self._vectors = space.spare()
        self._space, self._layout, self._hashes = space, space.layout, hash_list.hashes
        self._room: torch.Tensor | None = None
        self._placed: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "catching-up")

    async def take_over(self, known: Anchor | None) -> frozenset[int]:
        """Takes chunks from the anchor `known`. Returns their numbers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._take_over, known)

    async def place(self, number: int, tensor: TensorSpec, data: memoryview) -> bool:
        """Decodes a chunk, checks its hash and stores it. Returns False if the chunk is wrong."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._place, number, tensor, data)

    async def close(self, *, complete: bool) -> None:
        vectors = () if complete else self._vectors
        finished = self._thread.submit(lambda: self._space.give_back(*vectors) if vectors else None)
        self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(finished))

    def _take_over(self, known: Anchor | None) -> frozenset[int]:
        if known is None:
            return frozenset()
        # Shared arrays save memory as well as the download.
        self.parameters = self.parameters.sharing(known.parameters, self._shared(known, 0))
        self.momentum = self.momentum.sharing(known.momentum, self._shared(known, self._layout.chunks))
        for number in range(2 * self._layout.chunks):
            if number not in self._placed and known.hashes[number] == self._hashes[number]:
                self._slot(number)[:] = known.chunk(number)
                self._placed.add(number)
        return frozenset(self._placed)

    def _shared(self, known: Anchor, first_number: int) -> set[int]:
        """Returns the fragments that the anchor `known` has too, by their hashes. We use its arrays for them."""
        same = set()
        for place, (first, end) in enumerate(self._layout.fragments):
            numbers = range(first_number + first, first_number + end)
            if all(known.hashes[number] == self._hashes[number] for number in numbers):
                same.add(place)
                self._placed.update(numbers)
        return same

    def _place(self, number: int, tensor: TensorSpec, encoded: memoryview) -> bool:
        data = encoded
        if tensor.codec is not Codec.NONE:
            if self._room is None:
                self._room = torch.empty(self._layout.chunk_elements)
            out = self._room[: tensor.elements]
            try:
                decode(tensor, encoded, out)
            except errors.ProtocolViolation as error:
                log.info("chunk %d of a state cannot be decoded: %s", number, error)
                return False
            data = octets_of_tensor(out)
        if hash_of(data) != self._hashes[number]:
            return False
        if number not in self._placed:  # a chunk may arrive twice after a retry
            np.copyto(np.asarray(self._slot(number)), np.asarray(data))
            self._placed.add(number)
        return True

    def _slot(self, number: int) -> memoryview:
        return chunk_bytes(self._layout, self.parameters, self.momentum, number)


class Space(Protocol):
    """Allocator of the vectors into which a state is downloaded (`AnchorStore`, `FreshSpace`)."""

    @property
    def layout(self) -> Layout: ...

    def spare(self) -> StateVectors: ...

    def give_back(self, parameters: SharedVector, momentum: SharedVector) -> None: ...


class FreshSpace:
    """Allocator of vectors for a download on a node that has no AnchorStore."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def spare(self) -> StateVectors:
        return empty_vector(self.layout), empty_vector(self.layout)

    def give_back(self, parameters: SharedVector, momentum: SharedVector) -> None:
        return


log = logging.getLogger(__name__)

TRIED_AGAIN: Final = "The node retries with the newest state that the module's replicas announce."
ANSWER_S: Final = 10.0
MOST_ASKED: Final = 16


async def first_hash_list(
    transport: Transport,
    module: ModuleId,
    layout: Layout,
    wanted: AnchorVersion,
    donors: Sequence[PeerId],
    on_liar: Callable[[PeerId, str], None],
) -> tuple[HashList, tuple[PeerId, ...]]:
    """Asks donors for chunk hashes that match the digest. Returns these and usable donors. Raises NoQuorum, Stalled."""
    question = Question(QuestionAbout.STATE, module=module, digest=wanted.digest)
    asked = tuple(dict.fromkeys(donors))[:MOST_ASKED]
    failed: dict[PeerId, errors.PeerError] = {}
    found: asyncio.Queue[HashList | None] = asyncio.Queue()

    async def ask(donor: PeerId) -> None:
        try:
            found.put_nowait(_proven(await transport.ask(donor, question, ANSWER_S), layout, wanted))
        except errors.PeerError as error:
            failed[donor] = error
            if isinstance(error, errors.ProtocolViolation):  # an honest donor never sends a wrong list
                on_liar(donor, str(error))
            found.put_nowait(None)

    async with task_scope() as tasks:
        running = [tasks.create_task(ask(donor)) for donor in asked]
        for _ in running:
            hash_list = await found.get()
            if hash_list is not None:  # the first valid list suffices, because the digest proves it
                for task in running:
                    task.cancel()
                return hash_list, tuple(donor for donor in asked if donor not in failed)
    raise _nobody_has(wanted, failed)


def _proven(data: bytes, layout: Layout, wanted: AnchorVersion) -> HashList:
    """Decodes a list of chunk hashes. Raises ProtocolViolation if the list does not match the digest or the layout."""
    said = decode_hash_list(data, digest=wanted.digest, elements=layout.elements, chunk_elements=layout.chunk_elements)
    version = said.version
    if version_of(layout, said.hashes, version.round, version.steps, version.tokens, version.fragment) != version:
        raise errors.ProtocolViolation(f"the hash list does not match state {wanted.digest.hex()[:12]}")
    return said


def _nobody_has(wanted: AnchorVersion, failed: dict[PeerId, errors.PeerError]) -> errors.SkipstoneError:
    failures = "; ".join(f"{short(donor)}: {error}" for donor, error in failed.items()) or "no peer announces it"
    if any(isinstance(error, errors.Unreachable | errors.Stalled) for error in failed.values()):
        return errors.Stalled(
            f"no peer sent the state of round {wanted.round}: {failures}",
            hint="Check this machine's connection to the peers above. The node retries.",
        )
    return errors.NoQuorum(f"no peer has the state of round {wanted.round}: {failures}", hint=TRIED_AGAIN)


MOST_WAITING: Final = machine.MOST_OWED


@dataclass(eq=False)
class StateDownloads:
    """Downloader of one module's anchors, one at a time. `on_progress` gets the bytes present and the total."""

    session: NetworkSession
    module: ModuleId
    space: Space
    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_liar: Callable[[PeerId, str], None] = lambda donor, detail: None
    received_bytes: Mapping[PeerId, int] = field(default_factory=dict)
    _is_busy: bool = False

    def __post_init__(self) -> None:
        self.layout = self.space.layout
        self._random = Random(self.session.own.peer)  # noqa: S311 - spreads the load over donors; no secret

    async def catch_up(self, wanted: AnchorVersion, donors: Sequence[PeerId], known: Anchor | None = None) -> Anchor:
        """Downloads an anchor, except for chunks that `known` also has. Raises NoQuorum, Stalled, ResourceExhausted."""
        proven, vectors = await self._fetch(wanted, donors, 2 * self.layout.chunks, known)
        return Anchor(self.layout, proven.version, *vectors, proven.hashes)

    async def parameters(self, wanted: AnchorVersion, donors: Sequence[PeerId]) -> SharedVector:
        """Downloads only the parameters of an anchor, [elements]. Raises the same errors as `catch_up`."""
        _, (parameters, _) = await self._fetch(wanted, donors, self.layout.chunks, None)
        return parameters

    async def _fetch(
        self, wanted: AnchorVersion, donors: Sequence[PeerId], chunks: int, known: Anchor | None
    ) -> tuple[HashList, StateVectors]:
        """Downloads the first `chunks` chunks of a state. The vectors' other elements are undefined."""
        if self._is_busy:
            raise errors.SkipstoneError("this module already downloads a state")
        self._is_busy = True
        try:
            arguments = (self.session.transport, self.module, self.layout, wanted, donors, self.on_liar)
            hash_list, having = await first_hash_list(*arguments)
            return hash_list, await self._fetch_chunks(hash_list, having, chunks, known)
        finally:
            self._is_busy = False

    async def _fetch_chunks(
        self, hash_list: HashList, donors: tuple[PeerId, ...], chunks: int, known: Anchor | None
    ) -> StateVectors:
        state = PartialState(hash_list, self.space)
        complete = False
        try:
            here = await state.take_over(known)
            chunk_bytes = 4 * self.layout.chunk_elements
            # Buffers of one donor's chunks, asked for or here: 16 MiB, but enough to keep the link busy.
            room = max(3, min(machine.MOST_OWED, 2**24 // chunk_bytes))
            plan = machine.Download(chunks, chunk_bytes, here, donors, self._random, room)
            pool = BufferPool(chunk_bytes, room * min(len(donors), machine.DONORS_AT_ONCE))
            download = _Download(self, hash_list.version, plan, chunks, state, pool, room)
            self.received_bytes = download.received_bytes
            with self.session.dispatcher.registered(
                tensors={StateChunk: download}, messages={StateRefused: download.refused}, link_down=download.link_down
            ):
                await download.run()
            complete = download.is_complete
            return state.parameters, state.momentum
        finally:
            await state.close(complete=complete)


class _Download(MachineRunner[machine.Event, machine.Action]):
    """Download of one anchor's chunks from several donors. `room` is the number of buffers per donor."""

    def __init__(
        self,
        of: StateDownloads,
        version: AnchorVersion,
        plan: machine.Download,
        chunks: int,
        state: PartialState,
        pool: BufferPool,
        room: int,
    ) -> None:
        super().__init__(plan.handle, machine.Tick(), of.session.transport, of.session.own.clock, MOST_WAITING)
        self.received_bytes: Counter[PeerId] = Counter()
        self._of = of
        self._version = version
        self._plan = plan
        self._chunks = chunks
        self._state = state
        self._pool = pool
        self._room = room
        self._arriving: dict[tuple[PeerId, int], memoryview] = {}
        self._end: machine.Complete | machine.Failed | None = None

    @property
    def is_complete(self) -> bool:
        return isinstance(self._end, machine.Complete)

    async def run(self) -> None:
        self._tell_progress()
        await super().run()
        if isinstance(self._end, machine.Failed):
            number, detail = self._version.round, self._end.detail
            if self._end.stalled:
                hint = "Check this machine's connection. The next attempt continues from here."
                raise errors.Stalled(f"the download of the state of round {number} stalled: {detail}", hint=hint)
            raise errors.NoQuorum(f"no peer is left with the state of round {number}: {detail}", hint=TRIED_AGAIN)

    def admit(self, sender: PeerId, message: StateChunk, tensor: TensorSpec) -> memoryview | Refusal:
        chunk = message.chunk
        if not self._is_of(message) or not self._plan.expects(sender, chunk):
            return Refusal(False, "this chunk was not requested")
        elements = self._elements_of(chunk)
        if tensor != TensorSpec((elements,), DType.FLOAT32):
            self.handle(machine.ChunkArrived(sender, chunk, False))  # an honest donor never sends this
            raise errors.ProtocolViolation(
                f"chunk {chunk} of {elements} elements came as {tensor.shape} {tensor.dtype.name} in"
                f" {tensor.byte_length} bytes of {tensor.codec.name}, which this run does not allow"
            )
        if (sender, chunk) in self._arriving:
            return Refusal(False, "this chunk is already arriving")
        of_sender = sum(peer == sender for peer, _ in self._arriving)  # bounds the buffers of one donor
        if of_sender >= self._room or self._pool.in_use >= self._pool.limit:
            self.handle(machine.ChunksRefused(sender, (chunk,), StateRefusal.BUSY))  # so that it is requested again
            return Refusal(True, "too many chunks at once")
        buffer = self._arriving[sender, chunk] = self._pool.take()
        return buffer[: tensor.byte_length]

    def received(self, sender: PeerId, message: StateChunk, tensor: TensorSpec, buffer: memoryview) -> None:
        if self._is_arriving(sender, message, buffer):
            self.begin(self._check(sender, message.chunk, tensor, buffer))

    def broken_off(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> None:
        if self._is_arriving(sender, message, buffer):
            self._pool.give_back(self._arriving.pop((sender, message.chunk)))
            self.handle(machine.ChunkLost(sender, message.chunk))

    def refused(self, sender: PeerId, message: StateRefused) -> None:
        if self._is_of(message):
            self.handle(machine.ChunksRefused(sender, message.chunks, message.reason))

    def link_down(self, to: PeerId, error: errors.PeerError) -> None:
        self.handle(machine.DonorLost(to))

    _not_sent = link_down

    def _is_of(self, message: StateChunk | StateRefused) -> bool:
        return message.module == self._of.module and message.digest == self._version.digest

    def _is_arriving(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> bool:
        given = self._arriving.get((sender, message.chunk))
        return self._is_of(message) and given is not None and given.obj is buffer.obj

    def _carry_out(self, action: machine.Action) -> None:
        match action:
            case machine.Ask(donor, chunks):
                if not self.send(donor, StateRequest(self._of.module, self._version.digest, chunks)):
                    self.handle(machine.DonorLost(donor))
            case machine.Report(donor, detail):
                log.warning("%s sends another state than the agreed one: %s", short(donor), detail)
                self._of.on_liar(donor, detail)
            case machine.Complete() | machine.Failed():
                self._end = action
                self.stop()

    async def _check(self, sender: PeerId, chunk: int, tensor: TensorSpec, data: memoryview) -> None:
        try:
            matches = await self._state.place(chunk, tensor, data)
        finally:
            self._pool.give_back(self._arriving.pop((sender, chunk)))
        if matches:
            self.received_bytes[sender] += tensor.raw_bytes
        crash_point("chunk arrived")
        self.handle(machine.ChunkArrived(sender, chunk, matches))
        self._tell_progress()

    def _tell_progress(self) -> None:
        total = sum(4 * self._elements_of(chunk) for chunk in range(self._chunks))
        missing = self._plan.missing * 4 * self._of.layout.chunk_elements
        self._of.on_progress(max(0, total - missing), total)

    def _elements_of(self, chunk: int) -> int:
        index = chunk % self._of.layout.chunks
        elements = self._of.layout.range_of(index, index + 1)
        return int(elements.stop - elements.start)


CHUNKS_OF_ONE: Final = 32
ASKERS: Final = 32  # Peers that may have chunks queued. Others get BUSY.
LEASE_S: Final = 60.0  # Lease of an anchor after the latest request, in seconds
LONGEST_LEASE_S: Final = 600.0  # Lease of an anchor after the first request at most, in seconds
SLOWEST_BYTES_PER_S: Final = 16 * 1024


_Queue = deque[tuple[ModuleId, bytes, int]]  # Chunks that one peer waits for: module, digest, number


@dataclass(slots=True, eq=False)
class Donor:
    """Server of the hosted module's anchors, and of `start`, the model that the run started from (None: not here)."""

    module: ModuleId
    store: AnchorStore
    clock: Clock
    transport: Transport
    start: CutModel | None = None
    sent_bytes: int = 0
    _askers: dict[PeerId, _Queue] = field(default_factory=dict)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))  # Links that send at once
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
            raise errors.Rejected(f"module {question.module} does not have state {question.digest.hex()[:12]} here")
        self._lease(anchor)
        layout = anchor.layout
        return encode_hash_list(HashList(anchor.version, layout.elements, layout.chunk_elements, anchor.hashes))

    def receive(self, sender: PeerId, request: StateRequest) -> None:
        if not self._tasks.are_running:
            return
        anchor = self._find(request.module, request.digest)
        if anchor is None or max(request.chunks) >= 2 * anchor.layout.chunks:  # unknown, or out of range
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

    def link_down(self, peer: PeerId, error: errors.PeerError) -> None:
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
        if isinstance(anchor, FirstAnchor):  # first anchors are read from the model's folder, so they need no lease
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
        except errors.PeerError as error:
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
                raise errors.StateError("it was dropped")
            first = isinstance(anchor, FirstAnchor)
            data = await asyncio.to_thread(anchor.chunk, chunk) if first else anchor.chunk(chunk)
            spec, size = TensorSpec((data.nbytes // DType.FLOAT32.size_bytes,), DType.FLOAT32), data.nbytes
            async with asyncio.timeout(10.0 + size / SLOWEST_BYTES_PER_S):
                await self.transport.send(peer, StateChunk(module, digest, chunk), spec, data)
            self.sent_bytes += size
        except (errors.StateError, errors.ConfigError) as error:
            log.info("cannot serve module %s in state %s: %s", module, digest.hex()[:12], error)
            # Refuse all queued chunks of this state at once.
            chunks = (chunk, *(number for *other, number in queue if other == [module, digest]))
            others = [entry for entry in queue if entry[:2] != (module, digest)]
            queue.clear()
            queue.extend(others)
            self._refuse(peer, StateRequest(module, digest, chunks), StateRefusal.GONE)

    def _refuse(self, peer: PeerId, request: StateRequest, reason: StateRefusal) -> None:
        if self._tasks.are_running and self._refusals < 64:  # refusals in flight must not pile up
            self._refusals += 1  # `_send_refusal` decrements it
            refused = StateRefused(request.module, request.digest, request.chunks, reason)
            self._tasks.begin(self._send_refusal(peer, refused))

    async def _send_refusal(self, peer: PeerId, refused: StateRefused) -> None:
        try:
            await self.transport.send_control(peer, refused)
        except errors.PeerError as error:
            log.debug("could not send %s a refusal: %s", short(peer), error)
        finally:
            self._refusals -= 1
