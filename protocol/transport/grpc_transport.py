"""The transport: one link per pair of peers, over gRPC with mutual TLS, or by calls within a process."""

import asyncio
import contextlib
import math
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc

from protocol.frames.frames import AnnouncementFrame, Farewell, FarewellReason, Hello, decode, encode
from protocol.identity.certificates import TlsCredentials
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import AddressBook, FarEnd, LinkFigures, LinkHandler, Question, Refusal
from protocol.transport.dialer import MAX_REMEMBERED_PEERS, Dialler, Turnover, Ways
from protocol.transport.grpc_streams import AcceptedStream, DialledStream, ServicerContext, make_server
from protocol.transport.handshake import SameKey, expect_hello, objection_to, proven_peer
from protocol.transport.link import Link, LinkSurroundings, receipt_of
from protocol.transport.rate_limits import CommonPatience, Traffic
from protocol.transport.settings import TransportSettings, joined
from swarm.vocabulary.errors import LEAVING, ConfigError, PeerError, ProtocolViolation, Rejected, Stalled, Unreachable
from swarm.vocabulary.pipeline_messages import Backward, ControlMessage, Forward, TensorMessage
from swarm.vocabulary.statistics import Exclusions, ExponentialBackoff
from swarm.vocabulary.types import PROTOCOL_VERSIONS, PeerId, short

MAX_STREAMS_PER_PEER: Final = 3  # The link, its successor after a restart, and one that ends


