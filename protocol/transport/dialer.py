"""Opens a stream to a peer: by dialling it, by calling it (reverse connection), or through a tunnel."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from protocol.frames.frames import Hello, decode, encode
from protocol.identity.certificates import TlsCredentials
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import AddressBook, Ask, Contact, FarEnd, Question, QuestionAbout, Tunnels
from protocol.transport.grpc_streams import DialledStream, open_channel
from protocol.transport.handshake import Duplicate, expect_hello, objection_error, objection_to
from protocol.transport.settings import TransportSettings, host_of
from swarm.vocabulary.errors import PeerError, Rejected, Unreachable
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import PeerId, short

MAX_REMEMBERED_PEERS: Final = 1024
MOST_REPLACED: Final = 3
REPLACED_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to reach peers that cannot be dialled: reverse calls and tunnels. By default such peers must dial us."""

    caller: "Calls | None" = None
    tunnels: Tunnels | None = None


@dataclass(slots=True, eq=False)
class Dialler:
    """Opener of streams by address, reverse call or tunnel. `own` makes our Hello; `ask` sends a peer a question."""

    credentials: TlsCredentials
    own: Callable[[], Hello]
    ask: Ask
    clock: Clock
    settings: TransportSettings
    ways: Ways
    called: set[PeerId] = field(default_factory=set, init=False)  # Peers that we asked to dial us

    async def stream_to(self, contact: Contact) -> tuple[DialledStream, Hello]:
        """Opens a stream to a peer. Must be cancelled if the peer opens a stream to us instead. Raises PeerError."""
        caller = self.ways.caller
        if not contact.addresses and caller is None:
            raise Unreachable(f"{short(contact.peer)} has no known address")
        if not contact.addresses and caller is not None and caller.can_be_dialled():
            await self._wait_for_call(caller, contact)
        pause_s = self.settings.first_retry_s if contact.addresses else 1.0  # each tunnel costs three peers
        deadline = self.clock.monotonic() + self.settings.dial_timeout_s
        while True:
            try:
                return await self._attempt(contact)
            except Duplicate:
                # The peer's own stream will end this attempt. If it failed, open ours.
                if self.clock.monotonic() > deadline:
                    raise
                await asyncio.sleep(pause_s)

    async def _attempt(self, contact: Contact) -> tuple[DialledStream, Hello]:
        timeout_s = self.settings.dial_timeout_s
        if contact.addresses:
            return await dial(contact, self.credentials, self.own(), timeout_s)
        if self.ways.tunnels is None or not contact.certificate:
            why = "both are behind address translation and no relay is available"
            raise Unreachable(f"{short(contact.peer)} cannot be dialled, nor can this node: {why}")
        # Each attempt needs a new tunnel, because a tunnel carries one connection.
        through = replace(contact, addresses=(await self.ways.tunnels.way_to(contact),))
        return await dial(through, self.credentials, self.own(), timeout_s, is_tunnel=True)

    async def _wait_for_call(self, caller: "Calls", contact: Contact) -> NoReturn:
        limit_s = self.settings.dial_timeout_s
        self.called.add(contact.peer)
        try:
            async with asyncio.timeout(limit_s):
                await caller.call(contact, self.ask, limit_s)
                await asyncio.Event().wait()  # cancelled by the incoming stream
        except TimeoutError:
            pass
        finally:
            self.called.discard(contact.peer)
        raise Unreachable(f"{short(contact.peer)} was called, but opened no link within {limit_s:g} s")


async def dial(
    contact: Contact, credentials: TlsCredentials, own: Hello, timeout_s: float, *, is_tunnel: bool = False
) -> tuple[DialledStream, Hello]:
    """Dials a peer, exchanges Hellos. Raises Unreachable, Duplicate, Rejected, StaleVersion, ProtocolViolation."""
    try:
        async with asyncio.timeout(timeout_s):
            stream = await _first_that_answers(contact, credentials, encode(own), timeout_s, is_tunnel=is_tunnel)
            return await _introduced(stream, contact, own)
    except TimeoutError:
        where = ", ".join(contact.addresses)
        raise Unreachable(f"{short(contact.peer)} did not answer at {where} within {timeout_s:g} s") from None


