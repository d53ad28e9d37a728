"""A link: one stream between two peers, with independent tasks for reading, writing and pings."""

import asyncio
import contextlib
import enum
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from protocol.frames import frames
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import FarEnd, LinkFigures, LinkHandler, Question, QuestionAbout, Refusal
from protocol.transport.grpc_streams import Stream
from protocol.transport.handshake import meaning_of
from protocol.transport.rate_limits import CommonPatience, Patience, Traffic
from protocol.transport.settings import MAX_OPEN_QUESTIONS, MAX_OPEN_TRANSFERS, TransportSettings
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, SkipstoneError, Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import (
    Backward,
    ControlMessage,
    Direction,
    Forward,
    MicrobatchTensor,
    Receipt,
    ReceiptStatus,
    TensorMessage,
)
from swarm.vocabulary.statistics import Ewma, Latest
from swarm.vocabulary.types import PeerId, short


class ByteBudget:
    """Limit of tensor bytes in flight, first come, first served. A tensor larger than the limit is sent alone."""

    def __init__(self, budget_bytes: int, places: int) -> None:
        self._budget_bytes, self._places = budget_bytes, places
        self.used_bytes, self._used_places = 0, 0
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()
        self._error: PeerError | None = None

    @asynccontextmanager
    async def share(self, size_bytes: int) -> AsyncIterator[None]:
        """Waits until `size_bytes` fit and reserves them within the block. Raises the PeerError passed to `close`."""
        async with self._queue:
            while self._error is None and not self._fits(size_bytes):
                self._freed.clear()
                await self._freed.wait()
            if self._error is not None:
                raise self._error
            self.used_bytes += size_bytes
            self._used_places += 1
        try:
            yield
        finally:
            self.used_bytes -= size_bytes
            self._used_places -= 1
            self._freed.set()

    def close(self, error: PeerError) -> None:
        self._error = error
        self._freed.set()

    def _fits(self, size_bytes: int) -> bool:
        if self._used_places == 0:
            return True
        return self._used_places < self._places and self.used_bytes + size_bytes <= self._budget_bytes


class TrafficClass(enum.Enum):
    """Class of tensors with a separate budget and queue, so that rounds and microbatches cannot delay each other."""

    MICROBATCHES = 0
    BULK = 1  # Rounds and state


MAX_WAITING_BYTES: Final = 1024 * 1024  # Small frames. `put` waits at half of it; the rest is for pongs and answers.


@dataclass(slots=True, eq=False)
class _Sending:
    transfer: frames.OutgoingTransfer
    traffic_class: TrafficClass
    done: asyncio.Future[bool]