@dataclass(frozen=True, slots=True, eq=False)
class _Dial:
    """A dial in progress to one peer. `outcome` also gets the link if the peer opens one to us first."""

    outcome: asyncio.Future[Link]
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class LocalLink:
    """The link of `own` to `peer`, with the handlers of both; the two are the same for a path without hops."""

    own: PeerId
    own_handler: LinkHandler
    peer: PeerId
    handler: LinkHandler

    async def send(self, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        admitted = self.handler.admit(self.own, message, tensor)
        if not isinstance(admitted, Refusal):
            admitted[:] = data.cast("B")  # The peer keeps its input longer than we keep our output
            self.handler.received(self.own, message, tensor, admitted)
        elif isinstance(message, Forward | Backward):
            self.own_handler.received_control(self.peer, receipt_of(message, admitted))

    async def send_control(self, message: ControlMessage) -> None:
        self.handler.received_control(self.own, message)

    async def ask(self, question: Question, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.handler.answer(self.own, question)
        except TimeoutError:
            raise Stalled(f"{short(self.peer)}, of this process, did not answer within {timeout_s:g} s") from None
        except PeerError as error:  # about a third peer, perhaps: this one is alive
            raise Rejected(f"{short(self.peer)} refused to answer: {error}") from None


class GrpcTransport:
    """`Transport` over gRPC, as an async context manager. `own_record` returns our SignedRecord, or b""."""

    def __init__(
        self,
        credentials: TlsCredentials,
        address_book: AddressBook,
        handler: LinkHandler,
        clock: Clock,
        settings: TransportSettings,
        *,
        own_record: Callable[[], bytes],
        ways: Ways = Ways(),  # noqa: B008 - immutable
        traffic: Traffic | None = None,  # Of the node, if other transports share it
    ) -> None:
        self._peer, self._run, self._credentials = credentials.peer, credentials.run, credentials
        self._address_book, self._handler, self._own_record = address_book, handler, own_record
        self._clock, self._settings = clock, settings
        self._streams: Counter[PeerId] = Counter()  # Accepted ones that gRPC has not released yet
        self.traffic = traffic or Traffic(clock)
        patience = CommonPatience(clock.monotonic())
        self._surroundings = LinkSurroundings(handler, clock, settings, patience, self.traffic)
        self.incarnation = secrets.randbits(64)  # Distinguishes this process from others with the same key
        self._began = clock.monotonic()
        self._turnover = Turnover(clock)
        waits = ExponentialBackoff(settings.first_retry_s, settings.longest_retry_s)
        self._undialled = Exclusions(waits, jitter=random.random, remembered=MAX_REMEMBERED_PEERS)
        self._dialler = Dialler(credentials, self._own_hello, self.ask, clock, settings, ways)
        self._links: dict[PeerId, Link] = {}
        # To ourselves, for paths without hops, and to peers of this process
        self._local = {self._peer: LocalLink(self._peer, handler, self._peer, handler)}
        self._dials: dict[PeerId, _Dial] = {}
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._closing = False
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        """Starts the gRPC server. Raises ConfigError if the address cannot be bound."""
        address = joined(self._settings.listen_host, self._settings.listen_port)
        most = self._settings.max_links + 16  # spare streams during the handshake
        try:
            self._server, self.port = make_server(self._serve, self._credentials, address, most)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {address}", hint="Choose another port, or stop the program that uses this one."
            ) from None
        await self._tasks.__aenter__()
        starting = asyncio.ensure_future(self._server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # gRPC logs a traceback if its start is cancelled
            await starting
            await self._server.stop(None)
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Sends a Farewell to every peer, then ends all tasks."""
        self._closing = True
        for attempt in list(self._dials.values()):
            attempt.task.cancel()
        for link in list(self._links.values()):
            link.end(Unreachable(LEAVING), Farewell(FarewellReason.LEAVING))
        if self._server is not None:
            await self._server.stop(self._settings.farewell_grace_s)
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=self._settings.farewell_grace_s)
            for task in late:
                task.cancel()
        # Pass only a cancellation to the task group, which may have caused it. It would wrap other errors.
        cancelled = (kind, error, traceback) if isinstance(error, asyncio.CancelledError) else (None, None, None)
        await self._tasks.__aexit__(*cancelled)

    async def send(self, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        await (await self._link_to(peer)).send(message, tensor, data)

    async def send_control(self, peer: PeerId, message: ControlMessage) -> None:
        await (await self._link_to(peer)).send_control(message)

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        return await (await self._link_to(peer)).ask(question, timeout_s)

    async def connect(self, peer: PeerId) -> None:
        """Opens a link to the peer unless a link exists. Raises as `send`."""
        await self._link_to(peer)

    def link_locally(self, other: "GrpcTransport") -> None:
        """Links this peer and another one of this process without a stream, until `unlink_locally`."""
        for here, there in ((self, other), (other, self)):
            here._local[there._peer] = LocalLink(here._peer, here._handler, there._peer, there._handler)
        for here, there in ((self, other), (other, self)):
            if (stream := here._links.get(there._peer)) is not None:  # opened before
                stream.end(Unreachable(f"{short(there._peer)} is in this process"))
            here._handler.link_up(there._peer)
            here._handler.announced(there._peer, there._own_record())

    def unlink_locally(self, other: "GrpcTransport") -> None:
        """Ends the link to another peer of this process, because this one leaves. Only the other is notified."""
        del self._local[other._peer], other._local[self._peer]
        other._handler.link_down(self._peer, Unreachable(LEAVING))  # this one would look for the other by a stream

    def is_linked(self, peer: PeerId) -> bool:
        return peer in self._links or peer in self._local

    def announce(self, record: bytes) -> None:
        for link in list(self._links.values()) if record else ():
            link.say(AnnouncementFrame(record))
        for near in list(self._local.values()) if record else ():
            if near.peer != self._peer:
                near.handler.announced(self._peer, record)

    def here(self) -> tuple[PeerId, ...]:
        """Returns the peers of this process."""
        return tuple(self._local)

    def figures(self) -> dict[PeerId, LinkFigures]:
        return {peer: link.figures() for peer, link in self._links.items()}

    def goodput_bytes_per_s(self, peer: PeerId) -> float:
        """Returns the measured goodput of the link to `peer`, in the sending direction; 0 if unknown."""
        if peer in self._local:
            return math.inf
        link = self._links.get(peer)
        return 0.0 if link is None else link.figures().goodput_bytes_per_s

    def far_end(self, peer: PeerId) -> FarEnd | None:
        link = self._links.get(peer)
        return None if link is None else link.far_end

    async def _link_to(self, peer: PeerId) -> Link | LocalLink:
        link = self._local.get(peer) or self._links.get(peer)
        if link is not None:
            return link
        if self._closing:
            raise Unreachable(LEAVING)
        attempt = self._dials.get(peer) or self._start_dial(peer)
        return await asyncio.shield(attempt.outcome)

    def _install(self, link: Link, hello: Hello) -> None:
        """Registers a new link to its peer and gives it to all waiting callers. Ends an older link to that peer."""
        old = self._links.get(link.peer)
        if old is not None:
            old.end(Unreachable(f"{short(link.peer)} has opened a new link"), Farewell(FarewellReason.DUPLICATE))
            self._turnover.replaced(link.peer)
        self._links[link.peer] = link
        if self._turnover.is_high(link.peer):
            self._undialled.add(link.peer, self._clock.monotonic())
        else:
            self._undialled.forgive(link.peer)
        self._handler.link_up(link.peer)
        if hello.announcement:
            self._handler.announced(link.peer, hello.announcement)
        attempt = self._dials.pop(link.peer, None)
        if attempt is not None:
            attempt.outcome.set_result(link)
            if not link.dialled:
                attempt.task.cancel()

    def _retire(self, link: Link, error: PeerError) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            if link.peer not in self._local:
                self._handler.link_down(link.peer, error)
            self._hear_of_duplicate(link.peer, error)

    def _hear_of_duplicate(self, peer: PeerId, error: PeerError) -> None:
        """Passes the record in a SameKey error, which proves that another process uses our key, to the handler."""
        if isinstance(error, SameKey) and error.record:
            self._handler.announced(peer, error.record)

    def _has_room_for(self, peer: PeerId) -> bool:
        others = (self._links.keys() | self._dials.keys()) - {peer}
        return len(others) < self._settings.max_links

    def _link(self, peer: PeerId, stream: AcceptedStream | DialledStream, hello: Hello) -> Link:
        return Link(
            peer,
            stream,
            hello,
            dialled=isinstance(stream, DialledStream),
            far_end=stream.far_end(),
            surroundings=self._surroundings,
            on_end=self._retire,
        )

    def _own_hello(self) -> Hello:
        age_ms = int(1e3 * (self._clock.monotonic() - self._began))
        lowest, highest = PROTOCOL_VERSIONS.lowest, PROTOCOL_VERSIONS.highest
        return Hello(self._peer, self._run, lowest, highest, self._own_record(), self.incarnation, age_ms)

    def _start_dial(self, peer: PeerId) -> _Dial:
        outcome: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        # Retrieve the error, because all callers may have given up.
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        attempt = _Dial(outcome, self._spawn(self._dial(peer)))
        self._dials[peer] = attempt
        return attempt

    async def _dial(self, peer: PeerId) -> None:
        try:
            stream, hello = await self._connect(peer)
        except PeerError as error:
            self._undialled.add(peer, self._clock.monotonic())
            self._give_up(peer, error)
            self._hear_of_duplicate(peer, error)
            return
        except asyncio.CancelledError:
            self._give_up(peer, Unreachable(LEAVING))
            raise
        link = self._link(peer, stream, hello)
        self._install(link, hello)
        await link.run()

    def _give_up(self, peer: PeerId, error: PeerError) -> None:
        attempt = self._dials.get(peer)
        # If the peer's own stream was accepted, this may be a newer attempt.
        if attempt is not None and attempt.task is asyncio.current_task():
            del self._dials[peer]
            attempt.outcome.set_exception(error)

    async def _connect(self, peer: PeerId) -> tuple[DialledStream, Hello]:
        await asyncio.sleep(self._undialled.left_s(peer, self._clock.monotonic()))
        if not self._has_room_for(peer):
            raise Unreachable(f"all {self._settings.max_links} links are in use")
        contact = self._address_book.contact(peer)
        if contact is None:
            raise Unreachable(f"{short(peer)} is unknown, or has left")
        return await self._dialler.stream_to(contact)

    async def _serve(self, _requests: object, context: ServicerContext) -> None:
        """Handles `Connect` for gRPC: admits the caller and serves its stream in our task group, which sees errors."""
        # If a caller does not read, gRPC cannot end its stream, because the status waits behind the written frames.
        # This is why each peer gets few streams, and why a refusal is a status without frames.
        try:
            peer = proven_peer(AcceptedStream(context).certificate(), self._run)
        except Rejected as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if self._streams[peer] >= MAX_STREAMS_PER_PEER:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too many streams at once from this peer")
        self._streams[peer] += 1
        context.add_done_callback(lambda _context: self._released(peer))
        if self._closing:
            return
        task = self._spawn(self._welcome(peer, AcceptedStream(context)))
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            raise

    def _released(self, peer: PeerId) -> None:
        self._streams -= Counter((peer,))  # and nothing is kept of 0

    async def _welcome(self, peer: PeerId, stream: AcceptedStream) -> None:
        """Reads a caller's Hello. Serves the stream as a link until it ends, or objects to it by a Farewell."""
        try:
            async with asyncio.timeout(self._settings.hello_timeout_s):
                hello = expect_hello(decode(await stream.read() or b""), peer)
            objection = objection_to(hello, self._run, peer) or await self._objection_to_link(hello)
        except ProtocolViolation as error:
            objection = Farewell(FarewellReason.VIOLATION, str(error))
        except TimeoutError:
            objection = Farewell(FarewellReason.UNSPECIFIED, "no Hello arrived in time")
        except PeerError:
            return  # the stream broke, or the peer sent a Farewell
        if objection is not None:
            with contextlib.suppress(PeerError):
                await stream.write(encode(objection))
            return
        link = self._link(peer, stream, hello)
        link.say(self._own_hello())
        self._install(link, hello)
        await link.run()

    async def _objection_to_link(self, hello: Hello) -> Farewell | None:
        """Returns the Farewell for a valid peer whose stream we do not want, such as a second link; else None."""
        peer = hello.peer
        wins = self._peer < peer  # of two streams dialled at once, both keep the one of the smaller peer id
        attempt = self._dials.get(peer)
        if attempt is not None and wins and peer not in self._dialler.called:
            # With a timeout, because the peer may be able to reach us while we cannot reach it.
            await asyncio.wait((attempt.outcome,), timeout=self._settings.dial_timeout_s / 2)
        if self._closing:
            return Farewell(FarewellReason.LEAVING)
        link = self._links.get(peer)
        if peer in self._local:
            return Farewell(FarewellReason.UNSPECIFIED, "this peer is in our own process")
        if link is None:
            full = Farewell(FarewellReason.UNSPECIFIED, "no room for another link")
            return None if self._has_room_for(peer) else full
        if self._turnover.is_high(peer):
            return Farewell(FarewellReason.UNSPECIFIED, "links to you are replaced too often")
        if link.incarnation != hello.incarnation and await link.answers(self._settings.proof_of_life_s):
            return _keep_the_older(link, hello, self._clock.monotonic())
        age_s = self._clock.monotonic() - link.since
        if link.dialled and wins and age_s < self._settings.dial_timeout_s and not link.is_over:
            return Farewell(FarewellReason.DUPLICATE)
        return None

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


def _keep_the_older(link: Link, hello: Hello, now: float) -> Farewell | None:
    """Rejects the younger of two processes with one key: ends its `link`, or returns the objection to its `hello`."""
    if link.began < now - hello.age_ms / 1e3 + 1.0:  # with a tolerance for the Hello's latency
        return _farewell(now - link.began, link.record)
    error = Unreachable(f"{short(link.peer)} runs twice, so the link to the younger process ends")
    link.end(error, _farewell(hello.age_ms / 1e3, hello.announcement))
    return None


def _farewell(age_s: float, record: bytes) -> Farewell:
    return Farewell(FarewellReason.SAME_KEY, f"another process with this key has run for {age_s:.0f} s", record)
