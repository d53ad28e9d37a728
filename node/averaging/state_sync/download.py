"""Gets an agreed state from its donors: first the hash list, which the digest proves, then the chunks, which the list
proves.

Chunks arrive in a few buffers of this download's own, and go to their places in the new vectors only when they match: a
donor that is slow or lies writes nowhere else. Decoding, hashing, copying and the disk are on one thread of their own,
in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, TypeVar

from node.averaging.anchor.anchor import Anchor, Vector
from node.averaging.anchor.layout import Layout
from node.averaging.state_sync.chunk_codec import ChunkDecoder, may_come_as
from node.averaging.state_sync.hash_lists import ProvenList, first_hash_list
from node.averaging.state_sync.partial_state import KeptChunks, PartialState, Space
from node.concurrency.task_groups import set_or_after, task_scope
from node.observability.failpoints import crash_point
from protocol.frames.hash_list import HashList
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Refusal, Transport
from protocol.transport.buffer_pool import BufferPool
from swarm.averaging.chunk_download import (
    DONORS_AT_ONCE,
    MOST_OWED,
    Action,
    Ask,
    ChunkCame,
    ChunkLost,
    ChunksRefused,
    Complete,
    DonorLost,
    Download,
    Event,
    Failed,
    FailureKind,
    Report,
    Tick,
)
from swarm.vocabulary.averaging_messages import StateChunk, StateRefusal, StateRefused, StateRequest
from swarm.vocabulary.errors import NoQuorum, PeerError, ProtocolViolation, SkipstoneError, Stalled
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, short

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TICK_S: Final = 0.1
FEWEST_BUFFERS: Final = 3
BUFFER_BYTES: Final = 16 * 1024 * 1024
"""For chunks of one donor that are asked for, arriving or being checked: as many as this holds, and at least the
above."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every download of a module has in common.

    `codecs` are those in which the manifest lets chunks come; `folder` keeps what has been fetched over a restart;
    `on_progress` gets bytes here and bytes in all; `on_liar` a donor that sent what is not the agreed state, and what
    that was.
    """

    module: ModuleId
    layout: Layout
    transport: Transport
    clock: Clock
    random: Random
    space: Space
    codecs: frozenset[Codec]
    folder: Path | None = None
    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_liar: Callable[[PeerId, str], None] = lambda donor, detail: None


class CatchingUp:
    """The downloads of one module, one at a time. Besides `catch_up`, it takes what the links bring."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._with = surroundings
        self._busy = False
        self._fetching: _Fetching | None = None
        self.received_bytes: Mapping[PeerId, int] = {}
        """Of the last download: the bytes of good chunks from each donor, as they are in memory."""

    async def catch_up(self, wanted: AnchorVersion, donors: Sequence[PeerId], known: Anchor | None = None) -> Anchor:
        """The anchor of `wanted`'s digest, every byte of it checked.

        Args:
            donors: peers that are said to stand on it.
            known: an anchor of this module in memory; chunks that it has in common with the wanted one are not fetched.

        Raises:
            NoQuorum: none of them has it (any more).
            Stalled: those that have it send nothing.
            ResourceExhausted: no memory for the state.
        """
        proven, vectors = await self._fetch(wanted, donors, 2 * self._with.layout.chunks, known)
        return Anchor(self._with.layout, proven.version, *vectors, proven.hashes)

    async def parameters(self, wanted: AnchorVersion, donors: Sequence[PeerId]) -> Vector:
        """The parameters of that anchor, [elements], for whoever does not train it on: the momentum is not fetched.

        Raises:
            As `catch_up`.
        """
        _, (parameters, _) = await self._fetch(wanted, donors, self._with.layout.chunks, None)
        return parameters

    async def _fetch(
        self, wanted: AnchorVersion, donors: Sequence[PeerId], chunks: int, known: Anchor | None
    ) -> tuple[HashList, tuple[Vector, Vector]]:
        """The first `chunks` chunks of the state; what lies elsewhere in the vectors is not defined."""
        if self._busy:
            raise SkipstoneError("this module is catching up already")
        self._busy = True
        around = self._with
        try:
            proven = await first_hash_list(
                around.transport, around.module, around.layout, wanted, donors, around.on_liar
            )
            self._fetching = _Fetching(around, proven, chunks)
            self.received_bytes = self._fetching.received_bytes
            return proven.hash_list, await self._fetching.run(known)
        finally:
            self._busy = False
            self._fetching = None

    def admit(self, sender: PeerId, message: StateChunk, tensor: TensorSpec) -> memoryview | Refusal:
        """Raises ProtocolViolation for a chunk that was asked for and has another size than its place."""
        if self._fetching is None or not self._fetching.is_of(message):
            return Refusal(False, "this state is not being fetched here")
        return self._fetching.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> None:
        if self._fetching is not None and self._fetching.is_of(message):
            self._fetching.received(sender, message.chunk, buffer)

    def broken_off(self, sender: PeerId, message: StateChunk, buffer: memoryview) -> None:
        if self._fetching is not None and self._fetching.is_of(message):
            self._fetching.broken_off(sender, message.chunk, buffer)

    def told(self, sender: PeerId, message: StateRefused) -> None:
        if self._fetching is not None and self._fetching.is_of(message):
            self._fetching.handle(ChunksRefused(sender, message.chunks, message.reason))

    def link_down(self, peer: PeerId) -> None:
        if self._fetching is not None:
            self._fetching.handle(DonorLost(peer))


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A chunk that is arriving: the whole buffer that it was given, and what it comes as."""

    buffer: memoryview
    tensor: TensorSpec


class _Fetching:
    """One download under way: carries out what its plan says."""

    def __init__(self, around: Surroundings, proven: ProvenList, chunks: int) -> None:
        self.received_bytes: Counter[PeerId] = Counter()
        self._with = around
        self._chunks = chunks
        self._layout = around.layout
        self._list = proven.hash_list
        self._donors = proven.donors
        self._plan: Download | None = None
        self._state: PartialState | None = None
        chunk_bytes = 4 * self._layout.chunk_elements
        self._buffers_of_one = max(FEWEST_BUFFERS, min(MOST_OWED, BUFFER_BYTES // chunk_bytes))
        self._pool = BufferPool(chunk_bytes, self._buffers_of_one * min(len(proven.donors), DONORS_AT_ONCE))
        self._decoder = ChunkDecoder(self._layout.chunk_elements)
        self._arriving: dict[tuple[PeerId, int], _Arrival] = {}
        self._thread = ThreadPoolExecutor(1, "catching-up")
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._end: Complete | Failed | None = None

    def is_of(self, message: StateChunk | StateRefused) -> bool:
        return message.module == self._with.module and message.digest == self._list.version.digest

    async def run(self, known: Anchor | None) -> tuple[Vector, Vector]:
        """Fetches everything that is due. Errors as `CatchingUp.catch_up`."""
        vectors = self._with.space.spare()
        try:
            here = await self._on_thread(lambda: self._begin(vectors, known))
            await self._fetch(here)
            if isinstance(self._end, Failed):
                raise self._error(self._end)
            return vectors
        finally:
            # Comes after whatever the thread still has to do, so that nothing writes into vectors that have been given
            # back.
            finished = self._thread.submit(self._finish, vectors)
            self._thread.shutdown(wait=False)
            await asyncio.shield(asyncio.wrap_future(finished))

    def handle(self, event: Event) -> None:
        """Gives an event to the plan and carries out what follows."""
        if self._plan is not None and self._tasks is not None:
            for action in self._plan.handle(event, self._with.clock.monotonic()):
                self._carry_out(action)

    # ---- what comes in by the links ----------------------------------------------------------------------------------

    def admit(self, sender: PeerId, message: StateChunk, tensor: TensorSpec) -> memoryview | Refusal:
        chunk = message.chunk
        if self._plan is None or not self._plan.expects(sender, chunk):
            return Refusal(False, "this chunk is not wanted, or not any more")
        elements = self._elements_of(chunk)
        if not may_come_as(tensor, elements, self._with.codecs):
            self.handle(ChunkCame(sender, chunk, False))
            raise ProtocolViolation(
                f"chunk {chunk} of a state, {elements} elements, as {tensor.shape} {tensor.dtype.name} in"
                f" {tensor.byte_length} bytes of {tensor.codec.name}: that is no form of it in this run"
            )
        if (sender, chunk) in self._arriving:
            return Refusal(False, "this chunk is on its way already")
        of_sender = sum(peer == sender for peer, _ in self._arriving)
        if of_sender >= self._buffers_of_one or self._pool.in_use >= self._pool.limit:
            self.handle(ChunksRefused(sender, (chunk,), StateRefusal.BUSY))  # by us; it will be asked for again
            return Refusal(True, "too many chunks at once")
        arrival = self._arriving[sender, chunk] = _Arrival(self._pool.take(), tensor)
        return arrival.buffer[: tensor.byte_length]

    def received(self, sender: PeerId, chunk: int, buffer: memoryview) -> None:
        arrival = self._arriving.get((sender, chunk))
        if arrival is not None and arrival.buffer.obj is buffer.obj and self._tasks is not None:
            self._spawn(self._check(sender, chunk, arrival.tensor, buffer))

    def broken_off(self, sender: PeerId, chunk: int, buffer: memoryview) -> None:
        arrival = self._arriving.get((sender, chunk))
        if arrival is not None and arrival.buffer.obj is buffer.obj:
            del self._arriving[sender, chunk]
            self._pool.give_back(arrival.buffer)
            self.handle(ChunkLost(sender, chunk))

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def _begin(self, vectors: tuple[Vector, Vector], known: Anchor | None) -> frozenset[int]:
        """On the thread. Returns the chunks that need not be fetched."""
        folder, digest = self._with.folder, self._list.version.digest
        kept = None if folder is None else KeptChunks(folder, digest, self._layout)
        self._state = PartialState(self._layout, self._list.hashes, vectors, kept)
        return self._state.take_over(known)

    def _finish(self, vectors: tuple[Vector, Vector]) -> None:
        """On the thread, last of all."""
        complete = isinstance(self._end, Complete)
        if self._state is not None:
            self._state.close(complete=complete)
        if not complete:
            self._with.space.give_back(*vectors)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _fetch(self, here: frozenset[int]) -> None:
        chunk_bytes = 4 * self._layout.chunk_elements
        self._plan = Download(self._chunks, chunk_bytes, here, self._donors, self._with.random, self._buffers_of_one)
        async with task_scope() as tasks:
            self._tasks = tasks
            try:
                self._tell_progress()
                while self._end is None:
                    self.handle(Tick())
                    await set_or_after(self._news, TICK_S)
            finally:
                self._tasks = None
                for task in self._running:
                    task.cancel()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Ask(donor, chunks):
                self._spawn(self._ask(donor, chunks))
            case Report(donor, detail):
                log.warning("%s does not send the state that was agreed on: %s", short(donor), detail)
                self._with.on_liar(donor, detail)
            case Complete() | Failed():
                self._end = action
                self._news.set()

    async def _ask(self, donor: PeerId, chunks: tuple[int, ...]) -> None:
        request = StateRequest(self._with.module, self._list.version.digest, chunks)
        try:
            await self._with.transport.tell(donor, request)
        except PeerError as error:
            log.info("could not ask %s for state: %s", short(donor), error)
            self.handle(DonorLost(donor))

    async def _check(self, sender: PeerId, chunk: int, tensor: TensorSpec, data: memoryview) -> None:
        try:
            matches = await self._on_thread(partial(self._place, chunk, tensor, data))
        finally:
            self._pool.give_back(self._arriving.pop((sender, chunk)).buffer)
        if matches:
            self.received_bytes[sender] += tensor.raw_bytes
        crash_point("chunk arrived")
        self.handle(ChunkCame(sender, chunk, matches))
        self._tell_progress()

    def _place(self, chunk: int, tensor: TensorSpec, data: memoryview) -> bool:
        """On the thread. What is no encoding matches no hash either."""
        assert self._state is not None
        try:
            return self._state.place(chunk, self._decoder.bytes_of(tensor, data))
        except ProtocolViolation as error:
            log.info("chunk %d of a state cannot be decoded: %s", chunk, error)
            return False

    def _tell_progress(self) -> None:
        assert self._plan is not None
        total = sum(4 * self._elements_of(chunk) for chunk in range(self._chunks))
        missing = self._plan.missing * 4 * self._layout.chunk_elements
        self._with.on_progress(max(0, total - missing), total)

    def _elements_of(self, chunk: int) -> int:
        index = chunk % self._layout.chunks
        elements = self._layout.range_of(index, index + 1)
        return int(elements.stop - elements.start)

    def _error(self, failed: Failed) -> SkipstoneError:
        number = self._list.version.round
        if failed.kind is FailureKind.NO_DONOR:
            return NoQuorum(
                f"no peer is left that gives the state of round {number}: {failed.detail}",
                hint="It is tried again with the newest state that the module's replicas announce.",
            )
        return Stalled(
            f"nothing more comes of the state of round {number}: {failed.detail}",
            hint=(
                "Check this machine's connection; what has been fetched is kept, and the next attempt goes "
                "on from there."
            ),
        )