async def _first_that_answers(
    contact: Contact, credentials: TlsCredentials, hello: bytes, timeout_s: float, *, is_tunnel: bool
) -> DialledStream:
    """Connects to the contact's first address that answers, and sends our Hello. Raises the last address's error."""
    error: PeerError = Unreachable(f"{short(contact.peer)} has no known address")
    for address in contact.addresses:
        try:
            channel = open_channel(contact, address, credentials)
            # A tunnel's local end is ours: as the peer's host we would probe our own ports.
            host = "" if is_tunnel else host_of(address)
            stream = DialledStream(channel, FarEnd(host, contact.certificate))
        except Unreachable as unusable:
            error = unusable
            continue
        try:
            async with asyncio.timeout(timeout_s / len(contact.addresses)):
                await stream.write(hello)
                return stream
        except (Unreachable, Rejected) as failed:
            await stream.close()
            error = type(failed)(f"{short(contact.peer)} at {address}: {failed}")
        except TimeoutError:
            await stream.close()
            error = Unreachable(f"{short(contact.peer)} at {address}: no answer")
        except BaseException:
            await stream.close()
            raise
    raise error


async def _introduced(stream: DialledStream, contact: Contact, own: Hello) -> tuple[DialledStream, Hello]:
    try:
        first = await stream.read()
        if first is None:
            raise Unreachable(f"{short(contact.peer)} ended the stream without a Hello")
        hello = expect_hello(decode(first), contact.peer)
        objection = objection_to(hello, own.run, contact.peer)
        if objection is not None:
            await stream.write(encode(objection))
            raise objection_error(objection, contact.peer)
    except BaseException:
        await stream.close()
        raise
    return stream, hello


class Turnover:
    """Log of each peer's recent replacements of its link to us. Honest peers replace a link only after a restart."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._replaced = Latest[PeerId, deque[float]](MAX_REMEMBERED_PEERS)

    def replaced(self, peer: PeerId) -> None:
        earlier = self._replaced.get(peer, ())
        self._replaced[peer] = deque((*earlier, self._clock.monotonic()), maxlen=MOST_REPLACED)

    def is_high(self, peer: PeerId) -> bool:
        """Whether the peer replaced its link MOST_REPLACED times within REPLACED_WITHIN_S."""
        times = self._replaced.get(peer, deque[float]())
        return len(times) == MOST_REPLACED and self._clock.monotonic() - times[0] < REPLACED_WITHIN_S


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls: asks a peer to dial us through each forwarding peer in turn. `own_record` has our addresses."""

    book: AddressBook
    clock: Clock
    own_record: Callable[[], bytes]
    can_be_dialled: Callable[[], bool]  # Whether this peer can be dialled, so that a call can succeed

    async def call(self, contact: Contact, ask: Ask, patience_s: float) -> None:
        """Asks a peer to dial us; returns when the link is reported open. Raises Unreachable."""
        question = Question(QuestionAbout.CALL, peer=contact.peer, record=self.own_record())
        deadline = self.clock.monotonic() + patience_s
        # Only through peers that can be dialled, so that a call never needs another call.
        known = [self.book.contact(peer) for peer in contact.via]
        through = [each.peer for each in known if each is not None and each.addresses]
        said = "all peers that could forward the call are unknown"
        for place, peer in enumerate(through):  # each but the last gets half of the time left
            left_s = max(0.0, deadline - self.clock.monotonic())
            share_s = left_s if place == len(through) - 1 else left_s / 2
            try:
                async with asyncio.timeout(share_s):  # the timeout of `ask` does not include opening a link
                    await ask(peer, question, share_s)
                    return
            except TimeoutError:
                said = f"{short(peer)} did not answer within {share_s:.1f} s"
            except PeerError as error:
                said = str(error)
        raise Unreachable(f"{short(contact.peer)} cannot be dialled, and calling it failed: {said}")
