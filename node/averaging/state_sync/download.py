"""Download of an anchor: first a list of chunk hashes that matches the digest, then chunks that match the list."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final

from node.averaging.anchor.anchor import Anchor, version_of
from node.averaging.anchor.shared_vector import Layout, SharedVector, StateVectors
from node.averaging.state_sync.partial_state import PartialState, Space, may_come_as
from node.concurrency.machine_runner import MachineRunner
from node.concurrency.task_groups import task_scope
from node.network.session import NetworkSession
from node.observability.failpoints import crash_point
from protocol.codecs.memory import BufferPool
from protocol.frames.frames import HashList, decode_hash_list
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal, Transport
from swarm.averaging import chunk_download as machine
from swarm.vocabulary.averaging_messages import StateChunk, StateRefusal, StateRefused, StateRequest
from swarm.vocabulary.errors import NoQuorum, PeerError, ProtocolViolation, SkipstoneError, Stalled, Unreachable
from swarm.vocabulary.types import AnchorVersion, Codec, ModuleId, PeerId, short

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
    failed: dict[PeerId, PeerError] = {}
    found: asyncio.Queue[HashList | None] = asyncio.Queue()

    async def ask(donor: PeerId) -> None:
        try:
            found.put_nowait(_proven(await transport.ask(donor, question, ANSWER_S), layout, wanted))
        except PeerError as error:
            failed[donor] = error
            # An honest donor never sends a wrong list.
            if isinstance(error, ProtocolViolation):
                on_liar(donor, str(error))
            found.put_nowait(None)

    async with task_scope() as tasks:
        running = [tasks.create_task(ask(donor)) for donor in asked]
        for _ in running:
            hash_list = await found.get()
            # The first valid list suffices, because the digest proves it.
            if hash_list is not None:
                for task in running:
                    task.cancel()
                return hash_list, tuple(donor for donor in asked if donor not in failed)
    raise _nobody_has(wanted, failed)


def _proven(data: bytes, layout: Layout, wanted: AnchorVersion) -> HashList:
    """Decodes a list of chunk hashes. Raises ProtocolViolation if the list does not match the digest or the layout."""
    said = decode_hash_list(data, digest=wanted.digest, elements=layout.elements, chunk_elements=layout.chunk_elements)
    version = said.version
    if version_of(layout, said.hashes, version.round, version.steps, version.tokens, version.fragment) != version:
        raise ProtocolViolation(f"the hash list does not match state {wanted.digest.hex()[:12]}")
    return said


def _nobody_has(wanted: AnchorVersion, failed: dict[PeerId, PeerError]) -> SkipstoneError:
    failures = "; ".join(f"{short(donor)}: {error}" for donor, error in failed.items()) or "no peer announces it"
    if any(isinstance(error, Unreachable | Stalled) for error in failed.values()):
        return Stalled(
            f"no peer sent the state of round {wanted.round}: {failures}",
            hint="Check this machine's connection to the peers above. The node retries.",
        )
    return NoQuorum(f"no peer has the state of round {wanted.round}: {failures}", hint=TRIED_AGAIN)


FEWEST_BUFFERS: Final = 3
MOST_WAITING: Final = machine.MOST_OWED
BUFFER_BYTES: Final = 16 * 1024 * 1024  # Memory for one donor's chunks that are requested, arriving or being checked


class StateDownloads:
    """Downloader of one module's anchors, one at a time. `on_progress` gets the bytes present and the total."""

    def __init__(
        self,
        session: NetworkSession,
        module: ModuleId,
        space: Space,
        codecs: frozenset[Codec],
        folder: Path | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_liar: Callable[[PeerId, str], None] = lambda donor, detail: None,
    ) -> None:
        self.session = session
        self.module = module
        self.layout = space.layout
        self.codecs = codecs
        self.on_progress = on_progress
        self.on_liar = on_liar
        self.received_bytes: Mapping[PeerId, int] = {}
        self._space = space
        self._folder = folder
        self._random = Random(session.own.peer)  # noqa: S311 - spreads the load over donors; no secret
        self._is_busy = False

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
            raise SkipstoneError("this module already downloads a state")
        self._is_busy = True
        try:
            transport = self.session.transport
            arguments = (transport, self.module, self.layout, wanted, donors, self.on_liar)
            hash_list, having = await first_hash_list(*arguments)
            return hash_list, await self._fetch_chunks(hash_list, having, chunks, known)
        finally:
            self._is_busy = False

    async def _fetch_chunks(
        self, hash_list: HashList, donors: tuple[PeerId, ...], chunks: int, known: Anchor | None
    ) -> StateVectors:
        state = PartialState(hash_list, self._space, self._folder)
        complete = False
        try:
            here = await state.take_over(known)
            chunk_bytes = 4 * self.layout.chunk_elements
            # Limited by memory, but enough to keep the link busy.
            room = max(FEWEST_BUFFERS, min(machine.MOST_OWED, BUFFER_BYTES // chunk_bytes))
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
        super().__init__(plan, machine.Tick(), of.session.transport, of.session.own.clock, MOST_WAITING)
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
                raise Stalled(f"the download of the state of round {number} stalled: {detail}", hint=hint)
            raise NoQuorum(f"no peer is left that serves the state of round {number}: {detail}", hint=TRIED_AGAIN)

    def admit(self, sender: PeerId, message: StateChunk, tensor: TensorSpec) -> memoryview | Refusal:
        chunk = message.chunk
        if not self._is_of(message) or not self._plan.expects(sender, chunk):
            return Refusal(False, "this chunk was not requested")
        elements = self._elements_of(chunk)
        if not may_come_as(tensor, elements, self._of.codecs):
            # An honest donor never sends this, so stop using it.
            self.handle(machine.ChunkArrived(sender, chunk, False))
            raise ProtocolViolation(
                f"chunk {chunk} of {elements} elements came as {tensor.shape} {tensor.dtype.name} in"
                f" {tensor.byte_length} bytes of {tensor.codec.name}, which this run does not allow"
            )
        if (sender, chunk) in self._arriving:
            return Refusal(False, "this chunk is already arriving")
        # Bounds the buffers of one donor.
        of_sender = sum(peer == sender for peer, _ in self._arriving)
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

    def link_down(self, to: PeerId, error: PeerError) -> None:
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