class Outbox:
    """Queue of frames and tensors of one link, sent by the task that runs `pump`. `pause_s`: before the next chunk."""

    def __init__(self, budgets: Mapping[TrafficClass, ByteBudget], pause_s: Callable[[], float] = lambda: 0.0) -> None:
        self._budgets = dict(budgets)
        self._pause_s = pause_s
        self._small: deque[bytes] = deque()
        self.waiting_bytes = 0  # Of small frames not yet written to the stream
        # Served in rotation
        self._queues = OrderedDict((traffic_class, deque[_Sending]()) for traffic_class in TrafficClass)
        self._open: dict[int, _Sending] = {}
        self._something_to_send = asyncio.Event()
        self._queue_for_room = asyncio.Lock()
        self._room = asyncio.Event()
        self._room.set()
        self._closed: PeerError | None = None

    def post(self, frame: bytes) -> None:
        """Queues a small frame. Raises Stalled if the peer reads too little, PeerError if the outbox is closed."""
        if self._closed is not None:
            raise self._closed
        if self.waiting_bytes + len(frame) > MAX_WAITING_BYTES:
            raise Stalled(f"the peer does not read: {self.waiting_bytes} bytes are queued for it")
        self._queue(frame)

    async def put(self, frame: bytes) -> None:
        """Queues a small frame once the queue has room for it. Raises PeerError if the outbox is closed."""
        async with self._queue_for_room:  # one waits for room at a time, because thousands may queue here
            while self._closed is None and not self._room.is_set():
                await self._room.wait()
            self.post(frame)

    async def send(
        self, traffic_class: TrafficClass, size_bytes: int, make: Callable[[], frames.OutgoingTransfer]
    ) -> bool:
        """Waits for budget, then sends the tensor from `make`. False if the receiver cancelled it. Raises PeerError."""
        async with self._budgets[traffic_class].share(size_bytes):
            if self._closed is not None:
                raise self._closed
            sending = _Sending(make(), traffic_class, asyncio.get_running_loop().create_future())
            self._open[sending.transfer.number] = sending
            self._queues[traffic_class].append(sending)
            self._something_to_send.set()
            try:
                return await sending.done
            except asyncio.CancelledError:
                self._withdraw(sending)
                raise
            finally:
                self._open.pop(sending.transfer.number, None)

    def stop(self, number: int) -> None:
        """Stops sending a tensor that the receiver has cancelled: its `send` returns False. Ignores ended transfers."""
        sending = self._open.get(number)
        if sending is not None:
            self._withdraw(sending)
            if not sending.done.done():
                sending.done.set_result(False)

    def finish(self, last_frame: bytes | None, error: PeerError) -> None:
        """Closes the outbox. Queued small frames and `last_frame` are still sent; everything else raises `error`."""
        if self._closed is not None:
            return
        if last_frame is not None:
            self._queue(last_frame)
        self._closed = error
        for queue in self._queues.values():
            queue.clear()
        for sending in self._open.values():
            if not sending.done.done():
                sending.done.set_exception(error)
        for budget in self._budgets.values():
            budget.close(error)
        self._room.set()
        self._something_to_send.set()

    async def pump(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes queued frames with `write` until `finish` is called. Raises as `write`."""
        while True:
            if self._small:
                frame = self._small.popleft()
                self.waiting_bytes -= len(frame)
                if self.waiting_bytes <= MAX_WAITING_BYTES // 2:
                    self._room.set()
                await write(frame)
            elif self._closed is not None:
                return
            elif (sending := self._first()) is None:
                self._something_to_send.clear()
                await self._something_to_send.wait()
            elif (pause_s := self._pause_s()) > 0:
                self._something_to_send.clear()
                with contextlib.suppress(TimeoutError):  # small frames do not wait
                    await asyncio.wait_for(self._something_to_send.wait(), pause_s)
            else:
                await self._write_turn(sending, write)

    async def _write_turn(self, sending: _Sending, write: Callable[[bytes], Awaitable[None]]) -> None:
        queue = self._queues[sending.traffic_class]
        queue.popleft()
        self._queues.move_to_end(sending.traffic_class)
        frame = sending.transfer.next_frame()
        if not sending.transfer.finished:
            queue.append(sending)
        # Runs while `write` waits for the stream, which takes about as long as copying and hashing a chunk.
        asyncio.get_running_loop().call_soon(self._prepare_turn)
        await write(frame)
        if sending.transfer.finished and not sending.done.done():
            sending.done.set_result(True)

    def _first(self) -> _Sending | None:
        return next((queue[0] for queue in self._queues.values() if queue), None)

    def _prepare_turn(self) -> None:
        if (following := self._first()) is not None:
            following.transfer.prepare()

    def _withdraw(self, sending: _Sending) -> None:
        """Removes a tensor from the queue. Sends Cancel if the receiver knows the transfer and expects more chunks."""
        queue = self._queues[sending.traffic_class]
        if sending in queue:
            queue.remove(sending)
            if sending.transfer.begun and self._closed is None:
                # Not by `post`, because this frame must be sent. The number of transfers bounds these frames.
                self._queue(frames.encode(frames.Cancel(sending.transfer.number)))

    def _queue(self, frame: bytes) -> None:
        self._small.append(frame)
        self.waiting_bytes += len(frame)
        if self.waiting_bytes > MAX_WAITING_BYTES // 2:
            self._room.clear()
        self._something_to_send.set()


@dataclass(slots=True, eq=False)
class Inbox:
    """Incoming tensors on the link to `peer`. `reply` queues a small frame to that peer."""

    peer: PeerId
    handler: LinkHandler
    clock: Clock
    reply: Callable[[frames.SmallFrame], None]
    _: KW_ONLY
    odd_numbers: bool
    stall_after_s: float
    slowest_bytes_per_s: float
    _arrivals: dict[int, frames.Arrival] = field(default_factory=dict, init=False)
    _progressed_at: float = field(default=0.0, init=False)  # On a slow link tensors take turns for many seconds

    def owns(self, transfer: int) -> bool:
        """Whether the peer may use this transfer number: odd for the dialling peer, even for the other."""
        return (transfer % 2 == 1) == self.odd_numbers

    def open(self, frame: frames.TensorFrame) -> None:
        """Admits an incoming tensor by its header, or refuses it with a reply. Raises ProtocolViolation."""
        number = frame.transfer
        if not self.owns(number) or number in self._arrivals:
            raise ProtocolViolation(f"transfer number {number} is in use, or reserved for this side")
        if len(self._arrivals) >= MAX_OPEN_TRANSFERS:
            raise ProtocolViolation(f"more than {MAX_OPEN_TRANSFERS} transfers at once")
        admitted = self.handler.admit(self.peer, frame.message, frame.tensor)
        if isinstance(admitted, Refusal):
            self._arrivals[number] = frames.Arrival(frame)
            if isinstance(frame.message, Forward | Backward):
                self.reply(receipt_of(frame.message, admitted))
            self.reply(frames.Cancel(number))
            return
        if admitted.nbytes != frame.tensor.byte_length or admitted.readonly or not admitted.c_contiguous:
            raise SkipstoneError(f"the handler gave {admitted.nbytes} bytes for {frame.tensor.byte_length} bytes")
        self._progressed_at = self.clock.monotonic()
        deadline = self._progressed_at + self.stall_after_s + admitted.nbytes / self.slowest_bytes_per_s
        self._arrivals[number] = frames.Assembly(frame, admitted, deadline)

    def add(self, chunk: frames.Chunk) -> frames.TensorFrame | None:
        """Adds a chunk to its tensor. Returns the header of an admitted, complete tensor. Raises ProtocolViolation."""
        arrival = self._arrivals.get(chunk.transfer)
        if arrival is None:
            raise ProtocolViolation(f"a chunk of transfer {chunk.transfer}, which is not open")
        arrival.add(chunk)
        if arrival.complete:
            del self._arrivals[chunk.transfer]
        if not isinstance(arrival, frames.Assembly):
            return None
        self._progressed_at = self.clock.monotonic()
        if not arrival.complete:
            return None
        self.handler.received(self.peer, arrival.frame.message, arrival.frame.tensor, arrival.buffer)
        return arrival.frame

    def withdrawn(self, transfer: int) -> None:
        arrival = self._arrivals.pop(transfer, None)
        if isinstance(arrival, frames.Assembly):
            self._break_off(arrival, Unreachable(f"{short(self.peer)} cancelled transfer {transfer}"))

    def break_off_slow(self) -> None:
        """Cancels incoming tensors that miss their deadline, or all if they stall; returns their buffers."""
        now = self.clock.monotonic()
        for number, arrival in list(self._arrivals.items()):
            if not isinstance(arrival, frames.Assembly) or self._arrivals.get(number) is not arrival:
                continue  # a reply may end the link, and with it all transfers
            if now > arrival.deadline or now - self._progressed_at > self.stall_after_s:
                self._arrivals[number] = arrival.swallowing_the_rest()
                self.reply(frames.Cancel(number))
                self._break_off(arrival, Stalled(f"transfer {number} from {short(self.peer)} made too little progress"))

    def forgive(self, seconds: float) -> None:
        """Extends the deadlines of all incoming tensors by the seconds for which this process was suspended."""
        self._progressed_at += seconds
        for arrival in self._arrivals.values():
            if isinstance(arrival, frames.Assembly):
                arrival.deadline += seconds

    def close(self, error: PeerError) -> None:
        arrivals, self._arrivals = self._arrivals, {}
        for arrival in arrivals.values():
            if isinstance(arrival, frames.Assembly):
                self._break_off(arrival, error)

    def _break_off(self, arrival: frames.Assembly, error: PeerError) -> None:
        self.handler.broken_off(self.peer, arrival.frame.message, arrival.buffer, error)


def receipt_of(message: MicrobatchTensor, refusal: Refusal) -> Receipt:
    """Returns the receipt that tells a sender of its refused tensor."""
    return Receipt(
        message.microbatch,
        Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD,
        message.position,
        ReceiptStatus.BUSY if refusal.busy else ReceiptStatus.REFUSED,
        refusal.retry_after_s,
        refusal.detail,
    )


IDLE_BYTES: Final = 1024  # Bytes per ping period, both directions, up to which a link is idle
IDLE_PERIODS: Final = 15  # Ping periods without traffic after which a link is pinged less often
IDLE_TIMES: Final = 4.0
HORIZON_S: Final = 1.0  # Busy time after which a measurement's weight is 1/e, in seconds
MOST_ON_THE_WAY: Final = 1024  # Most tensors in flight that are measured


@dataclass(slots=True)
class Goodput:
    """Estimate of a link's goodput in the sending direction, from tensors whose receipt the peer has confirmed."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _round_trip_s: float = math.inf
    _busy_since: float = 0.0
    # Size and start of sending, in order
    _on_the_way: Latest[int, tuple[int, float]] = field(default_factory=lambda: Latest(MOST_ON_THE_WAY))

    @property
    def bytes_per_s(self) -> float:
        """Goodput in bytes per second; 0 before the first measurement."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def sent(self, transfer: int, size_bytes: int, now: float) -> None:
        if not self._on_the_way:
            self._busy_since = now
        self._on_the_way[transfer] = size_bytes, now

    def accepted(self, transfer: int, round_trip_s: float, now: float) -> None:
        """Adds one sample of goodput: the receiver has read a whole tensor. Ignores unknown and repeated transfers."""
        known = self._on_the_way.pop(transfer, None)
        if known is None:
            return
        if round_trip_s > 0:
            self._round_trip_s = min(self._round_trip_s, round_trip_s)
        trip_s = 0.0 if math.isinf(self._round_trip_s) else self._round_trip_s
        taken = max(0.0, now - self._busy_since - trip_s)
        remembered = math.exp(-taken / HORIZON_S)
        self._bytes = remembered * self._bytes + known[0]
        self._seconds = remembered * self._seconds + taken
        # The next tensor in flight has used the link since it became free, or since that tensor was sent, if later.
        _, given = next(iter(self._on_the_way.values()), (0, now))
        self._busy_since = max(self._busy_since, now - trip_s, given)

    def gave_up(self, transfer: int) -> None:
        """Removes a sent tensor from the measurement, because its receipt will not be confirmed."""
        self._on_the_way.pop(transfer, None)


class Meter:
    """Measurements of one link: round-trip time, goodput, bytes, and time since the last received frame."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._round_trip = Ewma(1 / 8)  # the weight of RFC 6298, section 2
        self._goodput = Goodput()
        self._behind = Latest[int, int](MOST_ON_THE_WAY)  # Ping token -> transfer that it follows
        self._sent_bytes, self._received_bytes = 0, 0
        self._heard_at = clock.monotonic()
        self._pinged_at = 0.0
        self._open_token: int | None = None
        self._tokens = itertools.count(1)

    def wrote(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes

    def heard(self, size_bytes: int) -> None:
        self._received_bytes += size_bytes
        self._heard_at = self._clock.monotonic()

    def silence_s(self) -> float:
        return self._clock.monotonic() - self._heard_at

    def forgive(self, seconds: float) -> None:
        """Excludes the seconds for which this process was suspended from the peer's time of silence."""
        now = self._clock.monotonic()
        self._heard_at, self._pinged_at = min(self._heard_at + seconds, now), min(self._pinged_at + seconds, now)

    def ping(self) -> int:
        """Begins to measure the round trip; a measurement in progress ends. Returns the token of the ping to send."""
        self._open_token = next(self._tokens)
        self._pinged_at = self._clock.monotonic()
        return self._open_token

    def pong(self, token: int) -> bool:
        """Updates the round trip or goodput from a pong. Returns whether it answers the last ping made by `ping`."""
        transfer = self._behind.pop(token, None)
        if transfer is not None:
            self._goodput.accepted(transfer, self._round_trip.mean, self._clock.monotonic())
        if token != self._open_token:
            return False
        self._open_token = None
        self._round_trip.add(self._clock.monotonic() - self._pinged_at)
        return True

    def unanswered_s(self) -> float:
        """Returns the seconds since the ping that awaits its pong; 0 if none does."""
        return 0.0 if self._open_token is None else self._clock.monotonic() - self._pinged_at

    def sending(self, transfer: int, size_bytes: int) -> None:
        self._goodput.sent(transfer, size_bytes, self._clock.monotonic())

    def ping_after(self, transfer: int) -> int:
        """Returns the token of a ping to send after a tensor. The pong shows that the peer has read that tensor."""
        token = next(self._tokens)
        self._behind[token] = transfer
        return token

    def gave_up(self, transfer: int) -> None:
        self._goodput.gave_up(transfer)

    def figures(self) -> LinkFigures:
        goodput = self._goodput.bytes_per_s
        return LinkFigures(self._round_trip.mean, self._sent_bytes, self._received_bytes, goodput)


class Asking:
    """Questions that we have sent to a peer and that still wait for answers."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._places = asyncio.Semaphore(MAX_OPEN_QUESTIONS)
        self._open: dict[int, tuple[QuestionAbout, asyncio.Future[bytes]]] = {}
        self._next_id = 1
        self._closed: PeerError | None = None

    async def ask(self, question: Question, timeout_s: float, say: Callable[[frames.SmallFrame], None]) -> bytes:
        """Sends a question and waits for its answer; at most MAX_OPEN_QUESTIONS are open. Raises as `Transport.ask`."""
        try:
            async with asyncio.timeout(timeout_s), self._places:
                if self._closed is not None:
                    raise self._closed
                number, self._next_id = self._next_id, self._next_id % (2**32 - 1) + 1
                result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                self._open[number] = (question.about, result)
                try:
                    say(frames.QuestionFrame(number, question))
                    return await result
                finally:
                    del self._open[number]
        except TimeoutError:
            what = f"{short(self._peer)} did not answer a {question.about.value} question"
            raise Stalled(f"{what} within {timeout_s:g} s") from None

    def answered(self, answer: frames.AnswerFrame) -> None:
        """Completes the question of an answer, if it still waits. Raises ProtocolViolation if their subjects differ."""
        about, result = self._open.get(answer.id, (None, None))
        if result is None or result.done():
            return
        if answer.about is None:
            result.set_exception(Rejected(f"{short(self._peer)} refused to answer: {answer.content.decode()}"))
        elif answer.about is about:
            result.set_result(answer.content)
        else:
            raise ProtocolViolation(f"answer {answer.id} does not match its question")

    def close(self, error: PeerError) -> None:
        self._closed = error
        for _, result in self._open.values():
            if not result.done():
                result.set_exception(error)


@dataclass(slots=True, eq=False)
class Answering:
    """Questions that a peer has sent to us, each answered in a separate task of the link."""

    peer: PeerId
    handler: LinkHandler
    tasks: asyncio.TaskGroup
    say: Callable[[frames.SmallFrame], None]
    _open: int = 0

    def asked(self, frame: frames.QuestionFrame) -> None:
        if self._open >= MAX_OPEN_QUESTIONS:
            self.say(_refusal(frame, f"{MAX_OPEN_QUESTIONS} questions are open already"))
            return
        self._open += 1
        self.tasks.create_task(self._answer(frame))

    async def _answer(self, frame: frames.QuestionFrame) -> None:
        try:
            content = await self.handler.answer(self.peer, frame.question)
        except PeerError as error:
            answer = _refusal(frame, str(error))
        else:
            answer = frames.AnswerFrame(frame.id, frame.question.about, content)
            if len(content) > frames.MAX_ANSWER_BYTES:
                why = f"the answer has {len(content)} bytes, more than the {frames.MAX_ANSWER_BYTES} allowed"
                answer = _refusal(frame, why)
        finally:
            self._open -= 1
        self.say(answer)


def _refusal(frame: frames.QuestionFrame, why: str) -> frames.AnswerFrame:
    return frames.AnswerFrame(frame.id, None, why.encode())


class _Over(Exception):
    pass


@dataclass(frozen=True, slots=True)
class LinkSurroundings:
    """Handler, clock, settings, common frame budget and traffic, shared by all links of a transport."""

    handler: LinkHandler
    clock: Clock
    settings: TransportSettings
    patience: CommonPatience
    traffic: Traffic


class Link:
    """A link to `peer`, on a stream whose Hellos were exchanged. `dialled`: whether this side opened the stream."""

    def __init__(
        self,
        peer: PeerId,
        stream: Stream,
        hello: frames.Hello,
        *,
        dialled: bool,
        far_end: FarEnd | None,
        surroundings: LinkSurroundings,
        on_end: "Callable[[Link, PeerError], None]",
    ) -> None:
        settings = surroundings.settings
        self.peer, self.dialled, self.far_end = peer, dialled, far_end
        self.since = surroundings.clock.monotonic()
        self.incarnation = hello.incarnation
        self.began = self.since - hello.age_ms / 1e3  # Start of the peer's process on our monotonic clock
        self.record = hello.announcement  # The peer's newest record, unverified
        self.outbox = Outbox(
            {
                TrafficClass.MICROBATCHES: ByteBudget(settings.send_budget_bytes, settings.max_open_transfers),
                TrafficClass.BULK: ByteBudget(settings.send_budget_bytes, settings.max_bulk_transfers),
            },
            surroundings.traffic.sent.pause_s,
        )
        self._stream, self._settings, self._on_end = stream, settings, on_end
        self._handler, self._clock = surroundings.handler, surroundings.clock
        self._meter, self._traffic = Meter(surroundings.clock), surroundings.traffic
        self._patience = Patience(surroundings.patience, self.since)
        self._asking = Asking(peer)
        self._inbox = Inbox(
            peer,
            surroundings.handler,
            surroundings.clock,
            self.say,
            odd_numbers=not dialled,
            stall_after_s=settings.stall_after_s,
            slowest_bytes_per_s=settings.slowest_bytes_per_s,
        )
        self._next_transfer = 1 if dialled else 2
        self._last_words: frames.Farewell | None = None
        self._error: PeerError | None = None
        self._over = asyncio.Event()
        self._ponged = asyncio.Event()

    async def run(self) -> None:
        """Reads, writes and pings on the stream until the link ends. Call it once."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._until_error(self._read(tasks)))
                writer = tasks.create_task(self._until_error(self._write()))
                tasks.create_task(self._until_error(self._keep_alive()))
                await self._over.wait()
                if self._last_words is not None:
                    # The dialling side waits for the other side to end the stream, because a cut overtakes a Farewell.
                    last = (writer, reader) if self.dialled else (writer,)
                    await asyncio.wait(last, timeout=self._settings.farewell_grace_s)
                raise _Over
        except* _Over:
            pass
        finally:
            self.end(Unreachable(f"the link to {short(self.peer)} was closed"))
            await self._stream.close()

    def end(self, error: PeerError, last_words: frames.Farewell | None = None) -> None:
        """Closes the link. Everything in flight fails with `error` at once. Later calls have no effect."""
        if self._error is not None:
            return
        self._error = error
        self._last_words = last_words
        self.outbox.finish(None if last_words is None else frames.encode(last_words), error)
        self._asking.close(error)
        self._inbox.close(error)
        self._over.set()
        self._on_end(self, error)

    async def send(self, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        octets = data.cast("B")
        if octets.nbytes != tensor.byte_length:
            raise ValueError(f"{octets.nbytes} bytes of data for a tensor of {tensor.byte_length} bytes")
        traffic_class = TrafficClass.MICROBATCHES if isinstance(message, Forward | Backward) else TrafficClass.BULK
        most = self._settings.bulk_chunk_bytes if traffic_class is TrafficClass.BULK else self._settings.chunk_bytes
        number = 0

        def make() -> frames.OutgoingTransfer:
            nonlocal number
            number, self._next_transfer = self._next_transfer, (self._next_transfer + 2) % 2**32
            chunk_bytes = frames.chunk_bytes_for(self._meter.figures().goodput_bytes_per_s, most)
            header = frames.TensorFrame(message, tensor, number, frames.chunk_count_of(octets.nbytes, chunk_bytes))
            self._meter.sending(number, octets.nbytes)
            return frames.OutgoingTransfer(number, frames.encode(header), octets, chunk_bytes)

        handed_over = False
        try:
            handed_over = await self.outbox.send(traffic_class, octets.nbytes, make)
        finally:
            if not handed_over:
                self._meter.gave_up(number)
        if handed_over:
            self.say(frames.Ping(self._meter.ping_after(number)))
            self._patience.exchanged(_hops_of(message))

    async def send_control(self, message: ControlMessage) -> None:
        await self.outbox.put(frames.encode(message))

    async def ask(self, question: Question, timeout_s: float) -> bytes:
        return await self._asking.ask(question, timeout_s, self.say)

    def say(self, frame: frames.SmallFrame) -> None:
        """Queues a small frame without waiting. Ends the link if the peer reads too little."""
        try:
            self.outbox.post(frames.encode(frame))
        except PeerError as error:
            self.end(error)

    @property
    def is_over(self) -> bool:
        return self._error is not None

    async def answers(self, within_s: float) -> bool:
        """Pings the peer. Returns whether it answers within `within_s` seconds and the link is still open."""
        self._ponged.clear()
        self.say(frames.Ping(self._meter.ping()))
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._ponged, self._over)]
        try:
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        return self._ponged.is_set() and not self._over.is_set()

    def figures(self) -> LinkFigures:
        return self._meter.figures()

    async def _until_error(self, part: Coroutine[None, None, None]) -> None:
        try:
            await part
        except ProtocolViolation as error:
            self.end(error, frames.Farewell(frames.FarewellReason.VIOLATION, str(error)))
        except PeerError as error:
            self.end(error)

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        answering = Answering(self.peer, self._handler, tasks, self.say)
        while (data := await self._stream.read()) is not None:
            if self._error is None:
                self._meter.heard(len(data))
                self._traffic.received.moved(len(data))
                small = not frames.is_chunk(data)
                topic = frames.topic_of(data) if small else None
                frame = frames.decode(data) if topic is None or self._handler.minds(self.peer, topic) else None
                if frame is not None:
                    self._dispatch(frame, answering)
                if small:  # do not charge answers by length: we have asked for them
                    octets = 0 if isinstance(frame, frames.AnswerFrame) else len(data)
                    serves = self._handler.serves(self.peer)
                    pause_s = self._patience.heard(self._clock.monotonic(), octets, serves=serves)
                else:
                    pause_s = self._traffic.received.pause_s()
                if pause_s > 0 and self._error is None:
                    await asyncio.sleep(pause_s)
        raise Unreachable(f"the stream to {short(self.peer)} ended without a farewell")

    async def _write(self) -> None:
        await self.outbox.pump(self._write_frame)
        await self._stream.half_close()

    async def _write_frame(self, frame: bytes) -> None:
        self._traffic.sent.moved(len(frame))
        await self._stream.write(frame)
        self._meter.wrote(len(frame))

    async def _keep_alive(self) -> None:
        limit_s = self._settings.stall_after_s
        period, carried, idle = min(self._settings.ping_period_s, limit_s / 4), 0, 0
        while True:
            before = self._clock.monotonic()
            await asyncio.sleep(period)
            overslept = self._clock.monotonic() - before - period
            if overslept > period:
                self._meter.forgive(overslept)
                self._inbox.forgive(overslept)
            silence_s, unanswered_s = self._meter.silence_s(), self._meter.unanswered_s()
            if silence_s > limit_s and unanswered_s > limit_s / 4:
                raise Stalled(f"{short(self.peer)} was silent for {silence_s:.1f} s")
            self._inbox.break_off_slow()
            figures, before_bytes = self._meter.figures(), carried
            carried = figures.sent_bytes + figures.received_bytes
            idle = 0 if carried - before_bytes > IDLE_BYTES else idle + 1
            # On an idle link one side's ping, which is answered, serves both.
            quiet_s = period * random.uniform(1.0, 2.0) * (IDLE_TIMES if idle > IDLE_PERIODS else 1.0)  # noqa: S311 - not a secret
            if not unanswered_s and (not idle or silence_s > quiet_s):
                self.say(frames.Ping(self._meter.ping()))

    def _dispatch(self, frame: frames.Frame, answering: Answering) -> None:
        match frame:
            case frames.Chunk():
                if (whole := self._inbox.add(frame)) is not None:
                    self._patience.exchanged(_hops_of(whole.message))
            case frames.TensorFrame():
                self._inbox.open(frame)
            case frames.Ping(token):
                self.say(frames.Pong(token))
            case frames.Pong(token):
                if self._meter.pong(token):
                    self._ponged.set()
            case frames.Cancel(transfer) if self._inbox.owns(transfer):
                self._inbox.withdrawn(transfer)
            case frames.Cancel(transfer):
                self.outbox.stop(transfer)
            case frames.QuestionFrame():
                answering.asked(frame)
            case frames.AnswerFrame():
                self._asking.answered(frame)
            case frames.AnnouncementFrame(record):
                self.record = record
                self._handler.announced(self.peer, record)
            case frames.Farewell():
                raise meaning_of(frame, self.peer)
            case frames.Hello():
                raise ProtocolViolation("a second Hello on one stream")
            case _:
                self._handler.received_control(self.peer, frame)


def _hops_of(message: TensorMessage) -> int:
    return len(message.path.hops) if isinstance(message, Forward | Backward) else 0
